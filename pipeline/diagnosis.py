"""What is wrong with a run, in words, and which line of params.yaml to change.

    raise GateFailed(diagnosis.of_run(evidence, endpoint, question, params, verifier))

Where the answers alone cannot tell (the verifier does not think: is it the switch, its name, or
the model?), the running server is asked: the known switches are tried and what works is said.
"""

import json
from functools import reduce
from typing import Any

from yaml import YAMLError

from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import PipelineError
from pipeline.exchange import Question, request_body, trace_of
from pipeline.gate import Evidence
from pipeline.params import PARAMS_PATH, Generate, Params, line_of
from pipeline.reasoning import Cause, has_thought
from pipeline.records import Message, Trace
from pipeline.server import Endpoint
from pipeline.verifier import VerifierIdentity

# Long enough to see whether a think block opens and holds something.
TRY_MAX_TOKENS = 128
SWITCHES = ("thinking", "enable_thinking")  # of a chat template, on and off
SYSTEM_SWITCH = "detailed thinking on"  # Nemotron's
SHOWN_CHARACTERS = 80


def of_run(
    evidence: Evidence,
    endpoint: Endpoint | None,
    question: Question,
    params: Params,
    verifier: VerifierIdentity,
) -> str:
    """The whole message: how many answers fail, why, what to change, and two of them."""
    causes = evidence.causes
    others = ", ".join(f"{n} {cause}" for cause, n in causes.most_common()[1:])
    words = in_words(evidence.main_cause, evidence.examples, endpoint, question, params, verifier)
    return (
        f"{causes.total()} of {evidence.num_judged} answers fail the reasoning gate: {words}"
        + (f" (besides: {others})" if others else "")
        + "".join(f"\n  {shown(trace)}" for trace in evidence.examples)
    )


def in_words(
    cause: Cause,
    examples: list[Trace],
    endpoint: Endpoint | None,
    question: Question,
    params: Params,
    verifier: VerifierIdentity,
) -> str:
    """The cause, and the line of params.yaml that mends it."""

    def at(key: str) -> str:
        return line(key, params)

    match cause:
        case Cause.THINKING_OFF | Cause.NOT_THINKING:
            what = (
                "the chat template closes the think block itself, so the verifier does not think"
                if cause is Cause.THINKING_OFF
                else "the verifier did not think"
            )
            return f"{what}; {switch_advice(endpoint, question, params, verifier)}"
        case Cause.THINKS_ANYWAY:
            what = "the verifier thinks although generate.thinking is false"
            return f"{what}; {at('generate.thinking_switch')}"
        case Cause.SHORT:
            return f"the reasoning is shorter than {at('generate.gate.min_reasoning_tokens')}"
        case Cause.CUT:
            return f"the reasoning is cut before it closes: raise {at('generate.max_tokens')}"
        case Cause.UNCLOSED:
            return f"the reasoning stops without a closing token; {at('think.end')}"
        case Cause.NO_ANSWER:
            return f"the turn ends with the reasoning, before an answer; {at('think.end')}"
        case Cause.NO_TOKEN_IDS:
            return (
                "the server returns no token ids, so nothing exact could be made of its answers: "
                f"ask a vLLM that knows return_token_ids ({line('generate.endpoints')}), or have "
                f"the answers rebuilt from text: set {at('reassemble.source')} to text or "
                "ids_else_text"
            )
        case Cause.NO_PARSER:
            return (
                "reasoning and answer come as one text in `content`: the server runs without a "
                f"reasoning parser; {at('verifier.reasoning_parser')} "
                "(for a server of your own: --reasoning-parser)"
            )
        case Cause.WRONG_PARSER:
            return (
                "the whole answer comes in `reasoning` and `content` is empty: the server's "
                f"reasoning parser is that of another model; {at('verifier.reasoning_parser')}"
            )
        case Cause.FIELD_RENAMED:
            fields = ", ".join({field for t in examples for field in t.get("other_fields", [])})
            return (
                f"the reasoning comes in a field this pipeline does not know ({fields}): the "
                f"server is newer or of another kind; {line('generate.endpoints')}"
            )
        case Cause.REASONING_HIDDEN:
            return (
                "the reasoning is generated and billed but left out of the answer: something "
                "between here and the verifier sets include_reasoning to false or strips it; "
                f"{line('generate.endpoints')}"
            )
        case Cause.LOOPING:
            return (
                "the verifier repeats itself until it is cut; "
                f"{at('generate.temperature')}, {at('verifier.dtype')}"
            )
        case Cause.GARBAGE:
            return (
                "the verifier writes one token over and over; "
                f"{at('verifier.dtype')}, {at('verifier.quantization')}"
            )
        case Cause.CONFLICT:
            return (
                "token ids, text and finish_reason contradict each other: the think or end tokens "
                f"are not those of this server; {at('think.end')}"
            )
        case Cause.ABORTED:
            reasons = ", ".join({f"{trace['finish_reason']!r}" for trace in examples})
            return f"the server ends its answers with finish_reason {reasons}; see its log"
        case Cause.TOOL_CALL:
            what = "the verifier calls tools, though none were offered"
            return f"{what}; {at('verifier.reasoning_parser')}"


def line(key: str, params: Params | None = None) -> str:
    """`params.yaml:83 generate.thinking_switch: thinking`, the value only with `params`."""
    said = f": {reduce(getattr, key.split('.'), params)}" if params else ""
    try:
        return f"{PARAMS_PATH}:{line_of(key)} {key}{said}"
    except (OSError, ValueError, YAMLError, AssertionError, StopIteration):
        return f"{PARAMS_PATH} {key}{said}"  # it was edited while the run went on


def shown(trace: Trace) -> str:
    """A record as the person in the story saw it."""
    texts = {"reasoning": _cut(trace.get("reasoning")), "content": _cut(trace.get("content"))}
    return json.dumps({**texts, "status": trace["status"]}, ensure_ascii=False)


def _cut(text: str | None) -> str | None:
    """Its beginning, without what a terminal would obey."""
    if text is None:
        return None
    beginning = "".join(c if c.isprintable() or c.isspace() else "�" for c in text)
    more = "…" if len(text) > SHOWN_CHARACTERS else ""
    return beginning[:SHOWN_CHARACTERS] + more


def switch_advice(
    endpoint: Endpoint | None, question: Question, params: Params, verifier: VerifierIdentity
) -> str:
    """Which switch makes the verifier think, tried on the running server."""
    now = line("generate.thinking_switch", params)
    if endpoint is None:
        return f"a name that the chat template does not know is ignored; {now}"
    tried = tries(question.messages, params)
    working = thinks_with(tried, endpoint, question, params, verifier)
    if (params.generate.thinking_switch or "null") in working:
        return f"asked once more, it does: its answers differ from one to the next; {now}"
    named = [name for name in working if name in (*SWITCHES, "null")]
    if named:
        return f"it does with {' or '.join(named)}: change {now}"
    if "reasoning_effort" in working:
        return f"it does with reasoning_effort: high, which this pipeline does not send; {now}"
    if working:
        return f'it does with the system prompt "{SYSTEM_SWITCH}": give it to the questions'
    return (
        f"it does with none of the known switches ({', '.join(tried)}): it is no reasoning model, "
        f"its server does not let it, or its think tokens are others; "
        f"{line('think.start', params)}"
    )


def tries(messages: list[Message], params: Params) -> dict[str, dict[str, Any]]:
    """The known ways to switch thinking on, as request bodies by name; `null` is none at all."""
    body = request_body(messages, params.generate, TRY_MAX_TOKENS)
    del body["chat_template_kwargs"]
    others = [message for message in messages if message["role"] != "system"]
    return {
        **{name: body | {"chat_template_kwargs": {name: True}} for name in SWITCHES},
        "null": body,
        "reasoning_effort": body | {"reasoning_effort": "high"},
        "a system prompt": body
        | {"messages": [{"role": "system", "content": SYSTEM_SWITCH}, *others]},
    }


def thinks_with(
    bodies: dict[str, dict[str, Any]],
    endpoint: Endpoint,
    question: Question,
    params: Params,
    verifier: VerifierIdentity,
) -> list[str]:
    """The names of those bodies that are answered with reasoning."""
    try:
        answers = answers_to(bodies, endpoint, params.generate)
    except PipelineError:
        return []  # it died meanwhile; the diagnosis must not hide behind that
    traces = {name: trace_of(a, question, params, verifier) for name, a in answers.items()}
    return [
        name
        for name in bodies
        if has_thought(traces[name], verifier) and traces[name]["status"] != "empty_reasoning"
    ]


def answers_to(
    bodies: dict[str, dict[str, Any]], endpoint: Endpoint, params: Generate
) -> dict[str, Answer]:
    """Ask a few things of one server, all at once."""
    answers: dict[str, Answer] = {}

    def on_answer(answer: Answer) -> None:
        answers[answer.key] = answer

    requests = [Request(name, body) for name, body in bodies.items()]
    timeout_s, stall_s = params.timeout_s, params.stall_s
    run(ask_all(requests, [endpoint], len(requests), timeout_s, on_answer, stall_s=stall_s))
    return answers
