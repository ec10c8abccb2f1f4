"""Stage 3, generate: ask the verifier each question and keep what it wrote, reasoning included.

Reads    data/prompts/prompts.jsonl, data/verifier.json; params `generate.*`, `verifier.*`,
         `reassemble.source`
Writes   data/traces/part-*.jsonl (records.Trace, in the order of the prompts, 1,000 prompts a part;
         `persist: true`), data/traces/probe.json, reports/generate.json
Run      python -m pipeline.generate
         python -m pipeline.generate --import FILE     (pipeline/importing.py)

The server is probed before the first question, the first answers are judged before the rest is
sent, and all later ones as they come. An answer is known by its key, the hash of all that
determines it, so a killed run goes on, a raised cap adds, and nothing is asked twice. How answers
lie on disk meanwhile: pipeline/traces.py.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from pipeline.asking import Asking
from pipeline.errors import BadRun, ServerStopped
from pipeline.importing import import_file
from pipeline.live import Live
from pipeline.params import Generate, endpoints_from, load_params
from pipeline.probe import Findings, probe, questions_to_probe_with
from pipeline.progress import waiting
from pipeline.reasoning import verdict_of
from pipeline.records import (
    PROMPTS_PATH,
    TRACES,
    TRACES_PER_PART,
    TRAINABLE,
    TRANSIENT,
    TRUNCATED,
    Prompt,
    Status,
    count_by,
    in_words,
)
from pipeline.resume import one_writer, read_json, read_jsonl, write_json
from pipeline.server import Endpoint, meet_all, serve
from pipeline.stage import run_stage
from pipeline.traces import Row, Stored, fold, load_stored
from pipeline.verifier import load_verifier

METRICS_PATH = Path("reports/generate.json")
PROBE_PATH = TRACES / "probe.json"
PROBES = Path("data/.stash/probes.json")
ENDPOINTS_VARIABLE = "PIPELINE_GENERATE_ENDPOINTS"
# A server that dies this often over one run has a fault that starting it again does not mend.
MAX_RESTARTS = 3


def main() -> None:
    params = load_params()
    verifier = load_verifier()
    prompts = [Prompt(**row) for row in read_jsonl(PROMPTS_PATH)]  # type: ignore[typeddict-item]
    with one_writer(TRACES):
        TRACES.mkdir(exist_ok=True)
        stored = load_stored(lambda trace: verdict_of(trace, verifier, params))
        asking = Asking(params, verifier, prompts, stored)
        wanted = asking.wanted()
        todo = asking.todo(wanted)
        if todo:
            print(f"{len(wanted) - len(todo)} of {len(wanted)} answers are there, asking the rest")
            Live(0).write("starting")
            try:
                ask_until_done(asking)
            except BaseException:
                if not asking.new:  # else its own last facts are there
                    Live(0).write("stopped")
                raise
            wanted = asking.wanted()
        else:
            print(f"all {len(wanted)} answers are there, nothing to ask")
            asking.check_all(wanted)
        rows = [
            Row(
                question.prompt["index"] // TRACES_PER_PART,
                key,
                question.sample_id,
                question.prompt["source"],
            )
            for key, question in wanted.items()
        ]
        fold(rows, stored)
        if asking.settings_key in (probes := _probes()):
            write_json(PROBE_PATH, probes[asking.settings_key])
    # An import may have called its source something else.
    answers = [
        stored[key]._replace(source=question.prompt["source"]) for key, question in wanted.items()
    ]
    metrics = metrics_of(answers, prompts, params.generate)
    write_json(METRICS_PATH, metrics)
    num_unknown = sum(
        answer.verdict.status in TRAINABLE and not answer.verdict.generated_tokens
        for answer in answers
    )
    print(
        f"{len(answers)} traces: {in_words(metrics['status'])}; {metrics['reasoning_tokens']} "
        "reasoning tokens" + (f", unknown for {num_unknown} without ids" if num_unknown else "")
    )
    check_failures(answers, params.generate)


def ask_until_done(asking: Asking) -> None:
    """On the given servers, or on one of our own that is started again when it dies.

    Raises:
        BadRun: the server does not do what params.yaml says; nothing was asked.
        ServerStopped: it died too often, or twice without an answer since it was started, or
            before it was asked.
        and what `Asking.ask` raises.
    """
    params = asking.params
    urls = endpoints_from(ENDPOINTS_VARIABLE, params.generate.endpoints)
    if urls:
        endpoints = meet_all(urls, params.verifier)
        probe_all(endpoints, asking)
        asking.ask(endpoints)
        return
    for num_restarts in range(MAX_RESTARTS + 1):
        num_before = asking.num_settled
        with ExitStack() as stack:
            try:
                # The log of a server that died is not written over.
                name = f"generate-{num_restarts + 1}" if num_restarts else "generate"
                endpoint = stack.enter_context(serve(params.verifier, name))
                if num_restarts == 0:
                    probe_all([endpoint], asking)
                asking.ask([endpoint])
                return
            except ServerStopped as stopped:
                # The first batch may hold the one question that kills it; then it is told apart.
                no_hope = num_restarts > 0 or not asking.has_suspects
                if num_restarts == MAX_RESTARTS or (asking.num_settled == num_before and no_hope):
                    raise
                print(f"{stopped.what}; starting it again ({num_restarts + 1} of {MAX_RESTARTS})")


def probe_all(endpoints: list[Endpoint], asking: Asking) -> None:
    """Probe each server, say and store what was found. Raises BadRun."""
    questions = questions_to_probe_with(asking.wanted(), asking.stored)
    Live(0).write("probing")
    with waiting("probing the server"):
        findings = _side_by_side(
            lambda endpoint: probe(endpoint, questions, asking.params, asking.verifier), endpoints
        )
    found = sorted({str(each): asdict(each) for each in findings}.items())
    for words, _ in found:
        print(f"probe: {words}")
    write_json(PROBES, _probes() | {asking.settings_key: [facts for _, facts in found]})


def _side_by_side(
    look: Callable[[Endpoint], Findings], endpoints: list[Endpoint]
) -> list[Findings]:
    """In threads that end with the process: those of a ThreadPoolExecutor are waited for, and a
    Ctrl-C would last as long as a hung server."""
    found: list[Future[Findings]] = [Future() for _ in endpoints]

    def settle(endpoint: Endpoint, future: Future[Findings]) -> None:
        try:
            future.set_result(look(endpoint))
        except BaseException as error:
            future.set_exception(error)

    for pair in zip(endpoints, found, strict=True):
        Thread(target=settle, args=pair, daemon=True).start()
    return [future.result() for future in found]


def _probes() -> dict[str, Any]:
    """Findings of all runs here, by the settings that were probed: with the rows of earlier
    settings, what was found for these comes back too."""
    probes: dict[str, Any] = read_json(PROBES) if PROBES.exists() else {}
    return probes


def metrics_of(answers: list[Stored], prompts: list[Prompt], params: Generate) -> dict[str, Any]:
    verdicts = [answer.verdict for answer in answers]
    num_turns = sum(1 + len(prompt["later_turns"]) for prompt in prompts)
    return {
        "rows_in": num_turns,
        "turns_not_asked": num_turns - len(answers),  # after a turn without a good answer
        "status": count_by((verdict.status for verdict in verdicts), Status),
        "finish_reason": dict(sorted(Counter(str(a.finish_reason) for a in answers).items())),
        "truncated": truncation(answers, params),
        "generated_tokens": sum(verdict.generated_tokens for verdict in verdicts),
        "reasoning_tokens": sum(verdict.reasoning_tokens for verdict in verdicts),
        "prompt_tokens": sum(verdict.prompt_tokens for verdict in verdicts),
    }


def truncation(answers: list[Stored], params: Generate) -> dict[str, Any]:
    """Which answers max_tokens cut: by phase, by source and by length in tokens."""
    by_source: dict[str, Counter[str]] = {}
    by_length: dict[int, Counter[str]] = {}
    for answer in answers:
        num_tokens = answer.verdict.generated_tokens
        bin_end = 1 << max(num_tokens - 1, 0).bit_length()  # the next power of two
        for counts in (
            by_source.setdefault(answer.source, Counter(rows=0, truncated=0)),
            by_length.setdefault(bin_end, Counter(rows=0, truncated=0)),
        ):
            counts["rows"] += 1
            counts["truncated"] += answer.verdict.status in TRUNCATED
    statuses = Counter(answer.verdict.status for answer in answers)
    return {
        "reasoning": statuses[Status.TRUNCATED_IN_REASONING],
        "answer": statuses[Status.TRUNCATED_IN_ANSWER],
        "asked_with_more": sum(answer.max_tokens > params.max_tokens for answer in answers),
        "by_source": {source: dict(by_source[source]) for source in sorted(by_source)},
        "by_length": {f"up_to_{end:06}": dict(by_length[end]) for end in sorted(by_length)},
    }


def check_failures(answers: list[Stored], params: Generate) -> None:
    """Raises BadRun when too many questions are left without an answer."""
    unanswered = [answer for answer in answers if answer.verdict.status in TRANSIENT]
    if unanswered and len(unanswered) / len(answers) > params.max_failed_fraction:
        raise BadRun(
            f"{len(unanswered)} of {len(answers)} questions have no answer (last: "
            f"{unanswered[-1].error}), more than generate.max_failed_fraction "
            f"{params.max_failed_fraction}; run again to ask just these"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pipeline.generate")
    parser.add_argument("--import", dest="file", type=Path, help="JSONL of answers made elsewhere")
    file = parser.parse_args().file
    run_stage("generate", partial(import_file, file) if file else main)
