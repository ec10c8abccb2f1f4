"""Questions to a server before the first question: does it do what params.yaml says?

    findings = probe(endpoint, questions, params, verifier)     # three short requests

What a run would otherwise find out after hours: whether token ids come back, which field carries
the reasoning, whether the thinking switch takes effect, whether the sampling values arrive. All of
it is proved on what the server sends, on token ids where that is possible. `generate` stores the
findings beside the traces, in data/traces/probe.json.
"""

import heapq
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from pipeline.client import Answer
from pipeline.diagnosis import SWITCHES, answers_to, in_words, line, shown
from pipeline.errors import BadRun
from pipeline.exchange import REASONING_FIELDS, Question, request_body, trace_of
from pipeline.params import Params
from pipeline.reasoning import SOFT_SWITCH, Cause, has_ids, is_prefilled, verdict_of
from pipeline.records import Status, Trace
from pipeline.server import Endpoint, authorization
from pipeline.traces import Stored
from pipeline.verifier import VerifierIdentity

# Enough to see a short question through; longer reasoning is left to the gate.
MAX_TOKENS = 1024
MAX_QUESTIONS = 3
# What one answer must not decide: the gate judges it over many.
LEFT_TO_THE_GATE = frozenset(
    {Cause.CUT, Cause.SHORT, Cause.LOOPING, Cause.NO_ANSWER, Cause.UNCLOSED, Cause.TOOL_CALL}
)
# vLLM's words when the logits hold NaN, which JSON cannot.
NOT_A_NUMBER = re.compile(r"\bnan\b|not JSON compliant", re.IGNORECASE)


@dataclass(frozen=True)
class Findings:
    """What one server does; None where it could not be seen."""

    server_version: str
    model: str
    max_model_len: int
    returns_token_ids: bool
    reasoning_field: str | None
    think_start_in: str | None  # prompt | completion
    switch_takes_effect: bool | None
    think_tokens_in_text: bool | None  # False: the server drops them as special tokens
    sampling_arrives: bool | None

    def __str__(self) -> str:
        said = {
            f"vLLM {self.server_version} serves {self.model}, {self.max_model_len} tokens of "
            "context": True,
            "token ids come back": self.returns_token_ids,
            "no token ids come back, only text": not self.returns_token_ids,
            f"reasoning comes in `{self.reasoning_field}`": self.reasoning_field,
            f"the think-start is in the {self.think_start_in}": self.think_start_in,
            "the thinking switch takes effect": self.switch_takes_effect,
            "think tokens show in text": self.think_tokens_in_text,
            "think tokens are left out of text": self.think_tokens_in_text is False,
            "sampling values arrive": self.sampling_arrives,
        }
        return ", ".join(words for words, holds in said.items() if holds)


def questions_to_probe_with(
    wanted: dict[str, Question], stored: dict[str, Stored]
) -> list[Question]:
    """The shortest ones, since their answers tend to be short. Last come those that switch thinking
    off and those that were asked in vain before."""

    def rank(key: str) -> tuple[bool, bool, int]:
        texts = [message["content"] for message in wanted[key].messages]
        answer = stored.get(key)
        failed = answer is not None and answer.verdict.status is not Status.OK
        return failed, any(map(SOFT_SWITCH.search, texts)), sum(map(len, texts))

    return [wanted[key] for key in heapq.nsmallest(MAX_QUESTIONS, wanted, key=rank)]


def probe(
    endpoint: Endpoint, questions: list[Question], params: Params, verifier: VerifierIdentity
) -> Findings:
    """What the server does with the first of `questions` that it answers.

    Raises:
        BadRun: it answers none of them, or does not do what params.yaml and verifier.json say; the
            message names the line.
    """
    *others, last = questions
    for question in others:
        with suppress(NotAnswered):
            return _probe(endpoint, question, params, verifier)
    return _probe(endpoint, last, params, verifier)


class NotAnswered(BadRun):
    """The server does not answer a question, which may be the question's fault."""


def _probe(
    endpoint: Endpoint, question: Question, params: Params, verifier: VerifierIdentity
) -> Findings:
    generate = params.generate
    body = request_body(question.messages, generate, min(MAX_TOKENS, generate.max_tokens))
    body |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
    # With the probability of each token beside that of the likeliest one. Of two, because vLLM
    # lists the token itself first.
    bodies = {"as configured": body | {"logprobs": True, "top_logprobs": 2}}
    if generate.thinking_switch:
        switched = {generate.thinking_switch: not generate.thinking}
        bodies["switched"] = body | {"chat_template_kwargs": switched, "max_tokens": 1}
    answers = answers_to(bodies, endpoint, generate)
    answer = answers["as configured"]
    if answer.outcome == "refused" and not NOT_A_NUMBER.search(answer.error or ""):
        # Some servers know no logprobs.
        answer = answers_to({"as configured": body}, endpoint, generate)[answer.key]
    trace = trace_of(answer, question, params, verifier)
    if "error" in trace:
        is_certain = answer.outcome == "timed_out" or NOT_A_NUMBER.search(trace["error"])
        kind = BadRun if is_certain else NotAnswered
        raise kind(f"{endpoint.base_url} {_no_answer(trace['error'], params)}")
    findings = Findings(
        server_version=endpoint.version,
        model=endpoint.model,
        max_model_len=endpoint.max_model_len,
        returns_token_ids=has_ids(trace),
        reasoning_field=_reasoning_field(answer, trace),
        think_start_in=_think_start_in(trace, verifier),
        switch_takes_effect=_differs(trace, answers.get("switched")),
        think_tokens_in_text=_think_tokens_in_text(endpoint, trace, verifier),
        sampling_arrives=_is_greedy(answer),
    )
    problem = _problem(findings, trace, endpoint, question, params, verifier)
    if problem:
        raise BadRun(f"probe of {endpoint.base_url}: {problem}")
    return findings


def _no_answer(error: str, params: Params) -> str:
    if NOT_A_NUMBER.search(error):
        dtype = line("verifier.dtype", params)
        return f"calculates NaN ({error}): check {dtype}"
    return f"does not answer the first question: {error}"


def _problem(
    findings: Findings,
    trace: Trace,
    endpoint: Endpoint,
    question: Question,
    params: Params,
    verifier: VerifierIdentity,
) -> str | None:
    cause = verdict_of(trace, verifier, params).cause
    if cause and cause not in LEFT_TO_THE_GATE:
        words = in_words(cause, [trace], endpoint, question, params, verifier)
        return f"{words}\n  {shown(trace)}"
    if findings.switch_takes_effect is False:
        return _switch_is_ignored(endpoint, question, params, verifier)
    if findings.sampling_arrives is False:
        return (
            "temperature 0 was asked for and other tokens than the likeliest came: something "
            "between here and the verifier changes the sampling values, or its "
            f"generation_config.json decides; {line('generate.endpoints')}"
        )
    return None


def _reasoning_field(answer: Answer, trace: Trace) -> str | None:
    """The field that holds the reasoning, as the server sent it."""
    assert answer.body is not None
    message = answer.body["choices"][0]["message"] or {}
    return next((field for field in REASONING_FIELDS if (message.get(field) or "").strip()), None)


def _think_start_in(trace: Trace, verifier: VerifierIdentity) -> str | None:
    if is_prefilled(trace["prompt_token_ids"], verifier):
        return "prompt"
    return "completion" if verifier.think_start_id in trace["token_ids"] else None


def _differs(trace: Trace, switched: Answer | None) -> bool | None:
    """Whether the other position of the thinking switch makes another prompt."""
    ids = (switched.body or {}).get("prompt_token_ids") if switched else None
    return ids != trace["prompt_token_ids"] if ids and trace["prompt_token_ids"] else None


def _switch_is_ignored(
    endpoint: Endpoint, question: Question, params: Params, verifier: VerifierIdentity
) -> str:
    """Says which of the known switches makes a difference to the prompt."""
    body = request_body(question.messages, params.generate, 1)
    bodies = {
        f"{name} {value}": body | {"chat_template_kwargs": {name: value}}
        for name in SWITCHES
        for value in (True, False)
    }
    answers = answers_to(bodies, endpoint, params.generate)
    prompts = {key: (a.body or {}).get("prompt_token_ids") for key, a in answers.items()}
    known = [name for name in SWITCHES if prompts[f"{name} True"] != prompts[f"{name} False"]]
    advice = " or ".join(known) or "null, for it knows neither thinking nor enable_thinking"
    now = line("generate.thinking_switch", params)
    return f"the chat template does not know {now}; the prompt stays the same. Set it to {advice}"


def _think_tokens_in_text(
    endpoint: Endpoint, trace: Trace, verifier: VerifierIdentity
) -> bool | None:
    """Whether the closing tag shows in plain text: without it no text could be split by hand.

    The verifier is given its own answer up to the think-end and writes that once more, outside of
    the chat API and its parser.
    """
    if verifier.think_end_id not in trace["token_ids"]:
        return None
    before = trace["token_ids"][: trace["token_ids"].index(verifier.think_end_id)]
    body: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": [*trace["prompt_token_ids"], *before],
        "max_tokens": 1,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    try:
        with httpx2.Client(timeout=60, trust_env=False, headers=authorization()) as client:
            response = client.post(f"{endpoint.base_url}/completions", json=body)
            choice = response.raise_for_status().json()["choices"][0]
            wrote_it = choice["token_ids"][:1] == [verifier.think_end_id]
            return verifier.think_end in choice["text"] if wrote_it else None
    except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return None  # a server with the chat API alone


def _is_greedy(answer: Answer) -> bool | None:
    """Whether each token was the likeliest, as temperature 0 and no penalty make it."""
    assert answer.body is not None
    try:
        tokens = (answer.body["choices"][0].get("logprobs") or {}).get("content") or []
        margins = [
            token["logprob"] - max(likely["logprob"] for likely in token["top_logprobs"])
            for token in tokens
        ]
        return min(margins) >= -1e-4 if margins else None
    except (KeyError, ValueError, TypeError, AttributeError):
        return None  # probabilities of another shape
