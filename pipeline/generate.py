"""Stage 3, generate: ask the verifier each question and keep what it wrote, reasoning included.

Reads    data/prompts/prompts.jsonl, data/verifier.json; params `generate.*`, `verifier.*`
Writes   data/traces/part-*.jsonl (records.Trace, in the order of the prompts, 1,000 a part;
         `persist: true`), reports/generate.json
Run      python -m pipeline.generate

An answer is known by its key, the hash of all that determines it, so a killed run goes on, a raised
cap adds, and nothing is asked twice. How answers lie on disk meanwhile: pipeline/traces.py.
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.client import Answer, Request, Throughput, ask_all, run
from pipeline.errors import BadRun, GateFailed, ServerError
from pipeline.params import Generate, Params, endpoints_from, load_params
from pipeline.progress import progress_bar
from pipeline.reasoning import Gate, judge, num_reasoning_tokens
from pipeline.records import (
    CUT,
    PROMPTS_PATH,
    TRACES,
    TRANSIENT,
    TRUNCATED,
    Prompt,
    Status,
    Trace,
    count_by,
    in_words,
)
from pipeline.resume import content_key, one_writer, read_jsonl, write_json
from pipeline.server import Endpoint, meet_all, serve
from pipeline.stage import run_stage
from pipeline.traces import FAILED_GATE, JOURNAL, append, fold, forget, keep, load_stored
from pipeline.verifier import VerifierIdentity, load_verifier

METRICS_PATH = Path("reports/generate.json")
ENDPOINTS_VARIABLE = "PIPELINE_GENERATE_ENDPOINTS"


def main() -> None:
    params = load_params()
    verifier = load_verifier()
    prompts = [Prompt(**row) for row in read_jsonl(PROMPTS_PATH)]  # type: ignore[typeddict-item]
    wanted = {trace_key(prompt, params.generate, verifier): prompt for prompt in prompts}
    with one_writer(TRACES):
        stored = load_stored()
        for key in wanted.keys() & stored.keys():
            stored[key] = rejudged(stored[key], wanted[key], params.generate, verifier)
        todo = [key for key in wanted if not is_done(stored.get(key), params)]
        gate = Gate(params.generate, verifier)
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
            gate.check(stored[key] for key in wanted)
        fold(wanted, stored)
    traces = [stored[key] for key in wanted]
    metrics = metrics_of(traces, verifier)
    write_json(METRICS_PATH, metrics)
    print(
        f"{len(traces)} traces: {in_words(metrics['status'])}; {metrics['reasoning_tokens']} "
        "reasoning tokens"
    )
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


def is_done(trace: Trace | None, params: Params) -> bool:
    """False for what has no answer yet, and for what more tokens or a longer context may save."""
    if trace is None or trace["status"] in TRANSIENT:
        return False
    if trace["status"] == Status.REJECTED_BY_SERVER:
        return trace.get("max_model_len", 0) >= params.verifier.max_model_len
    could_go_on = trace["sampling"]["max_tokens"] < params.generate.max_tokens
    return not (trace["status"] in CUT and could_go_on)


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
        GateFailed: too few answers hold reasoning. Those without it lie in
            data/.stash/failed_gate.jsonl and are asked again by the next run; the good ones stay.
        BadRun: the server refuses every question. Nothing of that is kept.
    """
    settings = params.generate
    new: list[Trace] = []
    speed = Throughput()
    counts = dict.fromkeys(("empty", "cut", "failed"), 0)

    with (
        JOURNAL.open("ab") as journal,
        progress_bar("asking the verifier", len(todo), "questions") as bar,
    ):

        def on_answer(answer: Answer) -> None:
            trace = trace_of(answer, wanted[answer.key], params, verifier)
            append(journal, trace)
            keep(trace, stored)
            new.append(trace)
            status = Status(trace["status"])
            counts["empty"] += status is Status.EMPTY_REASONING
            counts["cut"] += status in CUT
            counts["failed"] += status in TRANSIENT
            speed.add(len(trace["token_ids"]))
            bar.advance(1, f"{speed}, " + ", ".join(f"{n} {kind}" for kind, n in counts.items()))
            gate.add(trace)

        first = settings.gate.num_samples
        try:
            for keys in filter(None, (todo[:first], todo[first:])):
                requests = (Request(key, request_body(wanted[key], settings)) for key in keys)
                run(
                    ask_all(
                        requests, endpoints, settings.concurrency, settings.timeout_s, on_answer
                    )
                )
                if len(new) >= min(first, len(wanted)):
                    check_refused(new)
                gate.check(new)
            gate.check(stored[key] for key in wanted)
        except GateFailed:
            forget((trace["key"] for trace in new if gate.is_bad(trace)), keep_in=FAILED_GATE)
            raise


def check_refused(new: list[Trace]) -> None:
    """A server that refuses everything is the wrong server, or served wrongly.

    Raises:
        BadRun: with the server's own words; the refusals are forgotten.
    """
    if all(trace["status"] == Status.REJECTED_BY_SERVER for trace in new):
        forget(trace["key"] for trace in new)
        raise BadRun(f"the server refuses every question: {new[-1].get('error')}")


def trace_of(answer: Answer, prompt: Prompt, params: Params, verifier: VerifierIdentity) -> Trace:
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
        "sampling": {**params.generate.sampling, "max_tokens": params.generate.max_tokens},
        "attempts": answer.attempts,
        "server_version": answer.endpoint.version,
    }
    if answer.body is None:
        trace["error"] = answer.error or ""
        trace["max_model_len"] = params.verifier.max_model_len
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
    trace["status"] = judge(trace, verifier, thinking=params.generate.thinking)
    return trace


def rejudged(trace: Trace, prompt: Prompt, params: Generate, verifier: VerifierIdentity) -> Trace:
    """A stored answer under the present think ids: its text stays, its status may change."""
    judged: Trace = {**trace, "source": prompt["source"]}
    if trace["token_ids"]:
        judged["status"] = judge(trace, verifier, thinking=params.thinking)
    return judged


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
