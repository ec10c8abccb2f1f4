"""Stage 8, benchmark: what the draft gives when vLLM serves it, beside n-gram and no speculation.

Reads    models/draft, data/prompts/prompts.jsonl (held-out questions), data/verifier.json;
         params `benchmark.*`, `verifier.*`, `generate.thinking`, `generate.thinking_switch`
Writes   reports/benchmark.json
Run      python -m pipeline.benchmark

The same questions go, greedy, to three servers of the same verifier; with
`benchmark.side_by_side` the three are up together and take turns, so that noise of the machine
hits all alike. Speeds are compared as ratios within one round, medians over the rounds.
Acceptance comes from vLLM's own counters, taken one request at a time in the first round.
"""

import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import DataError, ServerError
from pipeline.params import NEUTRAL_SAMPLING, Benchmark, Params, load_params
from pipeline.progress import Bar, progress_bar
from pipeline.records import DRAFT, PROMPTS_PATH, PROVENANCE, Split
from pipeline.resume import read_json, read_jsonl, write_json
from pipeline.server import Endpoint, draft_config, serve_all, speculative_args
from pipeline.stage import run_stage
from pipeline.verifier import load_verifier

METRICS_PATH = Path("reports/benchmark.json")
TIMEOUT_S = 3600
# Every round is the first: what an earlier one left in the cache must not make a later one faster.
COMMON_ARGS = ["--no-enable-prefix-caching"]

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **NEUTRAL_SAMPLING}

Outputs = dict[str, list[int]]  # request key → generated token ids


def check_thinking(draft: Path, thinking: bool) -> None:
    """Raises DataError when the draft was trained on answers of the other mode: it would be judged
    on tokens it never saw."""
    trained = read_json(draft / PROVENANCE)["thinking"]
    if trained != thinking:
        raise DataError(
            f"{draft} was trained with generate.thinking: {trained}, to be served is {thinking}; "
            "`dvc repro` trains it anew"
        )


def main() -> None:
    params = load_params()
    load_verifier()
    if not (DRAFT / "config.json").is_file():
        raise DataError(f"{DRAFT} holds no draft; `dvc repro train` makes it")
    check_thinking(DRAFT, params.generate.thinking)
    requests = benchmark_requests(params)
    rounds = measure(requests, params)
    report = report_of(rounds, params.benchmark)
    write_json(METRICS_PATH, report)
    lengths, speedup = report["acceptance_length"], report["speedup"]
    print(
        f"acceptance length {lengths['draft']:.2f} (n-gram {lengths['ngram']:.2f}), speed x "
        f"{speedup['draft']:.2f} (n-gram x {speedup['ngram']:.2f}), "
        f"{report['lossless_fraction']:.0%} of outputs identical to plain decoding"
    )


def server_args(params: Benchmark) -> dict[str, list[str]]:
    """What each of the three servers gets beside the verifier's own arguments."""
    k = params.num_draft_tokens
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": k,
        "prompt_lookup_min": params.prompt_lookup_min,
        "prompt_lookup_max": params.prompt_lookup_max,
    }
    return {
        "plain": COMMON_ARGS,
        "ngram": [*COMMON_ARGS, *speculative_args(ngram)],
        "draft": [*COMMON_ARGS, *speculative_args(draft_config(k))],
    }


def benchmark_requests(params: Params) -> list[Request]:
    held_out = [row for row in read_jsonl(PROMPTS_PATH) if row["split"] == Split.HELD_OUT]
    return [
        Request(
            row["key"],
            {
                "messages": row["messages"],
                "max_tokens": params.benchmark.max_tokens,
                **GREEDY,
                "chat_template_kwargs": params.generate.template_kwargs,
                "return_token_ids": True,
            },
        )
        for row in held_out[: params.benchmark.num_prompts]
    ]


class Round:
    """One pass of all questions over one server at one concurrency."""

    def __init__(self, server: str, concurrency: int, number: int) -> None:
        self.server, self.concurrency, self.number = server, concurrency, number
        self.outputs: Outputs = {}
        self.seconds = 0.0
        self.counters: dict[str, float] = {}  # spec-decode counters, the increase in this round

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.seconds


def measure(requests: list[Request], params: Params) -> list[Round]:
    """All rounds: the three servers taking turns, or one after the other."""
    settings, args = params.benchmark, server_args(params.benchmark)
    groups = [list(args)] if settings.side_by_side else [[name] for name in args]
    rounds: list[Round] = []
    for names in groups:
        total = len(names) * len(settings.concurrency) * settings.num_rounds * len(requests)
        with (
            serve_all(params.verifier, {name: args[name] for name in names}) as endpoints,
            progress_bar(f"benchmarking {', '.join(names)}", total, "answers") as bar,
        ):
            for endpoint in endpoints.values():  # the first request of a server is its slowest
                run(ask_all(requests[:1], [endpoint], 1, TIMEOUT_S, lambda _: None))
            for number in range(settings.num_rounds):
                for concurrency in settings.concurrency:
                    # Each is first as often as last.
                    for name, endpoint in list(endpoints.items())[:: (-1) ** number]:
                        this = Round(name, concurrency, number)
                        rounds.append(play(this, requests, endpoint, bar))
    return rounds


def play(this: Round, requests: list[Request], endpoint: Endpoint, bar: Bar) -> Round:
    """Raises ServerError when a question gets no answer: a partial round measures nothing. One that
    the server refuses, as too long for its context, is left out of every round alike."""

    def on_answer(answer: Answer) -> None:
        if answer.body is not None:
            this.outputs[answer.key] = answer.body["choices"][0]["token_ids"]
        elif answer.outcome != "refused":
            raise ServerError(f"{this.server} left a question unanswered: {answer.error}")
        bar.advance(1, f"{this.server}, concurrency {this.concurrency}")

    before = spec_decode_counters(endpoint)
    started = time.perf_counter()
    run(ask_all(requests, [endpoint], this.concurrency, TIMEOUT_S, on_answer))
    this.seconds = time.perf_counter() - started
    if not this.outputs:
        raise ServerError(f"the {this.server} server refuses every question")
    after = spec_decode_counters(endpoint)
    this.counters = {name: value - before.get(name, 0) for name, value in after.items()}
    return this


def spec_decode_counters(endpoint: Endpoint) -> dict[str, float]:
    """vLLM's counters: drafts, accepted tokens, and accepted tokens by position from 1."""
    text = httpx2.get(endpoint.metrics_url, trust_env=False, timeout=30).raise_for_status().text
    counters: dict[str, float] = {}
    names = {
        "vllm:spec_decode_num_drafts_total": "drafts",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": "position",
    }
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := names.get(sample.name):
                if name == "position":
                    name = str(int(sample.labels["position"]) + 1)
                counters[name] = counters.get(name, 0) + sample.value
    return counters


def report_of(rounds: list[Round], params: Benchmark) -> dict[str, Any]:
    """The names that reports/benchmark.json promises, from the rounds played."""
    first = params.concurrency[0]
    by_place = {(r.server, r.concurrency, r.number): r for r in rounds}
    one_at_a_time = {name: by_place[name, first, 0] for name in ("plain", "ngram", "draft")}
    plain = one_at_a_time["plain"].outputs
    last_plain = by_place["plain", first, params.num_rounds - 1].outputs

    def ratios(name: str, concurrency: int) -> list[float]:
        return [
            by_place[name, concurrency, number].tokens_per_s
            / by_place["plain", concurrency, number].tokens_per_s
            for number in range(params.num_rounds)
        ]

    def speed(name: str, concurrency: int) -> float:
        played = [by_place[name, concurrency, n] for n in range(params.num_rounds)]
        return median(this.tokens_per_s for this in played)

    speculative = ("draft", "ngram")
    return {
        "num_draft_tokens": params.num_draft_tokens,
        "num_prompts": params.num_prompts,
        "num_answered": len(plain),
        "generated_tokens": sum(map(len, plain.values())),
        "acceptance_length": {
            name: acceptance_length(one_at_a_time[name].counters) for name in speculative
        },
        "acceptance_by_position": {
            name: acceptance_by_position(one_at_a_time[name].counters, params.num_draft_tokens)
            for name in speculative
        },
        "tokens_per_s": {
            name: {str(c): round(speed(name, c), 1) for c in params.concurrency}
            for name in ("plain", *speculative)
        },
        "speedup": {name: round(median(ratios(name, first)), 3) for name in speculative},
        "speedup_spread": {
            name: {"min": round(min(r), 3), "max": round(max(r), 3)}
            for name in speculative
            if (r := ratios(name, first))
        },
        "speedup_by_concurrency": {
            name: {str(c): round(median(ratios(name, c)), 3) for c in params.concurrency}
            for name in speculative
        },
        "lossless_fraction": same_fraction(one_at_a_time["draft"].outputs, plain),
        "lossless_fraction_ngram": same_fraction(one_at_a_time["ngram"].outputs, plain),
        "plain_vs_plain_fraction": same_fraction(last_plain, plain),
    }


def acceptance_length(counters: dict[str, float]) -> float:
    """Tokens per verification step: the accepted ones and the verifier's own."""
    if not counters.get("drafts"):
        return 1.0  # n-gram found nothing to propose
    return round(1 + counters["accepted"] / counters["drafts"], 4)


def acceptance_by_position(counters: dict[str, float], num_draft_tokens: int) -> dict[str, float]:
    """Fraction of drafts in which the tokens up to this position were all accepted."""
    drafts = counters.get("drafts") or 1
    return {
        str(position): round(counters.get(str(position), 0) / drafts, 4)
        for position in range(1, num_draft_tokens + 1)
    }


def same_fraction(outputs: Outputs, plain: Outputs) -> float:
    """Share of questions answered with exactly the same token ids."""
    return round(sum(outputs.get(key) == ids for key, ids in plain.items()) / len(plain), 4)


if __name__ == "__main__":
    run_stage("benchmark", main)
