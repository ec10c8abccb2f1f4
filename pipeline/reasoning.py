"""Whether the verifier thought: the judgement of one answer, and the gate for a whole run.

The judgement rests on token ids. Text can lie in both directions: a server without a reasoning
parser gives thinking answers with `"reasoning": null`, and marker text spelt in ordinary tokens
splits the text where no marker was generated.
"""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import GateFailed
from pipeline.params import Generate
from pipeline.records import CUT, Status, Trace
from pipeline.verifier import VerifierIdentity

# What users write to switch thinking off themselves (Qwen3, GLM).
SOFT_SWITCH = re.compile(r"/no_?think\b")
# A cut answer loops when its last tokens are at least this many rounds of the same few tokens.
LOOP_MAX_PERIOD, LOOP_MIN_ROUNDS, LOOP_MIN_TOKENS = 64, 4, 48
# What the gate does not count: says nothing about whether the verifier thinks.
NOT_JUDGED = frozenset(
    {Status.THINKING_OFF_BY_USER, Status.REJECTED_BY_SERVER, Status.TIMED_OUT, Status.FAILED}
)


@dataclass(frozen=True)
class Spans:
    """Half-open ranges of prompt_token_ids + token_ids; None for what is not there."""

    reasoning: tuple[int, int] | None  # between the think tokens; to the end if never closed
    answer: tuple[int, int] | None  # after the think-end, or the whole turn without a think block
    ends_turn: bool  # the last token is one of the verifier's end ids
    num_starts: int  # think-starts of this turn before the first think-end


def spans_of(
    prompt_ids: Sequence[int], token_ids: Sequence[int], verifier: VerifierIdentity
) -> Spans:
    """Where reasoning and answer lie, by the first think-end id after the think-start."""
    offset = len(prompt_ids)
    ends_turn = bool(token_ids) and token_ids[-1] in verifier.end_ids
    stop = len(token_ids) - ends_turn
    prefilled = is_prefilled(prompt_ids, verifier)
    ends = [i for i, token in enumerate(token_ids[:stop]) if token == verifier.think_end_id]
    before_end = token_ids[: ends[0]] if ends else token_ids[:stop]
    starts = [i for i, token in enumerate(before_end) if token == verifier.think_start_id]
    num_starts = len(starts) + prefilled
    if num_starts == 0:
        return Spans(None, (offset, offset + stop), ends_turn, 0)
    begin = offset if prefilled else offset + starts[0] + 1
    if not ends:
        return Spans((begin, offset + stop), None, ends_turn, num_starts)
    end = offset + ends[0]
    return Spans((begin, end), (end + 1, offset + stop), ends_turn, num_starts)


def is_prefilled(prompt_ids: Sequence[int], verifier: VerifierIdentity) -> bool:
    """Whether the chat template itself opened a think block that the verifier is to close.

    Only the generation prompt counts, which is what follows the last control token: a think token
    that a user typed into the question opens nothing.
    """
    closing = {verifier.think_end_id, *verifier.end_ids, *verifier.control_ids}
    for token in reversed(prompt_ids):
        if token == verifier.think_start_id:
            return True
        if token in closing:
            return False
    return False


def judge(trace: Trace, verifier: VerifierIdentity, *, thinking: bool) -> Status:
    """The status of an answer that the server finished, by ids first and text second.

    `thinking` is what was asked for; without it an answer needs no reasoning to be ok.
    """
    ids, finish = trace["token_ids"], trace["finish_reason"]
    if finish == "tool_calls":
        return Status.TOOL_CALL
    if finish not in ("stop", "length"):
        return Status.ABORTED
    spans = spans_of(trace["prompt_token_ids"], ids, verifier)
    if (finish == "stop") != spans.ends_turn:
        return Status.PARSER_CONFLICT
    if finish == "length" and (period := loop_period(ids)):
        return Status.GARBAGE if period == 1 else Status.LOOPING
    blank = frozenset(verifier.blank_ids)
    tokens = [*trace["prompt_token_ids"], *ids]

    def is_blank(span: tuple[int, int]) -> bool:
        return blank.issuperset(tokens[slice(*span)])

    if thinking:
        if spans.reasoning is None or (spans.answer is not None and is_blank(spans.reasoning)):
            asked = any(SOFT_SWITCH.search(m["content"]) for m in trace["messages"])
            return Status.THINKING_OFF_BY_USER if asked else Status.EMPTY_REASONING
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


def loop_period(ids: Sequence[int]) -> int:
    """The number of tokens that the end of `ids` repeats over and over; 0 if it does not."""
    for period in range(1, LOOP_MAX_PERIOD + 1):
        length = max(LOOP_MIN_TOKENS, period * LOOP_MIN_ROUNDS)
        tail = ids[-length:]
        if len(tail) == length and list(tail[period:]) == list(tail[:-period]):
            return period
    return 0


def num_reasoning_tokens(trace: Trace, verifier: VerifierIdentity) -> int:
    reasoning = spans_of(trace["prompt_token_ids"], trace["token_ids"], verifier).reasoning
    return reasoning[1] - reasoning[0] if reasoning else 0


class Gate:
    """Stops a run whose answers lack reasoning.

    Of the first `num_samples` answers of a run, and of all at its end, `min_reasoning_fraction`
    must be good. In between any `num_samples` in a row may hold half as many: a healthy run has
    its bad stretches, and one in which the verifier stops thinking has no good ones.
    """

    def __init__(self, params: Generate, verifier: VerifierIdentity) -> None:
        self._params, self._verifier = params, verifier
        self._window: deque[Trace] = deque(maxlen=params.gate.num_samples)
        self._num_judged = 0

    def add(self, trace: Trace) -> None:
        """Judge the next answer of a run. Raises GateFailed with the diagnosis."""
        if trace["status"] in NOT_JUDGED:
            return
        self._window.append(trace)
        self._num_judged += 1
        fraction = self._params.gate.min_reasoning_fraction
        if self._num_judged == self._window.maxlen:
            self._require(self._window, fraction)
        elif self._num_judged > self._params.gate.num_samples:
            self._require(self._window, fraction / 2)

    def check(self, traces: Iterable[Trace]) -> None:
        """Judge answers in no order. Raises GateFailed with the diagnosis."""
        judged = [trace for trace in traces if trace["status"] not in NOT_JUDGED]
        self._require(judged, self._params.gate.min_reasoning_fraction)

    def is_bad(self, trace: Trace) -> bool:
        """Whether an answer lacks reasoning for a reason that asking again may mend. Cut ones are
        asked again when max_tokens grows."""
        return trace["status"] not in NOT_JUDGED | CUT and not self._is_good(trace)

    def _is_good(self, trace: Trace) -> bool:
        if trace["status"] not in (Status.OK, Status.TRUNCATED_IN_ANSWER):
            return False
        shortest = self._params.gate.min_reasoning_tokens
        return not self._params.thinking or num_reasoning_tokens(trace, self._verifier) >= shortest

    def _require(self, traces: Collection[Trace], fraction: float) -> None:
        bad = [trace for trace in traces if not self._is_good(trace)]
        if traces and 1 - len(bad) / len(traces) < fraction:
            raise GateFailed(diagnosis(bad, len(traces), self._params))


def diagnosis(bad: list[Trace], num_judged: int, params: Generate) -> str:
    """What is wrong with the run, and the line of params.yaml to change, from its bad answers."""
    status, _ = Counter(Status(trace["status"]) for trace in bad).most_common(1)[0]
    cause = {
        Status.EMPTY_REASONING: (
            "the verifier did not think. Check generate.thinking_switch "
            f"({params.thinking_switch}): a name that the chat template does not know is ignored"
        ),
        Status.TRUNCATED_IN_REASONING: (
            f"generate.max_tokens {params.max_tokens} cuts the reasoning; raise it"
        ),
        Status.UNCLOSED_REASONING: "the reasoning never closes. Check think.end and think.end_id",
        Status.EMPTY_ANSWER: "there is no answer after the reasoning",
        Status.LOOPING: "the verifier repeats itself. Check verifier.dtype and the sampling",
        Status.GARBAGE: "the verifier writes one token over and over. Check verifier.dtype and "
        "verifier.quantization",
        Status.PARSER_CONFLICT: (
            "token ids and finish_reason contradict each other. Check think.*"
            if params.thinking
            else "the verifier thinks although generate.thinking is false. Check "
            f"generate.thinking_switch ({params.thinking_switch})"
        ),
        Status.OK: (
            "the reasoning has fewer tokens than generate.gate.min_reasoning_tokens "
            f"{params.gate.min_reasoning_tokens}"
        ),
    }.get(status, f"most answers end as {status}")
    shown = "\n".join(
        f'  {{"reasoning": {t.get("reasoning")!r:.80}, "content": {t.get("content")!r:.80}, '
        f'"status": "{t["status"]}"}}'
        for t in bad[:2]
    )
    failed = f"{len(bad)} of {num_judged} answers fail the reasoning gate"
    return f"{failed}: {cause}. Two of them:\n{shown}"
