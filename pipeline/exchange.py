"""One question and its answer: the key, the JSON on the wire, and the row that is stored.

question = Question.first(prompt)
request_body(question.messages, params.generate, max_tokens)   → what is sent
trace_of(answer, question, …)                                  → records.Trace
question.next_turn(content)                                    → the user's next question
"""

from typing import Any, NamedTuple

import orjson

from pipeline.client import Answer
from pipeline.params import Generate, Params
from pipeline.reasoning import judge, split_content
from pipeline.records import Message, Prompt, Status, Trace, turn_id
from pipeline.resume import content_key
from pipeline.verifier import VerifierIdentity

# Where servers put the reasoning: vLLM's present name, and that of earlier ones and of others.
REASONING_FIELDS = ("reasoning", "reasoning_content")
KNOWN_FIELDS = frozenset({*REASONING_FIELDS, "role", "content", "refusal", "name", "tool_calls"})


class Question(NamedTuple):
    """One turn of a conversation, with all that was said before it."""

    prompt: Prompt
    turn: int
    messages: list[Message]

    @classmethod
    def first(cls, prompt: Prompt) -> "Question":
        return cls(prompt, 0, prompt["messages"])

    @property
    def sample_id(self) -> str:
        return turn_id(self.prompt, self.turn)

    @property
    def num_later(self) -> int:
        return len(self.prompt["later_turns"]) - self.turn

    def next_turn(self, content: str) -> "Question":
        """The user's next question after the verifier's own answer. Its reasoning is left out, as
        a chat client leaves it out: the draft will meet histories without."""
        said: list[Message] = [
            {"role": "assistant", "content": content},
            {"role": "user", "content": self.prompt["later_turns"][self.turn]},
        ]
        return Question(self.prompt, self.turn + 1, [*self.messages, *said])


def trace_key(
    messages: list[Message],
    sampling: dict[str, Any],
    template_kwargs: dict[str, bool],
    verifier: VerifierIdentity,
) -> str:
    """What determines an answer, and nothing else: no budget, time-out, endpoint or think id."""
    return content_key(
        {
            "messages": messages,
            "sampling": sampling,
            "thinking": template_kwargs,
            "model": verifier.model,
            "weights": verifier.weights_fingerprint,
            "chat_template": verifier.chat_template_sha256,
            "tokenizer": verifier.tokenizer_sha256,
        }
    )


def request_body(messages: list[Message], params: Generate, max_tokens: int) -> dict[str, Any]:
    """The JSON on the wire, less the model. Every sampling value is sent, so that no
    generation_config.json beside the model decides in silence."""
    return {
        "messages": messages,
        "max_tokens": max_tokens,
        **params.sampling,
        "chat_template_kwargs": params.template_kwargs,
        "return_token_ids": True,
    }


def trace_of(
    answer: Answer, question: Question, params: Params, verifier: VerifierIdentity
) -> Trace:
    """The row to store for one answer. One that makes no sense is a row with status `failed`."""
    trace: Trace = {
        "sample_id": question.sample_id,
        "key": answer.key,
        "status": {
            "refused": Status.REJECTED_BY_SERVER,
            "timed_out": Status.TIMED_OUT,
        }.get(answer.outcome, Status.FAILED),
        "source": question.prompt["source"],
        "messages": question.messages,
        "finish_reason": None,
        "prompt_token_ids": [],
        "token_ids": [],
        "usage": {},
        "sampling": {**params.generate.sampling, "max_tokens": answer.max_tokens},
        "max_model_len": params.verifier.max_model_len,
        "attempts": answer.attempts,
        "server_version": answer.endpoint.version,
    }
    if answer.body is None:
        return {**trace, "error": answer.error or ""}
    try:
        return _answered(trace, answer.body, verifier, thinking=params.generate.thinking)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        what = f"the answer makes no sense: {type(error).__name__}: {error}"
        return {**trace, "error": what[:300]}


def _answered(
    trace: Trace, body: dict[str, Any], verifier: VerifierIdentity, *, thinking: bool
) -> Trace:
    """`trace` with what the server said. Raises KeyError and its like on another shape."""
    choice = body["choices"][0]
    message: dict[str, Any] = choice["message"] or {}
    row: Trace = {**trace, "finish_reason": choice.get("finish_reason")}
    row["prompt_token_ids"] = _ids(body.get("prompt_token_ids"), verifier)
    row["token_ids"] = _ids(choice.get("token_ids"), verifier)
    # Absent, null and "" stay three different things; of two fields the one with a text counts.
    given = [field for field in REASONING_FIELDS if field in message]
    for field in sorted(given, key=lambda f: (not message[f], message[f] is None))[:1]:
        row["reasoning"] = _text(message[field])
    if "content" in message:
        row["content"] = _text(message["content"])
    if message.get("tool_calls"):
        row["tool_calls"] = message["tool_calls"]
    # What could not be stored (nested too deep) makes no sense either: TypeError.
    orjson.dumps([row["finish_reason"], message.get("tool_calls")])
    others = [
        field
        for field, value in message.items()
        if field not in KNOWN_FIELDS and isinstance(value, str) and value.strip()
    ]
    if others:
        row["other_fields"] = sorted(others)
    row["usage"] = _usage(body.get("usage") or {})
    if thinking and (parts := split_content(row, verifier)):
        row["reasoning"], row["content"] = parts
        row["unsplit"] = True
    row["status"] = judge(row, verifier, thinking=thinking)
    return row


def _ids(value: Any, verifier: VerifierIdentity) -> list[int]:
    """Raises ValueError for what are no ids of this verifier."""
    ids = value or []
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise ValueError("token ids that are no integers")
    if ids and not 0 <= min(ids) <= max(ids) < verifier.vocab_size:
        raise ValueError(f"token ids beyond the verifier's {verifier.vocab_size}")
    return ids


def _text(value: Any) -> str | None:
    if not isinstance(value, str | None):
        raise ValueError(f"text that is {type(value).__name__}")
    return value


def _usage(usage: dict[str, Any]) -> dict[str, int]:
    details = usage.get("completion_tokens_details") or {}
    counted = {**usage, **{k: v for k, v in details.items() if k == "reasoning_tokens"}}
    return {name: count for name, count in counted.items() if type(count) is int}
