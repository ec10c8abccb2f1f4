"""What the verifier wrote in one answer: did it think, did it close, did it answer?

`judge` rests on token ids. Text can lie in both directions: a server without a reasoning parser
gives thinking answers with `"reasoning": null`, and marker text spelt in ordinary tokens splits the
text where no marker was generated. Text decides only where a trace has no ids: an import, or the
answer of a server that returns none, which `reassemble.source` must allow.

`cause_of` says why an answer speaks against the whole run; pipeline.gate counts these.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pipeline.params import Params
from pipeline.records import Status, Trace
from pipeline.verifier import VerifierIdentity

# What users write to switch thinking off themselves (Qwen3, GLM).
SOFT_SWITCH = re.compile(r"/no_?think\b")
# A cut answer loops when its last tokens are at least this many rounds of the same few tokens.
LOOP_MAX_PERIOD, LOOP_MIN_ROUNDS, LOOP_MIN_TOKENS = 64, 4, 48
# Says nothing about whether the verifier thinks.
NOT_JUDGED = frozenset(
    {Status.THINKING_OFF_BY_USER, Status.REJECTED_BY_SERVER, Status.TIMED_OUT, Status.FAILED}
)


class Cause(StrEnum):
    """Why an answer speaks against the run it comes from. pipeline.diagnosis has the words."""

    THINKING_OFF = "thinking_off"  # the prompt itself closes the think block
    NOT_THINKING = "not_thinking"  # no think block, or an empty one
    THINKS_ANYWAY = "thinks_anyway"  # although it was told not to
    SHORT = "short"  # closed, but below gate.min_reasoning_tokens
    CUT = "cut"  # max_tokens came before the think-end
    UNCLOSED = "unclosed"  # it stopped by itself before the think-end
    NO_ANSWER = "no_answer"  # nothing after the think-end
    NO_TOKEN_IDS = "no_token_ids"  # left out, and reassemble.source: ids needs them
    NO_PARSER = "no_parser"  # reasoning and its end tag lie in `content`
    WRONG_PARSER = "wrong_parser"  # all of it lies in `reasoning`
    FIELD_RENAMED = "field_renamed"  # reasoning lies in a field of another name
    REASONING_HIDDEN = "reasoning_hidden"  # generated and billed, but left out of the answer
    LOOPING = "looping"
    GARBAGE = "garbage"
    CONFLICT = "conflict"  # ids and finish_reason contradict each other
    ABORTED = "aborted"
    TOOL_CALL = "tool_call"


@dataclass(frozen=True)
class Spans:
    """Half-open ranges of prompt_token_ids + token_ids; None for what is not there."""

    reasoning: tuple[int, int] | None  # between the think tokens; to the end if never closed
    answer: tuple[int, int] | None  # after the think-end, or the whole turn without a think block
    ends_turn: bool  # the last token is one of the verifier's end ids
    num_starts: int  # think-starts of this turn before the first think-end


class Verdict(NamedTuple):
    """One answer in short: all that a run remembers of it besides where it lies on disk."""

    status: Status
    cause: Cause | None  # None: nothing speaks against the run
    prompt_tokens: int
    generated_tokens: int
    reasoning_tokens: int


def verdict_of(trace: Trace, verifier: VerifierIdentity, params: Params) -> Verdict:
    """Judge an answer under the present params; one that never came keeps its status."""
    status = Status(trace["status"])
    if trace["token_ids"] or trace["finish_reason"] is not None:  # the server did answer
        status = judge(trace, verifier, thinking=params.generate.thinking)
    usage = trace["usage"]
    return Verdict(
        status,
        cause_of(trace, status, verifier, params),
        len(trace["prompt_token_ids"]) or usage.get("prompt_tokens", 0),
        len(trace["token_ids"]) or usage.get("completion_tokens", 0),
        num_reasoning_tokens(trace, verifier),
    )


def has_ids(trace: Trace) -> bool:
    """Those of the prompt too: without them nobody knows whether it opened the think block."""
    return bool(trace["prompt_token_ids"] and trace["token_ids"])


def spans_of(
    prompt_ids: Sequence[int], token_ids: Sequence[int], verifier: VerifierIdentity
) -> Spans:
    """Where reasoning and answer lie, by the first think-end id after the think-start."""
    offset = len(prompt_ids)
    ends_turn = bool(token_ids) and token_ids[-1] in verifier.end_ids
    stop = len(token_ids) - ends_turn
    prefilled = is_prefilled(prompt_ids, verifier)
    try:
        before_end = token_ids[: token_ids.index(verifier.think_end_id, 0, stop)]
        is_closed = True
    except ValueError:
        before_end, is_closed = token_ids[:stop], False
    num_starts = before_end.count(verifier.think_start_id) + prefilled
    if num_starts == 0:
        return Spans(None, (offset, offset + stop), ends_turn, 0)
    begin = offset if prefilled else offset + before_end.index(verifier.think_start_id) + 1
    end = offset + len(before_end)
    answer = (end + 1, offset + stop) if is_closed else None
    return Spans((begin, end), answer, ends_turn, num_starts)


def is_prefilled(prompt_ids: Sequence[int], verifier: VerifierIdentity) -> bool:
    """Whether the chat template itself opened a think block that the verifier is to close."""
    return _last_marker(prompt_ids, verifier) == verifier.think_start_id


def is_closed_by_prompt(prompt_ids: Sequence[int], verifier: VerifierIdentity) -> bool:
    """Whether the chat template closed the think block, which switches thinking off."""
    return _last_marker(prompt_ids, verifier) == verifier.think_end_id


def _last_marker(prompt_ids: Sequence[int], verifier: VerifierIdentity) -> int | None:
    """The last think, end or control token. A think token before it, which a user may have typed
    into the question, is no part of the generation prompt."""
    return next((t for t in reversed(prompt_ids) if t in verifier.markers), None)


def judge(trace: Trace, verifier: VerifierIdentity, *, thinking: bool) -> Status:
    """The status of an answer that the server finished, by ids first and text second.

    `thinking` is what was asked for; without it an answer needs no reasoning to be ok.
    """
    finish = trace["finish_reason"]
    if finish == "tool_calls" or trace.get("tool_calls"):
        return Status.TOOL_CALL
    if finish not in ("stop", "length"):
        return Status.ABORTED
    if not has_ids(trace):
        return _judge_text(trace, thinking=thinking)
    ids = trace["token_ids"]
    spans = spans_of(trace["prompt_token_ids"], ids, verifier)
    if (finish == "stop") != spans.ends_turn:
        return Status.PARSER_CONFLICT
    if finish == "length" and (period := loop_period(ids)):
        return Status.GARBAGE if period == 1 else Status.LOOPING
    tokens = [*trace["prompt_token_ids"], *ids]

    def is_blank(span: tuple[int, int]) -> bool:
        return verifier.blank.issuperset(tokens[slice(*span)])

    if thinking:
        if spans.num_starts == 0 and verifier.think_end_id in ids:
            return Status.PARSER_CONFLICT  # it closes what nobody opened
        if spans.reasoning is None or (spans.answer is not None and is_blank(spans.reasoning)):
            return _without_reasoning(trace)
        if spans.num_starts > 1:
            return Status.PARSER_CONFLICT
        if spans.answer is None:
            cut = finish == "length"
            return Status.TRUNCATED_IN_REASONING if cut else Status.UNCLOSED_REASONING
    elif spans.reasoning is not None and not is_blank(spans.reasoning):
        return Status.PARSER_CONFLICT  # it thinks although it was told not to
    if spans.answer is None or is_blank(spans.answer):
        return Status.TRUNCATED_IN_ANSWER if finish == "length" else Status.EMPTY_ANSWER
    return Status.TRUNCATED_IN_ANSWER if finish == "length" else Status.OK


def _judge_text(trace: Trace, *, thinking: bool) -> Status:
    """The same from `reasoning` and `content`, for an answer without ids."""
    reasoning, content = _text(trace, "reasoning"), _text(trace, "content")
    if reasoning and not thinking:
        return Status.PARSER_CONFLICT  # it thinks although it was told not to
    if trace["finish_reason"] == "length":
        if period := loop_period(content or reasoning):
            return Status.GARBAGE if period == 1 else Status.LOOPING
        # Some parsers put a reasoning that was cut into `content`: one text alone is reasoning.
        cut_late = (reasoning and content) or not thinking
        return Status.TRUNCATED_IN_ANSWER if cut_late else Status.TRUNCATED_IN_REASONING
    if thinking and not reasoning:
        return _without_reasoning(trace) if content else Status.PARSER_CONFLICT
    if not content:  # with reasoning alone, the text cannot tell where it ended
        return Status.PARSER_CONFLICT if reasoning else Status.EMPTY_ANSWER
    return Status.OK


def _without_reasoning(trace: Trace) -> Status:
    asked = any(
        SOFT_SWITCH.search(message["content"])
        for message in trace["messages"]
        if message["role"] != "assistant"
    )
    return Status.THINKING_OFF_BY_USER if asked else Status.EMPTY_REASONING


def loop_period(tokens: Sequence[Any]) -> int:
    """The number of tokens that the end of `tokens` repeats over and over; 0 if it does not."""
    for period in range(1, LOOP_MAX_PERIOD + 1):
        length = max(LOOP_MIN_TOKENS, period * LOOP_MIN_ROUNDS)
        tail = tokens[-length:]
        if len(tail) == length and tail[period:] == tail[:-period]:
            return period
    return 0


def num_reasoning_tokens(trace: Trace, verifier: VerifierIdentity) -> int:
    """By ids; of a trace without ids, what the server billed as reasoning."""
    if not has_ids(trace):
        return trace["usage"].get("reasoning_tokens", 0)
    reasoning = spans_of(trace["prompt_token_ids"], trace["token_ids"], verifier).reasoning
    return reasoning[1] - reasoning[0] if reasoning else 0


def has_thought(trace: Trace, verifier: VerifierIdentity) -> bool:
    """By ids; of a trace without ids, by the bill or the text."""
    shows = not has_ids(trace) and _text(trace, "reasoning")
    return bool(shows or num_reasoning_tokens(trace, verifier))


def split_content(trace: Trace, verifier: VerifierIdentity) -> tuple[str, str] | None:
    """Reasoning and answer of a `content` that no parser split; None when there is none to split.

    The first closing tag splits, if the ids hold a think-end at all (a tag can be the topic of an
    answer), and the white space next to the tags stays.
    """
    content = trace.get("content") or ""
    generated_end = not trace["token_ids"] or verifier.think_end_id in trace["token_ids"]
    if _text(trace, "reasoning") or verifier.think_end not in content or not generated_end:
        return None
    before, _, answer = content.partition(verifier.think_end)
    ahead, opened, reasoning = before.partition(verifier.think_start)
    return (reasoning if opened and not ahead.strip() else before), answer


def cause_of(
    trace: Trace, status: Status, verifier: VerifierIdentity, params: Params
) -> Cause | None:
    """Why this answer speaks against the run; None if it does not."""
    if status in NOT_JUDGED:
        return None
    generate, is_imported = params.generate, trace.get("imported", False)
    by_text = not has_ids(trace) and not is_imported
    fault = _fault_of_text(trace) if by_text else None
    needs_ids = params.reassemble.source == "ids"
    if by_text and needs_ids and status not in (Status.ABORTED, Status.TOOL_CALL):
        return fault or Cause.NO_TOKEN_IDS
    match status:
        case Status.EMPTY_REASONING:
            off = is_closed_by_prompt(trace["prompt_token_ids"], verifier)
            return fault or (Cause.THINKING_OFF if off else Cause.NOT_THINKING)
        case Status.PARSER_CONFLICT:
            if has_thought(trace, verifier) and not generate.thinking:
                return Cause.THINKS_ANYWAY
            return fault or Cause.CONFLICT
        case Status.OK | Status.TRUNCATED_IN_ANSWER:
            if not generate.thinking or is_imported:
                return None
            # By ids there is at least one; 0 means that the server does not count them.
            if 0 < num_reasoning_tokens(trace, verifier) < generate.gate.min_reasoning_tokens:
                return Cause.SHORT
            return _fault_of_text(trace)
    return {
        Status.TRUNCATED_IN_REASONING: Cause.CUT,
        Status.UNCLOSED_REASONING: Cause.UNCLOSED,
        Status.EMPTY_ANSWER: Cause.NO_ANSWER,
        Status.LOOPING: Cause.LOOPING,
        Status.GARBAGE: Cause.GARBAGE,
        Status.ABORTED: Cause.ABORTED,
        Status.TOOL_CALL: Cause.TOOL_CALL,
    }[status]


def _fault_of_text(trace: Trace) -> Cause | None:
    """What the server did to the text of an answer that does hold reasoning and an answer."""
    if trace.get("unsplit"):
        return Cause.NO_PARSER
    reasoning, content = _text(trace, "reasoning"), _text(trace, "content")
    if reasoning:
        answered = content or trace["finish_reason"] != "stop"
        return None if answered else Cause.WRONG_PARSER
    if trace.get("other_fields"):
        return Cause.FIELD_RENAMED
    if trace["usage"].get("reasoning_tokens") or not content:
        return Cause.REASONING_HIDDEN
    # Neither split nor billed as reasoning: the tags were dropped from the text as special tokens.
    return Cause.NO_PARSER if has_ids(trace) else None


def _text(trace: Trace, field: str) -> str:
    """`reasoning` or `content` without white space around it; "" for null and absent too."""
    return str(trace.get(field) or "").strip()
