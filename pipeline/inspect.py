"""Any answer in the terminal, token for token: to see with one's own eyes that the data is right.

Reads    data/traces/part-*.jsonl and, while `generate` runs, data/traces/journal.jsonl;
         data/verifier.json, the verifier's tokenizer, params.yaml; and if they are there,
         data/prompts/prompts.jsonl and data/sequences/disagreements.jsonl
Writes   nothing, and takes no lock
Run      python -m pipeline.inspect                        one row at random
         python -m pipeline.inspect c59a2e                 by the beginning of its id or key
         python -m pipeline.inspect --rejected -n 3        `--reason usage`: for this reason
         python -m pipeline.inspect --differs --ids        its text does not give its ids back

Each row is put through pipeline.assembly, so what is shown is the sequence that `reassemble` makes
of it under the present params, or the reason why it makes none. The text is that of the token ids,
never a rendering of the messages. It comes from strangers: nothing in it reaches the terminal that
a terminal would obey.
"""

import argparse
import os
import random
import signal
import sys
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from enum import StrEnum
from itertools import groupby
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import orjson
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from pipeline.assembly import TRAINABLE, Assembler, Phased, phases
from pipeline.errors import DataError, PipelineError, UserError
from pipeline.params import load_params
from pipeline.progress import Bar, progress_bar
from pipeline.reasoning import spans_of
from pipeline.rebuild import REPLACEMENT_CHARACTER, Tokens
from pipeline.records import (
    NO_ANSWER,
    PROMPTS_PATH,
    SEQUENCES,
    TRACES,
    Ablation,
    Rejected,
    SequenceRejection,
    Status,
    Trace,
    in_words,
)
from pipeline.resume import read_jsonl
from pipeline.traces import JOURNAL
from pipeline.verifier import load_tokenizer, load_verifier, small_files

DISAGREEMENTS_PATH = SEQUENCES / "disagreements.jsonl"
MEANING: dict[StrEnum, str] = {
    SequenceRejection.TRUNCATED: "cut by max_tokens, and reassemble.truncated is drop",
    SequenceRejection.THINK_START: "it does not hold exactly one think-start",
    SequenceRejection.THINK_END: "no think-end, or one in a reasoning that was cut",
    SequenceRejection.NO_ANSWER: "no answer follows the reasoning",
    SequenceRejection.END_OF_TURN: "it stopped without an end-of-turn, or was cut after one",
    SequenceRejection.CONTROL_TOKEN: "a control token stands inside the generated turn",
    SequenceRejection.USAGE: "the server billed another number of tokens",
    SequenceRejection.NO_TOKEN_IDS: "the server gave no token ids, and reassemble.source is ids",
    SequenceRejection.TEXT_NOT_EXACT: "its text spells a control token, or is no UTF-8",
    SequenceRejection.BOS: "the prompt has another number of begin tokens than the template",
    SequenceRejection.CONTROL_TEXT: "a user wrote a control token into the question",
    SequenceRejection.OTHER_TEMPLATE: "the prompt lacks control tokens of the chat template",
    SequenceRejection.TOO_LONG: "over reassemble.max_tokens, or nothing to learn before the cut",
    SequenceRejection.NOTHING_TO_LEARN: "reassemble.train_on leaves no token of it",
    Status.EMPTY_REASONING: "no think block, or white space in it",
    Status.EMPTY_ANSWER: "white space alone follows the reasoning",
    Status.UNCLOSED_REASONING: "it stopped by itself before the think-end",
    Status.PARSER_CONFLICT: "its ids, text and finish_reason contradict each other",
    Status.LOOPING: "cut while it repeated itself",
    Status.GARBAGE: "cut while it repeated one token",
    Status.ABORTED: "its finish_reason is neither stop nor length",
    Status.TOOL_CALL: "it calls a tool, though none was offered",
    Status.THINKING_OFF_BY_USER: "the question itself switches thinking off",
    Status.REJECTED_BY_SERVER: "the server refused the question, mostly as too long",
    Status.TIMED_OUT: "no answer within generate.timeout_s; `generate` asks again",
    Status.FAILED: "no answer came; `generate` asks again",
}
REASONS = [reason.value for reason in MEANING]
PHASES = ("prompt", "reasoning", "answer", "end")
COLOURS = {"prompt": "dim", "reasoning": "cyan", "answer": "green", "end": "green"}
CONTROL, MASKED, ID = Style.parse("bold bright_yellow"), Style(strike=True), Style(dim=True)
# A character is at most four bytes, and a token at least one.
MAX_TOKENS_A_CHARACTER = 4
# Control and format characters, lone surrogates, line and paragraph separators …
OBEYED = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# … but for these: the last two join letters and emojis.
HARMLESS = frozenset("\n\t\u200c\u200d")


def main(argv: list[str] | None = None) -> None:
    try:
        show(arguments(argv), Console())
    except (PipelineError, OSError) as error:
        sys.exit(f"inspect: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """
    Raises:
        UserError: what is asked for makes no sense.
    """
    parser = argparse.ArgumentParser(prog="python -m pipeline.inspect")
    parser.add_argument("rows", nargs="*", metavar="ID", help="a sample id, or its key's beginning")
    parser.add_argument("-n", type=int, default=1, help="so many rows at random")
    parser.add_argument("--rejected", action="store_true", help="of those that do not train")
    parser.add_argument("--reason", metavar="R", help="of those rejected for this reason")
    parser.add_argument("--differs", action="store_true", help="whose text gives other ids")
    parser.add_argument("--ids", action="store_true", help="each token with its id")
    args = parser.parse_args(argv)
    if args.n < 1:
        raise UserError(f"-n {args.n}: at least one row")
    if args.reason is not None and args.reason not in REASONS:
        raise UserError(f"--reason {args.reason!r} is none of {', '.join(REASONS)}")
    if args.rows and (args.rejected or args.reason or args.differs):
        raise UserError("ids name the rows; --rejected, --reason and --differs choose among all")
    return args


def show(args: argparse.Namespace, console: Console) -> None:
    with ExitStack() as opened:
        lines = newest(open_files(opened))
        if not lines:
            raise DataError(f"{TRACES} holds no answers; `dvc repro generate` makes them")
        needs_differences = args.differs or DISAGREEMENTS_PATH.exists()
        differences = (
            {row["sample_id"]: row for row in read_jsonl(DISAGREEMENTS_PATH)}
            if needs_differences
            else {}
        )
        assembler = load_assembler()

        def is_wanted(line: Line) -> bool:
            if args.differs and line.sample_id not in differences:
                return False
            if not (args.rejected or args.reason):
                return True
            fate = fate_of(line.read(), assembler)
            return not isinstance(fate, dict) and args.reason in (None, fate.value)

        chosen = (
            [find(wanted, lines) for wanted in args.rows]
            if args.rows
            else at_random(lines, args.n, is_wanted)
        )
        if not chosen:
            console.print(f"none of {len(lines)} rows", soft_wrap=True, highlight=False)
        splits = splits_of(line.sample_id for line in chosen)
        printer = Printer(console, assembler, with_ids=args.ids)
        for line in chosen:
            split = splits.get(conversation(line.sample_id))
            printer.print(line.read(), split, differences.get(line.sample_id))


# Finding rows


class Line(NamedTuple):
    """Where a trace lies."""

    sample_id: str
    key: str
    has_answer: bool
    file: BinaryIO
    offset: int  # bytes
    length: int

    def read(self) -> Trace:
        self.file.seek(self.offset)
        trace: Trace = orjson.loads(self.file.read(self.length))
        return trace


def open_files(opened: ExitStack) -> list[BinaryIO]:
    """Oldest first. The journal is opened before the parts, as `generate` may end meanwhile and
    move its rows into them; an open file outlives that."""
    files: list[BinaryIO] = []
    with suppress(FileNotFoundError):
        files.append(opened.enter_context(JOURNAL.open("rb")))
    parts: list[BinaryIO] = []
    for path in sorted(TRACES.glob("part-*.jsonl")):
        with suppress(FileNotFoundError):
            parts.append(opened.enter_context(path.open("rb")))
    return [*parts, *files]


def newest(files: list[BinaryIO]) -> list[Line]:
    """The newest answer to each question; as in `generate`, a failure never takes its place."""
    by_key: dict[str, Line] = {}
    num_bytes = sum(os.fstat(file.fileno()).st_size for file in files)
    with progress_on_stderr("reading answers", num_bytes, "bytes") as bar:
        for file in files:
            for line in lines_of(file):
                bar.advance(line.length)
                earlier = by_key.get(line.key)
                if line.has_answer or not (earlier and earlier.has_answer):
                    by_key.pop(line.key, None)  # the new one goes to the end
                    by_key[line.key] = line
    # After a change of params the same question has another key.
    return list({line.sample_id: line for line in by_key.values()}.values())


def lines_of(file: BinaryIO) -> Iterator[Line]:
    offset = 0
    for line in file:
        try:
            trace = orjson.loads(line)
            sample_id, key, status = trace["sample_id"], trace["key"], trace["status"]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            if not line.endswith(b"\n"):
                return  # it is being written
            raise DataError(f"{file.name} holds a line that is no trace") from None
        yield Line(sample_id, key, status not in NO_ANSWER, file, offset, len(line))
        offset += len(line)


def find(wanted: str, lines: list[Line]) -> Line:
    """
    Raises:
        UserError: no row or more than one has an id or key that begins so.
    """
    found = [line for line in lines if line.sample_id == wanted]
    found = found or [line for line in lines if line.sample_id.startswith(wanted)]
    found = found or [line for line in lines if line.key.startswith(wanted)]
    if not found:
        raise UserError(f"none of {len(lines)} rows has an id or key that begins with {wanted!r}")
    if len(found) > 1:
        some = ", ".join(repr(line.sample_id) for line in found[:3])
        raise UserError(f"{len(found)} rows begin with {wanted!r}: {some} …")
    return found[0]


def at_random(lines: list[Line], n: int, is_wanted: Callable[[Line], bool]) -> list[Line]:
    chosen: list[Line] = []
    with progress_on_stderr("looking for rows", len(lines), "rows") as bar:
        for line in random.sample(lines, len(lines)):
            if is_wanted(line):
                chosen.append(line)
            bar.advance(1, f"{len(chosen)} found")
            if len(chosen) == n:
                break
    return chosen


def splits_of(sample_ids: Iterable[str]) -> dict[str, str]:
    """By conversation, as far as `prompts` still has them."""
    wanted = set(map(conversation, sample_ids))
    if not PROMPTS_PATH.exists():
        return {}
    prompts = ((conversation(row["sample_id"]), row["split"]) for row in read_jsonl(PROMPTS_PATH))
    return {name: split for name, split in prompts if name in wanted}


def conversation(sample_id: str) -> str:
    return sample_id.rpartition("_gen")[0]


@contextmanager
def progress_on_stderr(label: str, total: int, unit: str) -> Iterator[Bar]:
    """Rows alone go to stdout."""
    with redirect_stdout(sys.stderr), progress_bar(label, total, unit) as bar:
        yield bar
