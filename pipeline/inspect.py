"""Any answer in the terminal, token for token: to see with one's own eyes that the data is right.

Reads    data/traces/part-*.jsonl and, while `generate` runs, data/traces/journal.jsonl;
         data/verifier.json, the verifier's tokenizer, params.yaml; and where they are there,
         data/prompts/prompts.jsonl and data/sequences/disagreements.jsonl
Writes   nothing, and takes no lock
Run      python -m pipeline.inspect                      one row at random
         python -m pipeline.inspect c59a2e --ids         by the beginning of its id or key
         python -m pipeline.inspect --rejected -n 3      or `--reason usage`, for one reason
         python -m pipeline.inspect --differs            its text does not give its ids back

Each row is put through pipeline.assembly, so what is shown (pipeline.display says how) is the
sequence that `reassemble` makes of it under the present params, or why it makes none.
"""

import argparse
import os
import random
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson
from rich.console import Console

from pipeline.assembly import Assembler, load_assembler
from pipeline.display import MEANINGS, Fate, display
from pipeline.errors import DataError, PipelineError, UserError
from pipeline.params import load_params
from pipeline.progress import Bar, progress_bar
from pipeline.reasoning import has_ids
from pipeline.rebuild import Tokens
from pipeline.records import (
    DISAGREEMENTS_PATH,
    NO_ANSWER,
    PROMPTS_PATH,
    TRACES,
    Rejected,
    Trace,
    trace_problem,
)
from pipeline.resume import read_jsonl
from pipeline.traces import JOURNAL
from pipeline.verifier import load_verifier

REASONS = [reason.value for reason in MEANINGS]
BYTES_WORTH_A_BAR = 32 << 20  # about two seconds


def main(argv: list[str] | None = None) -> None:
    try:
        show(arguments(argv))
    except (PipelineError, OSError) as error:
        sys.exit(f"inspect: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """
    Raises:
        UserError: what is asked for makes no sense.
    """
    parser = argparse.ArgumentParser(
        prog="python -m pipeline.inspect",
        description="Shows answers as sequences, token for token; without an ID one at random.",
        epilog="Struck out, or without colours in ⟦…⟧: generated, but not learnt.",
    )
    parser.add_argument("rows", nargs="*", metavar="ID", help="beginning of a sample id or key")
    parser.add_argument("-n", type=int, default=1, help="so many rows at random")
    parser.add_argument("--rejected", action="store_true", help="of those that do not train")
    parser.add_argument(
        "--reason", metavar="R", help=f"of those rejected for: {', '.join(REASONS)}"
    )
    parser.add_argument(
        "--differs", action="store_true", help="of those whose text does not give their ids back"
    )
    parser.add_argument("--ids", action="store_true", help="each token with its id")
    args = parser.parse_args(argv)
    if args.n < 1:
        raise UserError(f"-n {args.n}: at least one row")
    if args.reason is not None and args.reason not in REASONS:
        raise UserError(f"--reason {args.reason!r} is none of {', '.join(REASONS)}")
    if args.rows and (args.rejected or args.reason or args.differs):
        raise UserError("an ID names its row; --rejected, --reason and --differs choose among all")
    if args.rows and args.n != 1:
        raise UserError("an ID names its row; -n is for rows at random")
    return args


def show(args: argparse.Namespace) -> None:
    with ExitStack() as opened:
        lines = newest(open_files(opened))
        if not lines:
            raise DataError(f"{TRACES} holds no answers; `dvc repro generate` makes them")
        chosen = [find(wanted, lines) for wanted in args.rows]
        differences = differences_by_id(must_exist=args.differs)
        with Console(stderr=True).status("loading the tokenizer"):
            assembler = load_assembler(load_params(), load_verifier())
        chosen = chosen or at_random(lines, args.n, condition(args, differences, assembler))
        splits = splits_of(line.sample_id for line in chosen)
        for line in chosen:
            trace = line.read()
            split, difference = (
                splits.get(conversation(line.sample_id)),
                differences.get(line.sample_id),
            )
            fate, tokens = fate_of(trace, assembler), tokens_of(trace, assembler)
            display(trace, fate, split, tokens, difference, assembler.rebuilder, with_ids=args.ids)
        if not args.rows and len(chosen) < args.n:
            print(f"{len(chosen)} found among {len(lines)} rows")


def fate_of(trace: Trace, assembler: Assembler) -> Fate:
    """What `reassemble` makes of it."""
    prompt = {"index": -1, "source": trace["source"]}  # perhaps gone, and no token depends on it
    try:
        return assembler.row(prompt, trace)  # type: ignore[arg-type]
    except Rejected as rejection:
        return rejection.reason


def tokens_of(trace: Trace, assembler: Assembler) -> Tokens | None:
    """What it is judged by: the server's ids or, as params.yaml says, those of its text."""
    try:
        return assembler.tokens(trace)[0]
    except Rejected:
        return Tokens(trace["prompt_token_ids"], trace["token_ids"]) if has_ids(trace) else None


# Which rows there are


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
    """Oldest first. The journal is opened before the parts: a `generate` that ends meanwhile moves
    its rows into them, which an open file outlives."""
    journal, parts = open_if_there([JOURNAL], opened), sorted(TRACES.glob("part-*.jsonl"))
    return [*open_if_there(parts, opened), *journal]


def open_if_there(paths: Iterable[Path], opened: ExitStack) -> list[BinaryIO]:
    files: list[BinaryIO] = []
    for path in paths:
        with suppress(FileNotFoundError):
            files.append(opened.enter_context(path.open("rb")))
    return files


def newest(files: list[BinaryIO]) -> list[Line]:
    """The newest answer to each question; as in `generate`, a failure never takes its place."""
    by_key: dict[str, Line] = {}
    with progress("reading answers", sum(os.fstat(f.fileno()).st_size for f in files)) as bar:
        for line in (line for file in files for line in lines_of(file)):
            bar.advance(line.length)
            earlier = by_key.get(line.key)
            if line.has_answer or not (earlier and earlier.has_answer):
                by_key.pop(line.key, None)  # what is newer stands further back
                by_key[line.key] = line
    # Under other params the same question has another key.
    return list({line.sample_id: line for line in by_key.values()}.values())


def lines_of(file: BinaryIO) -> Iterator[Line]:
    offset = 0
    for line in file:
        try:
            trace = orjson.loads(line)
        except orjson.JSONDecodeError:
            if not line.endswith(b"\n"):
                return  # it is being written
            trace = None
        if problem := trace_problem(trace):
            raise DataError(f"{file.name} holds a line that is no trace: {problem}")
        has_answer = trace["status"] not in NO_ANSWER
        yield Line(trace["sample_id"], trace["key"], has_answer, file, offset, len(line))
        offset += len(line)


# Which are shown


def find(wanted: str, lines: list[Line]) -> Line:
    """
    Raises:
        UserError: no id or key begins so, or several do.
    """
    found = (
        [line for line in lines if line.sample_id == wanted]
        or [line for line in lines if line.sample_id.startswith(wanted)]
        or [line for line in lines if line.key.startswith(wanted)]
    )
    if not found:
        raise UserError(f"none of {len(lines)} rows has an id or key that begins with {wanted!r}")
    if len(found) > 1:
        some = ", ".join(repr(line.sample_id) for line in found[:3])
        raise UserError(f"{len(found)} rows begin with {wanted!r}: {some} …")
    return found[0]


def condition(
    args: argparse.Namespace, differences: dict[str, Any], assembler: Assembler
) -> Callable[[Line], bool]:
    """Whether a row is one of those that were asked for."""

    def holds(line: Line) -> bool:
        if args.differs and line.sample_id not in differences:
            return False
        if not args.rejected and not args.reason:
            return True
        fate = fate_of(line.read(), assembler)
        return isinstance(fate, StrEnum) and args.reason in (None, fate.value)

    return holds


def at_random(lines: list[Line], n: int, holds: Callable[[Line], bool]) -> list[Line]:
    """`n` rows for which it holds, or as many as there are."""
    chosen: list[Line] = []
    with progress("looking for rows", sum(line.length for line in lines)) as bar:
        for line in random.sample(lines, len(lines)):
            chosen += [line] if holds(line) else []
            if len(chosen) == n:
                break
            bar.advance(line.length, f"{len(chosen)} found")
    return chosen


@contextmanager
def progress(label: str, num_bytes: int) -> Iterator[Bar]:
    """On stderr, for stdout is the rows'; nothing at all for a moment's work."""
    with redirect_stdout(sys.stderr), ExitStack() as shown:
        bar = Bar(label, num_bytes, "bytes")
        if num_bytes > BYTES_WORTH_A_BAR:
            bar = shown.enter_context(progress_bar(label, num_bytes, "bytes"))
        yield bar


# What else is known of them


def differences_by_id(*, must_exist: bool) -> dict[str, dict[str, Any]]:
    """What the last `reassemble` found: see `pipeline.agreement.compare`."""
    if not must_exist and not DISAGREEMENTS_PATH.exists():
        return {}
    return {row["sample_id"]: row for row in read_jsonl(DISAGREEMENTS_PATH)}


def splits_of(sample_ids: Iterable[str]) -> dict[str, str]:
    """By conversation, of those that `prompts` still has."""
    wanted = set(map(conversation, sample_ids))
    if not PROMPTS_PATH.exists():
        return {}
    splits = ((conversation(row["sample_id"]), row["split"]) for row in read_jsonl(PROMPTS_PATH))
    return {name: split for name, split in splits if name in wanted}


def conversation(sample_id: str) -> str:
    return sample_id.rpartition("_gen")[0]


if __name__ == "__main__":
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that knows ASCII alone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
