"""Answers on disk: a journal while they come in, parts in the order of the prompts afterwards.

data/traces/journal.jsonl       one flushed line an answer while `generate` runs
data/traces/part-00000.jsonl    the answers to 1,000 prompts a part
data/.stash/traces.jsonl        answers that the present params do not want; they come back
data/.stash/failed_gate.jsonl   answers without reasoning of runs that the gate stopped

Answers stay on disk. In memory is where each lies and what was made of it, so that a run over a
hundred thousand long answers needs no more memory than one over a hundred.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import orjson

from pipeline.errors import DataError
from pipeline.progress import progress_bar
from pipeline.reasoning import Verdict
from pipeline.records import NO_ANSWER, TRACES, Trace
from pipeline.resume import TEMP_SUFFIX, atomic_path

JOURNAL = TRACES / "journal.jsonl"
STASH = Path("data/.stash/traces.jsonl")
FAILED_GATE = Path("data/.stash/failed_gate.jsonl")


class Place(NamedTuple):
    """Where a row lies: a line of a file."""

    path: Path
    offset: int  # bytes
    length: int  # bytes, line end included


class Stored(NamedTuple):
    """An answer that is on disk."""

    place: Place
    verdict: Verdict  # under the present params
    sample_id: str
    source: str
    finish_reason: str | None
    max_tokens: int  # as sent
    max_model_len: int  # the context it was asked at
    error: str
    is_as_written: bool  # the line holds this status

    @classmethod
    def of(cls, trace: Trace, verdict: Verdict, place: Place) -> "Stored":
        return cls(
            place,
            verdict,
            trace["sample_id"],
            trace["source"],
            trace["finish_reason"],
            trace["sampling"].get("max_tokens", 0),
            trace.get("max_model_len", 0),
            trace.get("error", ""),
            trace["status"] == verdict.status,
        )


class Row(NamedTuple):
    """A row as it is to lie in the parts."""

    part: int
    key: str
    sample_id: str
    source: str


Judge = Callable[[Trace], Verdict]
Line = tuple[Stored, Row | None]  # None: a row of the stash, which keeps its names


def load_stored(judge: Judge) -> dict[str, Stored]:
    """Every answer there is, by key: stashed ones, the parts, then the journal (newest last)."""
    _cut_torn_line()
    paths = [p for p in (STASH, *sorted(TRACES.glob("part-*.jsonl")), JOURNAL) if p.exists()]
    num_bytes = sum(path.stat().st_size for path in paths)
    stored: dict[str, Stored] = {}
    with progress_bar("reading stored answers", num_bytes, "bytes") as bar:
        for path in paths:
            for place, line in _lines(path):
                trace = _parsed(line, path)
                keep(trace["key"], Stored.of(trace, judge(trace), place), stored)
                bar.advance(place.length)
    return stored


def keep(key: str, new: Stored, stored: dict[str, Stored]) -> None:
    """The newest answer; a failure, refusal or abort never takes the place of an answer."""
    earlier = stored.get(key)
    if new.verdict.status in NO_ANSWER and earlier and earlier.verdict.status not in NO_ANSWER:
        return
    stored[key] = new


def append(journal: BinaryIO, trace: Trace) -> Place:
    """One whole line, flushed: what is lost in a kill is at most the line being written."""
    line = orjson.dumps(trace) + b"\n"
    offset = journal.tell()
    journal.write(line)
    journal.flush()
    return Place(JOURNAL, offset, len(line))


def read(place: Place) -> Trace:
    with place.path.open("rb") as file:
        return _parsed(_line(file, place), place.path)


def fold(rows: list[Row], stored: dict[str, Stored]) -> None:
    """Parts in the order of `rows`; what is not among them goes to the stash.

    Whenever this is interrupted, each answer lies in a file that is in place: a row that leaves its
    file is first copied to the journal, which goes last.
    """
    wanted = {row.key for row in rows}
    files: dict[Path, list[Line]] = {}
    for row in rows:
        part = TRACES / f"part-{row.part:05}.jsonl"
        files.setdefault(part, []).append((stored[row.key], row))
    aside: list[Line] = [(answer, None) for key, answer in stored.items() if key not in wanted]
    if aside:
        files[STASH] = aside
    changed = {path: lines for path, lines in files.items() if not _is_in_place(path, lines)}
    # What a killed run was writing goes too: data/traces is an output of DVC.
    torn = [*TRACES.glob(f"*{TEMP_SUFFIX}"), *STASH.parent.glob(f"*{TEMP_SUFFIX}")]
    stale = {*TRACES.glob("part-*.jsonl"), *torn, STASH} - files.keys()
    places = {answer.place.path for lines in changed.values() for answer, _ in lines}
    with ExitStack() as opened:
        # An open file outlives its replacement.
        sources: dict[Path, BinaryIO] = {
            path: opened.enter_context(path.open("rb")) for path in places
        }
        _copy_what_moves(changed, stale, sources)
        num_rows = sum(map(len, changed.values()))
        with progress_bar("writing parts", num_rows, "rows") as bar:
            for path, lines in changed.items():
                with atomic_path(path) as temp, temp.open("wb") as file:
                    for answer, names in lines:
                        line = _line(sources[answer.place.path], answer.place)
                        file.write(_as_wanted(line, answer, names))
                        bar.advance()
    for path in stale:
        path.unlink(missing_ok=True)
    JOURNAL.unlink(missing_ok=True)


def _copy_what_moves(
    changed: dict[Path, list[Line]], stale: set[Path], sources: dict[Path, BinaryIO]
) -> None:
    """To the journal: each row whose file is about to go and that comes into another one."""
    going = changed.keys() | stale
    with JOURNAL.open("ab") as journal:
        for path, lines in changed.items():
            for answer, _ in lines:
                if answer.place.path != path and answer.place.path in going:
                    journal.write(_line(sources[answer.place.path], answer.place))
        journal.flush()
        os.fsync(journal.fileno())


def _is_in_place(path: Path, lines: list[Line]) -> bool:
    """Whether the file holds exactly these rows already, as they shall be."""
    offset = 0
    for answer, row in lines:
        if answer.place[:2] != (path, offset) or not _is_as_wanted(answer, row):
            return False
        offset += answer.place.length
    return path.exists() and path.stat().st_size == offset


def _is_as_wanted(answer: Stored, row: Row | None) -> bool:
    names = row is None or (row.sample_id, row.source) == (answer.sample_id, answer.source)
    return answer.is_as_written and names


def _as_wanted(line: bytes, answer: Stored, row: Row | None) -> bytes:
    """The line, byte for byte unless its status or its prompt's name changed."""
    if _is_as_wanted(answer, row):
        return line
    trace = orjson.loads(line)
    names = {"sample_id": row.sample_id, "source": row.source} if row else {}
    return orjson.dumps(trace | names | {"status": answer.verdict.status}) + b"\n"


def forget(is_unwanted: Callable[[Trace], bool], keep_in: Path | None = None) -> None:
    """Take answers out of the journal, so that they are asked again; `keep_in` gets a copy."""
    aside = keep_in or Path(os.devnull)
    aside.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(JOURNAL) as temp, temp.open("wb") as kept, aside.open("ab") as copy:
        for _, line in _lines(JOURNAL):
            (copy if is_unwanted(_parsed(line, JOURNAL)) else kept).write(line)


def _lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    offset = 0
    with path.open("rb") as file:
        for line in file:
            yield Place(path, offset, len(line)), line
            offset += len(line)


def _line(file: BinaryIO, place: Place) -> bytes:
    file.seek(place.offset)
    return file.read(place.length)


def _parsed(line: bytes, path: Path) -> Trace:
    try:
        trace: Trace = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} holds a line that is no JSON ({error})") from error
    if not isinstance(trace, dict) or "key" not in trace:
        raise DataError(f"{path} holds a line that is no trace")
    return trace


def _cut_torn_line() -> None:
    """Drop the unfinished last line of a killed run, so that the next line starts on its own."""
    if not JOURNAL.exists():
        return
    with JOURNAL.open("r+b") as file:
        whole = sum(len(line) for line in file if line.endswith(b"\n"))
        file.truncate(whole)
