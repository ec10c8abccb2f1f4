"""One answer as it is: a few facts, then the whole sequence as the text of its token ids.

    display(trace, fate, split, difference, rebuilder, with_ids=False)

The text is decoded from the ids, special tokens included, and never rendered from the messages. In
a terminal the prompt is dim, reasoning and answer have a colour each, think and other control
tokens are bright, and what was generated but is not learnt is struck out. Elsewhere the same stands
under [labels] and in ⟦brackets⟧. Strangers wrote the text: what a terminal would obey, it spells.
"""

import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from pipeline.assembly import Phased, phases
from pipeline.reasoning import spans_of
from pipeline.rebuild import REPLACEMENT_CHARACTER, Rebuilder, Tokens, decoded
from pipeline.records import Ablation, SequenceRejection, Status, Trace, in_words
from pipeline.verifier import VerifierIdentity

Fate = dict[str, Any] | StrEnum  # a row of data/sequences, or the reason why there is none
Decode = Callable[[list[int]], str]

MEANINGS: dict[StrEnum, str] = {
    SequenceRejection.TRUNCATED: "cut by max_tokens, and reassemble.truncated is drop",
    SequenceRejection.THINK_START: "it does not hold exactly one think-start",
    SequenceRejection.THINK_END: "no think-end, or one in a reasoning that was cut",
    SequenceRejection.NO_ANSWER: "no answer follows the reasoning",
    SequenceRejection.END_OF_TURN: "it stopped without an end of turn, or was cut after one",
    SequenceRejection.CONTROL_TOKEN: "a control token stands inside the generated turn",
    SequenceRejection.USAGE: "the server billed another number of tokens",
    SequenceRejection.UNKNOWN_ID: "it holds a token id that the verifier does not have",
    SequenceRejection.NO_TOKEN_IDS: "the server gave no token ids, and reassemble.source is ids",
    SequenceRejection.TEXT_NOT_EXACT: "its text spells a control token, or does not come back",
    SequenceRejection.BOS: "the prompt has not as many begin tokens as the chat template writes",
    SequenceRejection.CONTROL_TEXT: "a user wrote a control token into the question",
    SequenceRejection.OTHER_TEMPLATE: "the prompt is none that the chat template makes",
    SequenceRejection.TOO_LONG: "over reassemble.max_tokens, or nothing to learn before the cut",
    SequenceRejection.NOTHING_TO_LEARN: "reassemble.train_on and reasoning leave no token of it",
    Status.EMPTY_REASONING: "no think block, or white space in it",
    Status.EMPTY_ANSWER: "nothing but white space follows the reasoning",
    Status.UNCLOSED_REASONING: "it stopped by itself before the think-end",
    Status.PARSER_CONFLICT: "its ids, text and finish_reason contradict each other",
    Status.LOOPING: "cut while it repeated itself",
    Status.GARBAGE: "cut while it repeated one token",
    Status.ABORTED: "its finish_reason is neither stop nor length",
    Status.TOOL_CALL: "it calls a tool, though none was offered",
    Status.THINKING_OFF_BY_USER: "the question itself switches thinking off",
    Status.REJECTED_BY_SERVER: "the server refused the question, mostly as too long",
    Status.TIMED_OUT: "no answer within generate.timeout_s; the next `generate` asks again",
    Status.FAILED: "no answer came; the next `generate` asks again",
}
PHASES = ("prompt", "reasoning", "answer", "end")
COLOURS = {"prompt": "dim", "reasoning": "cyan", "answer": "green", "end": "green"}
STYLES = {phase: Style.parse(colour) for phase, colour in COLOURS.items()}
CONTROL, NOT_LEARNT = Style.parse("bold bright_yellow"), Style(strike=True)
HEAD, ID = Style(bold=True), Style(dim=True)
MAX_TOKENS_A_CHARACTER = 4  # one a byte
# Control and format characters, lone surrogates, line and paragraph separators …
OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# … but for these; the last two join letters and emojis.
HARMLESS = frozenset("\n\t\u200c\u200d")


def display(
    trace: Trace,
    fate: Fate,
    split: str | None,  # None: not known
    tokens: Tokens | None,  # what it was judged by; None: text alone
    difference: dict[str, Any] | None,  # how text and ids differ, as `reassemble` lists it
    rebuilder: Rebuilder,
    *,
    with_ids: bool,
) -> None:
    verifier, tokenizer = rebuilder.verifier, rebuilder.tokenizer

    def decode(ids: list[int]) -> str:
        return visible(decoded(tokenizer, ids))

    phased = phased_of(tokens, fate, verifier)
    head = [*facts(trace, split), *outcome(trace, fate, phased)]
    head += difference_in_words(difference, decode) if difference else []
    mask = None if isinstance(fate, StrEnum) else fate["loss_mask"]
    pieces = pieces_of(phased, mask, verifier.markers, decode, by_id=with_ids)
    console = Console()
    has_colours = console.color_system is not None and not console.no_color
    body = (coloured if has_colours else plain)(pieces if phased.ids else pieces_of_text(trace))
    title = Segment("\n".join(map(in_one_line, head)) + "\n", HEAD if has_colours else None)
    console.print(Segments([title, *body, Segment("\n")]), soft_wrap=True, end="")


# What is said of a row


def facts(trace: Trace, split: str | None) -> Iterator[str]:
    known = [trace["sample_id"], *([split] if split else []), f"source {trace['source']}"]
    asked = trace["sampling"].get("max_tokens")
    ended = [f"finish_reason {trace['finish_reason']}", f"asked for at most {asked} tokens"]
    yield " · ".join([*known, trace["status"], *ended])
    if trace.get("error"):
        yield f"error: {trace['error']}"


def outcome(trace: Trace, fate: Fate, phased: Phased) -> Iterator[str]:
    """How long it is by phase, and what becomes of it."""
    ids, generated_start, reasoning, answer = phased
    lengths = {
        "prompt": generated_start,
        "reasoning": reasoning[1] - reasoning[0],
        "answer": answer[1] - answer[0],
    }
    tokens = f"{len(ids)} tokens: {in_words(lengths)}" if ids else "no token ids, text alone"
    if isinstance(fate, StrEnum):
        billed = [f"billed as {in_words(trace['usage'])}"] if trace["usage"] else []
        yield " · ".join([tokens, *billed])
        yield f"rejected, {fate.value}: {MEANINGS[fate]}"
        return
    marks = {
        "rebuilt from text": fate["rebuilt"],
        "control text in the question": fate["control_text"],
        f"cut in {fate['cut_in']}": fate["cut_in"] != "none",
        f"ablation {fate['ablation']}": fate["ablation"] != Ablation.NONE,
    }
    marked = [mark for mark, holds in marks.items() if holds]
    yield " · ".join([tokens, f"{fate['loss_mask'].sum()} learnt", *marked])


def difference_in_words(difference: dict[str, Any], decode: Decode) -> Iterator[str]:
    what = f"its text does not give its ids back, {difference['kind']}"
    if "position" not in difference:  # it could not be rebuilt
        yield f"{what}: {difference['reason']}"
        return
    yield f"{what}: from token {difference['position']} on"
    for name in ("generated", "rebuilt"):
        tokens = whole_characters(difference[name], decode)
        yield f"{name:9} " + "".join(spelt(Piece("", decode(ids), ids)) for ids in tokens)


# The sequence


def phased_of(tokens: Tokens | None, fate: Fate, verifier: VerifierIdentity) -> Phased:
    """The sequence; of a rejected row, the ids that it was judged by."""
    if isinstance(fate, StrEnum):
        tokens = tokens or Tokens([], [])
        return phases(tokens, spans_of(*tokens, verifier))
    reasoning = (fate["reasoning_start"], fate["reasoning_end"])
    answer = (fate["answer_start"], fate["answer_end"])
    return Phased(fate["input_ids"].tolist(), fate["generated_start"], reasoning, answer)


class Piece(NamedTuple):
    """Neighbouring tokens that look alike, or a text without tokens."""

    phase: str
    text: str
    ids: Sequence[int] = ()  # those to be shown
    is_control: bool = False
    is_learnt: bool = True  # or need not be


def pieces_of(
    phased: Phased, mask: np.ndarray | None, markers: frozenset[int], decode: Decode, *, by_id: bool
) -> Iterator[Piece]:
    """All of the sequence, in order. Without `mask` (a rejected row) nothing is marked as not
    learnt. What looks alike is decoded as a whole: a character may be several tokens."""
    ids, generated_start, _, answer = phased

    def look(index: int) -> tuple[str, bool, bool]:
        phase = PHASES[bisect_right((generated_start, *answer), index)]  # think tokens: reasoning
        is_learnt = mask is None or index < generated_start or bool(mask[index])
        return phase, ids[index] in markers, is_learnt

    for (phase, *marks), indices in groupby(range(len(ids)), key=look):
        alike = [ids[index] for index in indices]
        if by_id:
            for some in whole_characters(alike, decode):
                yield Piece(phase, decode(some), some, *marks)
        else:
            yield Piece(phase, decode(alike), (), *marks)


def pieces_of_text(trace: Trace) -> Iterator[Piece]:
    """For a row without token ids."""
    for message in trace["messages"]:
        yield Piece("prompt", visible(f"{message['role']}: {message['content']}\n"))
    for phase, text in (("reasoning", trace.get("reasoning")), ("answer", trace.get("content"))):
        if text:
            yield Piece(phase, visible(text))


def whole_characters(ids: list[int], decode: Decode) -> Iterator[list[int]]:
    """Token by token, but together those that make one character."""
    some: list[int] = []
    for token in ids:
        some.append(token)
        is_whole = not decode(some).endswith(REPLACEMENT_CHARACTER)
        if is_whole or len(some) == MAX_TOKENS_A_CHARACTER:
            yield some
            some = []
    if some:
        yield some


# How it looks


def coloured(pieces: Iterable[Piece]) -> Iterator[Segment]:
    for piece in pieces:
        style = CONTROL if piece.is_control else STYLES[piece.phase]
        yield Segment(ids_in_brackets(piece), ID)
        yield Segment(piece.text, style if piece.is_learnt else style + NOT_LEARNT)
    yield Segment("\n")


def plain(pieces: Iterable[Piece]) -> Iterator[Segment]:
    """Exactly the text lies between a label's line end and the one before the next label."""
    for phase, of_phase in groupby(pieces, key=lambda piece: piece.phase):
        yield Segment(f"[{phase}]\n")
        for is_learnt, alike in groupby(of_phase, key=lambda piece: piece.is_learnt):
            text = "".join(map(spelt, alike))
            yield Segment(text if is_learnt else f"⟦{text}⟧")
        yield Segment("\n")


def spelt(piece: Piece) -> str:
    """Ids stand before their text, for much text is a line end."""
    return ids_in_brackets(piece) + piece.text


def ids_in_brackets(piece: Piece) -> str:
    return f"⟨{' '.join(map(str, piece.ids))}⟩" if piece.ids else ""


def visible(text: str) -> str:
    """What a terminal would obey is spelt: <U+001B>."""
    return "".join(
        f"<U+{ord(c):04X}>" if unicodedata.category(c) in OBEYED and c not in HARMLESS else c
        for c in text
    )


def in_one_line(text: str) -> str:
    return visible(text).replace("\n", "↵").replace("\t", " ")
