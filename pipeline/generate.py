"""Stage 3, generate: ask the verifier each question and keep what it wrote, reasoning included.

Reads    data/prompts/prompts.jsonl, data/verifier.json; params `generate.*`, `verifier.*`
Writes   data/traces/part-*.jsonl (records.Trace, in the order of the prompts, 1,000 a part;
         `persist: true`), reports/generate.json
Run      python -m pipeline.generate

While it runs, each answer is one flushed line of data/traces/journal.jsonl; at the end the journal
is folded into the parts. An answer is known by its key, the hash of all that determines it, so a
killed run goes on, a raised cap adds, and nothing is asked twice. Answers that the present params
do not want wait in data/.stash/.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from pipeline.client import Answer, Request, Throughput, ask_all, run
from pipeline.errors import BadRun, GateFailed, ServerError
from pipeline.params import Generate, Params, endpoints_from, load_params
from pipeline.progress import progress_bar
from pipeline.reasoning import Gate, judge, num_reasoning_tokens
from pipeline.records import (
    CUT,
    NO_ANSWER,
    PROMPTS_PATH,
    TRACES,
    TRACES_PER_PART,
    TRANSIENT,
    TRUNCATED,
    Prompt,
    Status,
    Trace,
    count_by,
)
from pipeline.resume import content_key, one_writer, read_jsonl, write_json, write_jsonl
from pipeline.server import Endpoint, meet_all, serve
from pipeline.stage import run_stage
from pipeline.verifier import VerifierIdentity, load_verifier

JOURNAL = TRACES / "journal.jsonl"
STASH = Path("data/.stash/traces.jsonl")
FAILED_GATE = Path("data/.stash/failed_gate.jsonl")
METRICS_PATH = Path("reports/generate.json")
ENDPOINTS_VARIABLE = "PIPELINE_GENERATE_ENDPOINTS"


def main() -> None:
    params = load_params()
    verifier = load_verifier()
    prompts = [Prompt(**row) for row in read_jsonl(PROMPTS_PATH)]  # type: ignore[typeddict-item]
    wanted = {trace_key(prompt, params.generate, verifier): prompt for prompt in prompts}
    with one_writer(TRACES):
        stored: dict[str, Trace] = {}
        for trace in read_stored():
            keep(trace, stored)
        gate = Gate(params.generate, verifier)
        todo = []
        for key, prompt in wanted.items():
            if key in stored:
                stored[key] = rejudged(stored[key], prompt, params.generate, verifier)
            if key in stored and is_done(stored[key], params.generate):
                gate.add(stored[key])
            else:
                todo.append(key)
        if todo:
            print(f"{len(wanted) - len(todo)} of {len(wanted)} answers are there, asking the rest")
            with ExitStack() as stack:
                urls = endpoints_from(ENDPOINTS_VARIABLE, params.generate.endpoints)
                endpoints = (
                    meet_all(urls, params.verifier)
                    if urls
                    else [stack.enter_context(serve(params.verifier, "generate"))]
                )
                ask(todo, wanted, endpoints, params, verifier, stored, gate)
        else:
            print(f"all {len(wanted)} answers are there, nothing to ask")
        gate.check()
        fold(wanted, stored)
    traces = [stored[key] for key in wanted]
    metrics = metrics_of(traces, verifier)
    write_json(METRICS_PATH, metrics)
    counts = {status: n for status, n in metrics["status"].items() if n}
    print(f"{len(traces)} traces: {counts}, {metrics['reasoning_tokens']} reasoning tokens")
    check_failures(traces, params.generate)


def trace_key(prompt: Prompt, params: Generate, verifier: VerifierIdentity) -> str:
    """What determines an answer, and nothing else: no budget, time-out, endpoint or think id."""
    return content_key(
        {
            "messages": prompt["messages"],
            "sampling": params.sampling,
            "thinking": params.template_kwargs,
            "model": verifier.model,
            "weights": verifier.weights_fingerprint,
            "chat_template": verifier.chat_template_sha256,
            "tokenizer": verifier.tokenizer_sha256,
        }
    )


def request_body(prompt: Prompt, params: Generate) -> dict[str, Any]:
    """The JSON on the wire, less the model. Every sampling value is sent, so that no
    generation_config.json beside the model decides in silence."""
    return {
        "messages": prompt["messages"],
        "max_tokens": params.max_tokens,
        **params.sampling,
        "chat_template_kwargs": params.template_kwargs,
        "return_token_ids": True,
    }


def is_done(trace: Trace, params: Generate) -> bool:
    """False for what has no answer yet and for an answer that a larger max_tokens may save."""
    could_go_on = trace["status"] in CUT and trace["sampling"]["max_tokens"] < params.max_tokens
    return trace["status"] not in TRANSIENT and not could_go_on


def ask(
    todo: list[str],
    wanted: dict[str, Prompt],
    endpoints: list[Endpoint],
    params: Params,
    verifier: VerifierIdentity,
    stored: dict[str, Trace],
    gate: Gate,
) -> None:
    """Ask what is to do and journal each answer; the first ones are judged before the rest go out.

    Raises:
        BadRun: the answers fail the gate; they lie in data/.stash/failed_gate.jsonl then, and the
            next run asks them again.
    """
    settings = params.generate
    speed = Throughput()
    counts = dict.fromkeys(("empty", "cut", "failed"), 0)

    with (
        JOURNAL.open("ab") as journal,
        progress_bar("asking the verifier", len(todo), "questions") as bar,
    ):

        def on_answer(answer: Answer) -> None:
            trace = trace_of(answer, wanted[answer.key], settings, verifier)
            append(journal, trace)
            keep(trace, stored)
            status = Status(trace["status"])
            counts["empty"] += status is Status.EMPTY_REASONING
            counts["cut"] += status in CUT
            counts["failed"] += status in TRANSIENT
            speed.add(len(trace["token_ids"]))
            bar.advance(1, f"{speed}, " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
            gate.add(trace)

        first = settings.gate.num_samples
        try:
            for keys in (todo[:first], todo[first:]):
                requests = (Request(key, request_body(wanted[key], settings)) for key in keys)
                run(
                    ask_all(
                        requests, endpoints, settings.concurrency, settings.timeout_s, on_answer
                    )
                )
                gate.check()
        except GateFailed:
            set_aside(gate)
            raise


def trace_of(answer: Answer, prompt: Prompt, params: Generate, verifier: VerifierIdentity) -> Trace:
    """The row to store for one answer.

    Raises:
        ServerError: the server gives no token ids, so nothing exact could be made of its answers.
    """
    trace: Trace = {
        "sample_id": prompt["sample_id"],
        "key": answer.key,
        "status": Status.FAILED,
        "source": prompt["source"],
        "messages": prompt["messages"],
        "finish_reason": None,
        "prompt_token_ids": [],
        "token_ids": [],
        "usage": {},
        "sampling": {**params.sampling, "max_tokens": params.max_tokens},
        "attempts": answer.attempts,
        "server_version": answer.endpoint.version,
    }
    if answer.body is None:
        trace["error"] = answer.error or ""
        trace["status"] = {
            "refused": Status.REJECTED_BY_SERVER,
            "timed_out": Status.TIMED_OUT,
            "failed": Status.FAILED,
        }[answer.outcome]
        return trace
    try:
        choice = answer.body["choices"][0]
        message = choice["message"] or {}
        prompt_ids, token_ids = answer.body["prompt_token_ids"], choice["token_ids"]
    except (KeyError, IndexError, TypeError) as error:
        raise ServerError(
            f"{answer.endpoint.base_url} answers without {error}: it must be a vLLM that knows "
            "return_token_ids"
        ) from error
    if not prompt_ids or token_ids is None:  # an aborted answer may hold no token
        raise ServerError(
            f"{answer.endpoint.base_url} returns no token ids: it must be a vLLM that knows "
            "return_token_ids"
        )
    # Absent, null and "" stay three different things.
    for field in ("reasoning", "reasoning_content"):
        if field in message:
            trace["reasoning"] = message[field]
            break
    if "content" in message:
        trace["content"] = message["content"]
    usage = answer.body.get("usage") or {}
    trace["usage"] = {k: v for k, v in usage.items() if isinstance(v, int)}
    trace["finish_reason"] = choice.get("finish_reason")
    trace["prompt_token_ids"], trace["token_ids"] = prompt_ids, token_ids
    trace["status"] = judge(trace, verifier, thinking=params.thinking)
    return trace


def rejudged(trace: Trace, prompt: Prompt, params: Generate, verifier: VerifierIdentity) -> Trace:
    """A stored answer under the present think ids: its text stays, its status may change."""
    judged: Trace = {**trace, "source": prompt["source"]}
    if trace["token_ids"]:
        judged["status"] = judge(trace, verifier, thinking=params.thinking)
    return judged


def keep(trace: Trace, stored: dict[str, Trace]) -> None:
    """The newest answer; a failure, refusal or abort never takes the place of an answer."""
    earlier = stored.get(trace["key"])
    if trace["status"] in NO_ANSWER and earlier and earlier["status"] not in NO_ANSWER:
        return
    stored[trace["key"]] = trace


def append(journal: BinaryIO, trace: Trace) -> None:
    """One whole line, flushed: what is lost in a kill is at most the line being written."""
    journal.write(orjson.dumps(trace) + b"\n")
    journal.flush()


def read_stored() -> Iterator[Trace]:
    """Every answer there is: stashed ones, the parts, then the journal (newest last)."""
    for path in [STASH, *sorted(TRACES.glob("part-*.jsonl"))]:
        if path.exists():
            yield from read_jsonl(path)  # type: ignore[misc]
    if JOURNAL.exists():
        cut_torn_line(JOURNAL)
        yield from read_jsonl(JOURNAL)  # type: ignore[misc]


def cut_torn_line(journal: Path) -> None:
    """Drop the unfinished last line of a killed run, so that the next line starts on its own."""
    data = journal.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with journal.open("r+b") as file:
            file.truncate(whole)


def fold(wanted: dict[str, Prompt], stored: dict[str, Trace]) -> None:
    """Parts in the order of the prompts; what is not wanted now goes to the stash."""
    keys = list(wanted)
    rows = {STASH: [dict(trace) for key, trace in stored.items() if key not in wanted]}
    for number, start in enumerate(range(0, len(keys), TRACES_PER_PART)):
        part = TRACES / f"part-{number:05}.jsonl"
        rows[part] = [dict(stored[key]) for key in keys[start : start + TRACES_PER_PART]]
    changed = [
        path for path in rows if jsonl(rows[path]) != (path.read_bytes() if path.exists() else b"")
    ]
    if len(changed) > 1:  # rows may move between files: until all are in place, the journal has all
        write_jsonl(JOURNAL, (dict(trace) for trace in stored.values()))
    for path in changed:
        write_jsonl(path, rows[path])
    for stale in set(TRACES.glob("part-*.jsonl")) - rows.keys():
        stale.unlink()
    JOURNAL.unlink(missing_ok=True)


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def set_aside(gate: Gate) -> None:
    """Take the answers without reasoning out of the journal, so that they are asked again; the good
    ones were paid for and stay."""
    rows = list(read_jsonl(JOURNAL)) if JOURNAL.exists() else []
    bad = [row for row in rows if gate.is_bad(row)]  # type: ignore[arg-type]
    earlier = list(read_jsonl(FAILED_GATE)) if FAILED_GATE.exists() else []
    write_jsonl(FAILED_GATE, [*earlier, *bad])
    write_jsonl(JOURNAL, (row for row in rows if not gate.is_bad(row)))  # type: ignore[arg-type]


def metrics_of(traces: list[Trace], verifier: VerifierIdentity) -> dict[str, Any]:
    statuses = [trace["status"] for trace in traces]
    return {
        "rows_in": len(traces),
        "status": count_by(statuses, Status),
        "truncated": sum(status in TRUNCATED for status in statuses),
        "generated_tokens": sum(len(trace["token_ids"]) for trace in traces),
        "reasoning_tokens": sum(num_reasoning_tokens(trace, verifier) for trace in traces),
        "prompt_tokens": sum(len(trace["prompt_token_ids"]) for trace in traces),
    }


def check_failures(traces: list[Trace], params: Generate) -> None:
    """Raises BadRun when too many questions are left without an answer."""
    unanswered = [trace for trace in traces if trace["status"] in TRANSIENT]
    if unanswered and len(unanswered) / len(traces) > params.max_failed_fraction:
        raise BadRun(
            f"{len(unanswered)} of {len(traces)} questions have no answer (last: "
            f"{unanswered[-1].get('error')}), more than generate.max_failed_fraction "
            f"{params.max_failed_fraction}; run again to ask just these"
        )


if __name__ == "__main__":
    run_stage("generate", main)
