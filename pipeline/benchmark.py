"""Stage 8, benchmark: what the draft gives when vLLM serves it, beside n-gram and no speculation.

Reads    models/draft, data/prompts/prompts.jsonl (held-out questions), data/verifier.json;
         params `benchmark.*`, `verifier.*`, `generate.thinking`, `generate.thinking_switch`
Writes   reports/benchmark.json; docs/benchmark.md says what each of its numbers means
Run      python -m pipeline.benchmark

The same questions go to three servers of the same verifier. With `benchmark.side_by_side` the three
are up together and take turns, so that noise of the machine hits all alike; else they come one
after the other, and plain decoding is measured first and last.

A loop is easy to guess, so an answer that ends in one would flatter every draft. A first pass over
plain decoding finds the questions that cannot be measured; in the rounds, a question counts on no
server if its answer of one is unsound. vLLM's counters know no questions: they are read after each
answer where one question is asked at a time.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import httpx2
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import DataError, ServerError
from pipeline.params import NEUTRAL_SAMPLING, Benchmark, Params, Verifier, load_params
from pipeline.progress import Bar, progress_bar
from pipeline.reasoning import loop_period
from pipeline.records import DRAFT, PROMPTS_PATH, PROVENANCE, Split, in_words
from pipeline.resume import read_json, read_jsonl, write_json
from pipeline.server import Endpoint, draft_config, serve_all, speculative_args
from pipeline.stage import run_stage
from pipeline.verifier import load_verifier

METRICS_PATH = Path("reports/benchmark.json")
TIMEOUT_S = 3600
# Every round is the first: what an earlier one left in the cache must not make a later one faster.
COMMON_ARGS = ["--no-enable-prefix-caching"]
CPU_SAMPLING = "pipeline.cpu_sampling"
CPU_ARGS = ["--worker-extension-cls", f"{CPU_SAMPLING}.Extension"]
SAMPLING = {"top_p": 1.0, "top_k": 0, **NEUTRAL_SAMPLING}
SEED = 0  # of every request that is sampled
SPECULATIVE = ("draft", "ngram")
SERVERS = ("plain", *SPECULATIVE)


class Rejected(StrEnum):
    """Why a question does not count."""

    REFUSED = "refused"  # too long for the server
    LOOP = "loop"  # the end of its answer repeats the same few tokens over and over
    GARBAGE = "garbage"  # or a single one
    EMPTY = "empty"  # no token


class Mode(NamedTuple):
    """How the questions are asked."""

    thinking: bool
    temperature: float  # 0: greedy

    @property
    def name(self) -> str:
        """Its key in the report, without a dot: DVC splits the names of metrics there."""
        thinking = "thinking" if self.thinking else "no_thinking"
        sampled = f"sampled_{self.temperature}".replace(".", "_")
        return f"{thinking}_{sampled if self.temperature else 'greedy'}"


class Output(NamedTuple):
    """A sound answer."""

    token_ids: list[int]
    seconds: float  # from the request to the whole answer
    counters: Counter[str]  # what it added to vLLM's; none where others were asked beside it


@dataclass
class Played:
    """What one server gave in one round."""

    outputs: dict[str, Output] = field(default_factory=dict)  # by the question's key
    rejected: dict[str, Rejected] = field(default_factory=dict)
    seconds: float = 0.0  # from the first request to the last answer


@dataclass
class Round:
    """One pass of the questions, alike over each server."""

    mode: Mode
    concurrency: int
    number: int
    # By server; two of plain decoding where it is measured first and last.
    played: dict[str, list[Played]] = field(default_factory=lambda: defaultdict(list))

    @property
    def rejected(self) -> dict[str, Rejected]:
        """The questions that count on no server, because one of them gave no sound answer."""
        everything = [played for server in self.played.values() for played in server]
        return {key: why for played in everything for key, why in played.rejected.items()}

    def outputs(self, several: list[Played]) -> list[Output]:
        """Those that count."""
        rejected = self.rejected
        return [o for one in several for key, o in one.outputs.items() if key not in rejected]

    def tokens_per_s(self, several: list[Played]) -> float:
        outputs = self.outputs(several)
        timed = outputs if self.concurrency == 1 else several
        return sum(len(output.token_ids) for output in outputs) / sum(t.seconds for t in timed)

    def speedup(self, server: str) -> float:
        """Over plain decoding: over both of its measurements, where they enclose the others, so
        that a drift of the machine counts half, and for n-gram and draft alike."""
        return self.tokens_per_s(self.played[server]) / self.tokens_per_s(self.played["plain"])


def main() -> None:
    params = load_params()
    load_verifier()
    if not (DRAFT / "config.json").is_file():
        raise DataError(f"{DRAFT} holds no draft; `dvc repro train` makes it")
    check_thinking(DRAFT, params.generate.thinking)
    held_out = [row for row in read_jsonl(PROMPTS_PATH) if row["split"] == Split.HELD_OUT]
    questions = held_out[: params.benchmark.num_prompts]
    rejected, rounds = measure(questions, params)
    report = report_of(rounds, rejected, len(questions), params.benchmark)
    write_json(METRICS_PATH, report)
    lengths, speedup = report["acceptance_length"], report["speedup"]
    print(
        f"acceptance length {lengths['draft']:.2f} (n-gram {lengths['ngram']:.2f}), speed x "
        f"{speedup['draft']:.2f} (n-gram x {speedup['ngram']:.2f}), "
        f"{report['lossless_fraction']:.0%} of outputs identical to plain decoding; questions that "
        f"do not count: {in_words(report['rejected'])}"
    )


def check_thinking(draft: Path, thinking: bool) -> None:
    """Raises DataError when the draft was trained on answers of the other mode: it would be judged
    on tokens it never saw."""
    trained = read_json(draft / PROVENANCE)["thinking"]
    if trained != thinking:
        raise DataError(
            f"{draft} was trained with generate.thinking: {trained}, to be served is {thinking}; "
            "`dvc repro` trains it anew"
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
    on_gpu = torch.accelerator.is_available()
    common = COMMON_ARGS if on_gpu else [*COMMON_ARGS, *CPU_ARGS]
    return {
        "plain": common,
        "ngram": [*common, *speculative_args(ngram)],
        "draft": [*common, *speculative_args(draft_config(k))],
    }


def equipped(verifier: Verifier) -> Verifier:
    """With as many threads for n-gram, whose search is numba's, as for all else: threads of its own
    that wait for each other made it five times slower on a busy machine."""
    threads = verifier.server_env.get("OMP_NUM_THREADS")
    more = {"NUMBA_NUM_THREADS": threads} if threads else {}
    return verifier.model_copy(update={"server_env": {**more, **verifier.server_env}})


def modes_of(params: Params) -> list[Mode]:
    """The main one first: greedy, and thinking as the draft was trained."""
    thinking = params.generate.thinking
    both = [thinking, not thinking] if params.benchmark.both_thinking_modes else [thinking]
    return [Mode(one, temperature) for one in both for temperature in params.benchmark.temperatures]


def rounds_of(modes: list[Mode], params: Benchmark) -> list[Round]:
    """All of them for the main mode, a single one for each other mode."""
    main, *others = modes
    numbers = range(params.num_rounds)
    full = [Round(main, concurrency, n) for n in numbers for concurrency in params.concurrency]
    return [*full, *(Round(mode, 1, 0) for mode in others)]


def request_of(question: Mapping[str, Any], mode: Mode, params: Params) -> Request:
    generate = params.generate.model_copy(update={"thinking": mode.thinking})
    body = {
        "messages": question["messages"],
        "max_tokens": params.benchmark.max_tokens,
        "temperature": mode.temperature,
        **SAMPLING,
        **({"seed": SEED} if mode.temperature else {}),
        "chat_template_kwargs": generate.template_kwargs,
        "return_token_ids": True,
    }
    return Request(question["key"], body)


def measure(
    questions: list[dict[str, Any]], params: Params
) -> tuple[dict[str, Rejected], list[Round]]:
    """The questions that are in no round, and all rounds: the servers take turns, or come one after
    the other."""
    settings, args, modes = params.benchmark, server_args(params.benchmark), modes_of(params)
    groups = [list(args)] if settings.side_by_side else [[name] for name in (*args, "plain")]
    asked = {mode: [request_of(row, mode, params) for row in questions] for mode in modes}
    rounds = rounds_of(modes, settings)
    rejected: dict[str, Rejected] = {}
    for number, names in enumerate(groups):
        num_passes = len(names) * len(rounds)
        total = (num_passes + (number == 0)) * len(asked[modes[0]])
        with (
            serve_all(equipped(params.verifier), {name: args[name] for name in names}) as endpoints,
            progress_bar(f"benchmarking {', '.join(names)}", total, "answers") as bar,
        ):
            if number == 0:
                plain, concurrency = endpoints["plain"], settings.concurrency[-1]
                rejected = screen(asked[modes[0]], plain, concurrency, bar)
                asked = {m: [r for r in asked[m] if r.key not in rejected] for m in modes}
                bar.total -= num_passes * len(rejected)
            for endpoint in endpoints.values():  # the first request of a server is its slowest
                run(ask_all(asked[modes[0]][:1], [endpoint], 1, TIMEOUT_S, lambda _: None))
            for this in rounds:
                # Each server is first as often as last.
                for name, endpoint in list(endpoints.items())[:: (-1) ** this.number]:
                    where = f"{name}, {this.mode.name}, concurrency {this.concurrency}"
                    played = play(asked[this.mode], endpoint, this.concurrency, bar, where)
                    this.played[name].append(played)
    return rejected, rounds


def screen(
    requests: list[Request], endpoint: Endpoint, concurrency: int, bar: Bar
) -> dict[str, Rejected]:
    """The questions that plain decoding gives no sound answer to. Raises ServerError when that is
    all of them."""
    rejected = play(requests, endpoint, concurrency, bar, "plain, first pass").rejected
    if len(rejected) == len(requests):
        raise ServerError(f"no question gets a sound answer: {in_words(counts_of(rejected))}")
    return rejected


def play(
    requests: list[Request], endpoint: Endpoint, concurrency: int, bar: Bar, where: str
) -> Played:
    """Ask one server everything. Raises ServerError when a question gets no answer: a partial round
    measures nothing."""
    this = Played()
    asked_at: dict[str, float] = {}

    def handed_out() -> Iterator[Request]:
        for request in requests:  # each is taken in the moment in which it is sent
            asked_at[request.key] = time.perf_counter()
            yield request

    with httpx2.Client(trust_env=False, timeout=30) as client:
        before = spec_decode_counters(client, endpoint)

        def on_answer(answer: Answer) -> None:
            nonlocal before
            now = time.perf_counter()
            this.seconds = now - min(asked_at.values())
            bar.advance(1, where)
            if answer.outcome == "refused":
                this.rejected[answer.key] = Rejected.REFUSED
                return
            if answer.body is None:
                raise ServerError(f"{where}: a question is left unanswered: {answer.error}")
            token_ids = answer.body["choices"][0].get("token_ids")
            if token_ids is None:
                raise ServerError(f"{where}: the server returns no token ids")
            after = spec_decode_counters(client, endpoint) if concurrency == 1 else before
            if why := fault_of(token_ids):
                this.rejected[answer.key] = why
            else:
                seconds = now - asked_at[answer.key]
                this.outputs[answer.key] = Output(token_ids, seconds, after - before)
            before = after

        run(ask_all(handed_out(), [endpoint], concurrency, TIMEOUT_S, on_answer))
    return this


def fault_of(token_ids: list[int]) -> Rejected | None:
    """Whether the answer ends in a loop; one that was not cut has its end of turn after it."""
    if not token_ids:
        return Rejected.EMPTY
    period = loop_period(token_ids) or loop_period(token_ids[:-1])
    if not period:
        return None
    return Rejected.GARBAGE if period == 1 else Rejected.LOOP


def counts_of(rejected: Mapping[str, Rejected]) -> dict[str, int]:
    counts = Counter(rejected.values())
    return {why.value: counts[why] for why in Rejected}


def spec_decode_counters(client: httpx2.Client, endpoint: Endpoint) -> Counter[str]:
    """vLLM's counters: drafts, accepted tokens, and accepted tokens by position from 1. A server
    without speculation has none."""
    page = client.get(endpoint.metrics_url).raise_for_status().text
    names = {
        "vllm:spec_decode_num_drafts_total": "drafts",
        "vllm:spec_decode_num_accepted_tokens_total": "accepted",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": "position",
    }
    counters: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if name := names.get(sample.name):
                if name == "position":
                    name = str(int(sample.labels["position"]) + 1)
                counters[name] += int(sample.value)
    return counters


def report_of(
    rounds: list[Round], rejected: Mapping[str, Rejected], num_prompts: int, params: Benchmark
) -> dict[str, Any]:
    """The names that reports/benchmark.json promises, from the rounds played and the questions that
    were in none. Raises ServerError when nothing counts in a round of the main mode."""
    alike: dict[tuple[Mode, int], list[Round]] = defaultdict(list)
    for this in rounds:
        alike[this.mode, this.concurrency].append(this)
    main = rounds[0].mode
    by_concurrency = {c: played for (mode, c), played in alike.items() if mode == main}
    for this in (this for played in by_concurrency.values() for this in played):
        if not this.outputs(this.played["plain"]):
            why = in_words(counts_of(this.rejected))
            raise ServerError(f"nothing counts at concurrency {this.concurrency}: {why}")
    alone = by_concurrency[1]
    first, plain = alone[0], alone[0].played["plain"][0].outputs
    ratios = {server: [this.speedup(server) for this in alone] for server in SPECULATIVE}
    noise = [noise_of(played) for played in by_concurrency.values()]

    def table(value: Callable[[list[Round], str], Any], servers: tuple[str, ...] = SERVERS) -> Any:
        return {
            server: {str(c): value(played, server) for c, played in by_concurrency.items()}
            for server in servers
        }

    return {
        "num_draft_tokens": params.num_draft_tokens,
        "num_prompts": num_prompts,
        **mode_report(alone, rejected),
        "acceptance_by_position": {
            server: acceptance_by_position(counters_of(first, server), params.num_draft_tokens)
            for server in SPECULATIVE
        },
        "tokens_per_s": table(tokens_per_s),
        "latency_s": table(latency_s),
        "ms_per_token": table(ms_per_token),
        "speedup_spread": {
            server: {"min": round(min(r), 3), "max": round(max(r), 3)}
            for server, r in ratios.items()
        },
        "speedup_by_concurrency": table(speedup, SPECULATIVE),
        "noise": {"min": min(noise), "max": max(noise)},
        "lossless_fraction": same_fraction(first.played["draft"][0].outputs, plain),
        "lossless_fraction_ngram": same_fraction(first.played["ngram"][0].outputs, plain),
        "plain_vs_plain_fraction": same_fraction(alone[-1].played["plain"][-1].outputs, plain),
        "by_mode": {
            mode.name: {"thinking": mode.thinking, "temperature": mode.temperature}
            | mode_report(played, rejected)
            for (mode, c), played in alike.items()
            if c == 1
        },
    }


def mode_report(rounds: list[Round], rejected: Mapping[str, Rejected]) -> dict[str, Any]:
    """What is said of every mode, from its rounds of one request at a time: the speed from all, the
    rest from the first. Where nothing counts there is no more to say than that."""
    first = rounds[0]
    outputs = {server: first.outputs(first.played[server][:1]) for server in SERVERS}
    counts = {
        "num_answered": len(outputs["plain"]),
        "rejected": counts_of({**rejected, **first.rejected}),
        "generated_tokens": sum(len(output.token_ids) for output in outputs["plain"]),
    }
    if not outputs["plain"]:
        return counts
    return counts | {
        "tokens_per_answer": {
            server: round(fmean(len(output.token_ids) for output in made), 1)
            for server, made in outputs.items()
        },
        "distinct_bigram_fraction": {
            server: round(median(distinct_bigram_fraction(o.token_ids) for o in made), 4)
            for server, made in outputs.items()
        },
        "acceptance_length": {
            server: acceptance_length(counters_of(first, server)) for server in SPECULATIVE
        },
        "speedup": {server: speedup(rounds, server) for server in SPECULATIVE},
    }


def tokens_per_s(rounds: list[Round], server: str) -> float:
    return round(median(this.tokens_per_s(this.played[server]) for this in rounds), 1)


def speedup(rounds: list[Round], server: str) -> float:
    """Of the ratios within one round the median."""
    return round(median(this.speedup(server) for this in rounds), 3)


def noise_of(rounds: list[Round]) -> float:
    """The speed of plain decoding when it was measured last, over that when it was first: what is
    nearer to 1 than this is no difference."""
    first, last = rounds[0], rounds[-1]
    again, before = last.played["plain"][-1:], first.played["plain"][:1]
    return round(last.tokens_per_s(again) / first.tokens_per_s(before), 3)


def latency_s(rounds: list[Round], server: str) -> dict[str, float]:
    """Seconds an answer takes, from the request to its last token."""
    seconds = [output.seconds for this in rounds for output in this.outputs(this.played[server])]
    p50, p95 = np.quantile(seconds, [0.5, 0.95])
    return {"p50": round(float(p50), 4), "p95": round(float(p95), 4)}


def ms_per_token(rounds: list[Round], server: str) -> float:
    """Milliseconds an answer takes for each of its tokens, the median."""
    outputs = [output for this in rounds for output in this.outputs(this.played[server])]
    return round(1000 * median(output.seconds / len(output.token_ids) for output in outputs), 3)


def counters_of(this: Round, server: str) -> Counter[str]:
    """What the answers that count added to vLLM's counters."""
    return sum((output.counters for output in this.outputs(this.played[server])), Counter())


def acceptance_length(counters: Counter[str]) -> float:
    """Tokens per verification step: the accepted ones and the verifier's own."""
    if not counters["drafts"]:
        return 1.0  # n-gram found nothing to propose
    return round(1 + counters["accepted"] / counters["drafts"], 4)


def acceptance_by_position(counters: Counter[str], num_draft_tokens: int) -> dict[str, float]:
    """Fraction of drafts in which the tokens up to this position were all accepted."""
    drafts = counters["drafts"] or 1
    return {
        str(position): round(counters[str(position)] / drafts, 4)
        for position in range(1, num_draft_tokens + 1)
    }


def distinct_bigram_fraction(token_ids: list[int]) -> float:
    """Different pairs of neighbours among all pairs: 1 where none repeats, near 0 in a loop."""
    pairs = list(pairwise(token_ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def same_fraction(outputs: Mapping[str, Output], plain: Mapping[str, Output]) -> float:
    """Share of plain decoding's sound answers that came with exactly the same token ids."""
    same = [key in outputs and outputs[key].token_ids == o.token_ids for key, o in plain.items()]
    return round(sum(same) / len(same), 4)


if __name__ == "__main__":
    run_stage("benchmark", main)
