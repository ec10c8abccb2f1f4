"""One answer as a training sequence: the exact ids, what is learnt of them, or why there is none.

    assembler = Assembler(params, verifier, tokenizer)
    row = assembler.row(prompt, trace)        a row of data/sequences; raises Rejected

A sequence is the server's own prompt ids followed by its own generated ids; without ids it is
rebuilt from text (pipeline.rebuild), if `reassemble.source` says so. What breaks an invariant is
rejected with its reason; nothing is repaired. `reassemble.reasoning`, `max_tokens` and `train_on`
then take away what the params do not want.
"""

from typing import Any, NamedTuple

import numpy as np

from pipeline.params import Params
from pipeline.reasoning import Spans, has_ids, spans_of
from pipeline.rebuild import Rebuilder, Tokens
from pipeline.records import (
    SEQUENCE_COLUMNS,
    TRAINABLE,
    TRUNCATED,
    Ablation,
    Prompt,
    Rejected,
    SequenceRejection,
    Status,
    Trace,
)
from pipeline.verifier import VerifierIdentity, load_tokenizer, small_files

ABLATIONS = {
    "keep": Ablation.NONE,
    "drop": Ablation.REASONING_DROPPED,
    "empty": Ablation.REASONING_EMPTY,
}


class Phased(NamedTuple):
    """A sequence and its phases, half-open ranges of `ids`: prompt [0, generated_start), reasoning,
    answer, end [answer end, …). Think tokens lie between them."""

    ids: list[int]
    generated_start: int
    reasoning: tuple[int, int]
    answer: tuple[int, int]


def load_assembler(params: Params, verifier: VerifierIdentity) -> "Assembler":
    """With the verifier's own tokenizer. Raises VerifierError when there is none."""
    folder = small_files(verifier.model, verifier.revision)
    tokenizer = load_tokenizer(folder, trust_remote_code=params.verifier.trust_remote_code)
    return Assembler(params, verifier, tokenizer)


class Assembler:
    """Turns traces into rows of data/sequences, all by the same params."""

    def __init__(self, params: Params, verifier: VerifierIdentity, tokenizer: Any) -> None:
        self.verifier = verifier
        self.rebuilder = Rebuilder(tokenizer, verifier, params)
        self._params, self._thinking = params.reassemble, params.generate.thinking

    def row(self, prompt: Prompt, trace: Trace) -> dict[str, Any]:
        """
        Raises:
            Rejected: the status is not for training, the ids break an invariant, or the params
                leave nothing of them.
        """
        params, verifier = self._params, self.verifier
        status = Status(trace["status"])
        if status not in TRAINABLE:
            raise Rejected(status)
        tokens, is_rebuilt = self.tokens(trace)
        if status in TRUNCATED and params.truncated == "drop":
            raise Rejected(SequenceRejection.TRUNCATED)
        spans = spans_of(*tokens, verifier)
        check_turn(tokens, trace, spans, verifier, thinking=self._thinking)
        check_usage(tokens, trace, is_rebuilt=is_rebuilt)
        has_control_text = self._check_prompt(tokens.prompt_ids, trace)
        phased, cut_in = self._wanted(phases(tokens, spans))
        mask = loss_mask(phased, params.train_on)
        if not mask.any():
            is_cut = cut_in != "none"
            raise Rejected(
                SequenceRejection.TOO_LONG if is_cut else SequenceRejection.NOTHING_TO_LEARN
            )
        row = {
            "input_ids": np.array(phased.ids, dtype=np.int64),
            "loss_mask": mask,
            "seq_len": len(phased.ids),
            "sample_id": trace["sample_id"],
            "key": trace["key"],
            "prompt_index": prompt["index"],
            "source": prompt["source"],
            "status": status.value,
            "generated_start": phased.generated_start,
            "reasoning_start": phased.reasoning[0],
            "reasoning_end": phased.reasoning[1],
            "answer_start": phased.answer[0],
            "answer_end": phased.answer[1],
            "rebuilt": is_rebuilt,
            "control_text": has_control_text,
            "cut_in": cut_in,
            "ablation": ABLATIONS[params.reasoning].value,
        }
        assert tuple(row) == SEQUENCE_COLUMNS
        return row

    def tokens(self, trace: Trace) -> tuple[Tokens, bool]:
        """The ids that params.yaml asks for, and whether they are rebuilt from text.

        Raises:
            Rejected: there are none, the text cannot be rebuilt, or the verifier has no such ids.
        """
        source = self._params.source
        if source == "text" or (source == "ids_else_text" and not has_ids(trace)):
            return self.rebuilder.rebuild(trace), True
        if not has_ids(trace):
            raise Rejected(SequenceRejection.NO_TOKEN_IDS)
        tokens = Tokens(trace["prompt_token_ids"], trace["token_ids"])
        for ids in tokens:
            if not 0 <= min(ids) <= max(ids) < self.verifier.vocab_size:
                raise Rejected(SequenceRejection.UNKNOWN_ID)
        return tokens, False

    def _wanted(self, phased: Phased) -> tuple[Phased, str]:
        """Without the reasoning, if the params say so, and not too long; the phase of a cut."""
        params = self._params
        if params.reasoning != "keep":
            keep_pair = params.reasoning == "empty"
            phased = without_reasoning(phased, self.verifier, keep_pair=keep_pair)
        if len(phased.ids) <= params.max_tokens:
            return phased, "none"
        if params.on_too_long == "drop":
            raise Rejected(SequenceRejection.TOO_LONG)
        return cut(phased, params.max_tokens)

    def _check_prompt(self, prompt_ids: list[int], trace: Trace) -> bool:
        """Whether a user wrote control tokens into the question, which the server took for real.

        Between the texts of the messages the prompt holds the think, end and control tokens of the
        chat template; any more of them come from a text.

        Raises:
            Rejected: such a question when they are not wanted; another number of BOS than the
                template's; or it is not the template's prompt at all.
        """
        verifier = self.verifier
        found = [token for token in prompt_ids if token in verifier.markers]
        expected = self.rebuilder.template_markers(trace["messages"])
        if found == expected.all:
            return False
        bos = -1 if verifier.bos_id is None else verifier.bos_id
        if bos not in verifier.end_ids and found.count(bos) != expected.all.count(bos):
            raise Rejected(SequenceRejection.BOS)
        rest = iter(found)
        is_the_templates = all(token in rest for token in expected.all)
        if not is_the_templates or found[len(found) - len(expected.behind) :] != expected.behind:
            raise Rejected(SequenceRejection.OTHER_TEMPLATE)
        if self._params.on_control_text == "reject":
            raise Rejected(SequenceRejection.CONTROL_TEXT)
        return True


def check_turn(
    tokens: Tokens, trace: Trace, spans: Spans, verifier: VerifierIdentity, *, thinking: bool
) -> None:
    """The invariants of a generated turn, on ids alone.

    Raises:
        Rejected: with the invariant that does not hold.
    """
    status, token_ids = Status(trace["status"]), tokens.token_ids
    # spans count the starts up to the first think-end; a second one may stand behind it.
    behind = token_ids[spans.answer[0] - len(tokens.prompt_ids) :] if spans.answer else []
    num_starts = spans.num_starts + behind.count(verifier.think_start_id)
    if thinking and num_starts != 1:
        raise Rejected(SequenceRejection.THINK_START)
    if thinking and (spans.answer is None) != (status is Status.TRUNCATED_IN_REASONING):
        raise Rejected(SequenceRejection.THINK_END)
    if status is Status.OK and (spans.answer is None or spans.answer[0] == spans.answer[1]):
        raise Rejected(SequenceRejection.NO_ANSWER)
    if not token_ids:  # it would end with a generation prompt
        raise Rejected(SequenceRejection.NO_ANSWER)
    has_stopped = trace["finish_reason"] == "stop"
    if has_stopped != spans.ends_turn or has_stopped != (status is Status.OK):
        raise Rejected(SequenceRejection.END_OF_TURN)
    inside = token_ids[:-1] if spans.ends_turn else token_ids
    if not verifier.turn_breakers.isdisjoint(inside):
        raise Rejected(SequenceRejection.CONTROL_TOKEN)


def check_usage(tokens: Tokens, trace: Trace, *, is_rebuilt: bool) -> None:
    """As many tokens as the server billed. Text may come from somewhere that says nothing of it.

    Raises:
        Rejected: other counts.
    """
    counted = {
        "prompt_tokens": len(tokens.prompt_ids),
        "completion_tokens": len(tokens.token_ids),
    }
    for name, count in counted.items():
        if trace["usage"].get(name, count if is_rebuilt else None) != count:
            raise Rejected(SequenceRejection.USAGE)


def phases(tokens: Tokens, spans: Spans) -> Phased:
    ids = [*tokens.prompt_ids, *tokens.token_ids]
    # Without a think block (thinking off) the reasoning is the empty range before the answer.
    answer = spans.answer or (len(ids), len(ids))
    reasoning = spans.reasoning or (answer[0], answer[0])
    return Phased(ids, len(tokens.prompt_ids), reasoning, answer)


def without_reasoning(phased: Phased, verifier: VerifierIdentity, *, keep_pair: bool) -> Phased:
    """The sequence as if nothing had been thought: no think block, or one with nothing in it.

    Raises:
        Rejected: it was cut before the reasoning ended, so that nothing would be left.
    """
    ids, generated_start, (begin, end), (answer_start, answer_end) = phased
    if end == len(ids):
        raise Rejected(SequenceRejection.NO_ANSWER)
    if end == answer_start:  # there is no think block
        return phased
    think_start = begin - 1 - ids[begin - 1 :: -1].index(verifier.think_start_id)
    if keep_pair:
        first, behind = begin, end
    else:  # from the think-start on, also where the prompt holds it
        first, behind = think_start, answer_start
    gone = behind - first
    answer = (answer_start - gone, answer_end - gone)
    kept = [*ids[:first], *ids[behind:]]
    return Phased(kept, min(generated_start, first), (first, first), answer)


def cut(phased: Phased, max_tokens: int) -> tuple[Phased, str]:
    """The first `max_tokens`, and the phase in which they end. The think-end counts as reasoning,
    the end of the turn as answer."""
    ids, generated_start, reasoning, answer = phased
    kept = Phased(
        ids[:max_tokens],
        min(generated_start, max_tokens),
        _first(reasoning, max_tokens),
        _first(answer, max_tokens),
    )
    if max_tokens < generated_start:
        return kept, "prompt"
    return kept, "reasoning" if max_tokens < answer[0] else "answer"


def _first(span: tuple[int, int], max_tokens: int) -> tuple[int, int]:
    return min(span[0], max_tokens), min(span[1], max_tokens)


def loss_mask(phased: Phased, train_on: str) -> np.ndarray:  # [len(ids)] int8
    """1 where the draft learns to predict the token. The think-end and the end of the turn are
    always learnt; a think-start that the verifier wrote belongs to the reasoning."""
    ids, generated_start, reasoning, answer = phased
    mask = np.zeros(len(ids), dtype=np.int8)
    if train_on in ("all_generated", "reasoning"):
        mask[generated_start : reasoning[1]] = 1
    if train_on in ("all_generated", "answer"):
        mask[slice(*answer)] = 1
    mask[reasoning[1] : answer[0]] = 1  # the think-end
    mask[answer[1] :] = 1
    return mask
