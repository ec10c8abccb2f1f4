"""Answers on disk: a journal while they come in, parts in the order of the prompts afterwards.

data/traces/journal.jsonl       one flushed line an answer while `generate` runs
data/traces/part-00000.jsonl    1,000 questions a part, exactly one row each
data/.stash/traces.jsonl        answers that the present params do not want; they come back
data/.stash/failed_gate.jsonl   answers without reasoning of runs that the gate stopped
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from pipeline.records import NO_ANSWER, TRACES, TRACES_PER_PART, Prompt, Trace
from pipeline.resume import jsonl, read_jsonl, write_bytes

JOURNAL = TRACES / "journal.jsonl"
STASH = Path("data/.stash/traces.jsonl")
FAILED_GATE = Path("data/.stash/failed_gate.jsonl")


def load_stored() -> dict[str, Trace]:
    """Every answer there is, by key: stashed ones, the parts, then the journal (newest last)."""
    stored: dict[str, Trace] = {}
    for path in [STASH, *sorted(TRACES.glob("part-*.jsonl")), JOURNAL]:
        if path == JOURNAL:
            _cut_torn_line()
        if path.exists():
            for trace in read_jsonl(path):
                keep(trace, stored)  # type: ignore[arg-type]  # a TypedDict as stored
    return stored


def keep(trace: Trace, stored: dict[str, Trace]) -> None:
    """The newest answer; a failure, refusal or abort never takes the place of an answer."""
    earlier = stored.get(trace["key"])
    if trace["status"] in NO_ANSWER and earlier and earlier["status"] not in NO_ANSWER:
        return
    stored[trace["key"]] = trace


def append(journal: BinaryIO, trace: Trace) -> None:
    """One whole line, flushed: what is lost in a kill is at most the line being written."""
    journal.write(orjson.dumps(trace) + b"\n")
    journal.flush()


def fold(wanted: dict[str, Prompt], stored: dict[str, Trace]) -> None:
    """Parts in the order of the prompts; what is not wanted now goes to the stash."""
    keys = list(wanted)
    rows: dict[Path, list[Any]] = {STASH: [t for key, t in stored.items() if key not in wanted]}
    for number, start in enumerate(range(0, len(keys), TRACES_PER_PART)):
        part = TRACES / f"part-{number:05}.jsonl"
        rows[part] = [stored[key] for key in keys[start : start + TRACES_PER_PART]]
    files = {path: jsonl(part) for path, part in rows.items()}
    changed = [
        path
        for path, data in files.items()
        if data != (path.read_bytes() if path.exists() else b"")
    ]
    if len(changed) > 1:  # rows may move between files: until all are in place, the journal has all
        write_bytes(JOURNAL, jsonl(stored.values()))
    for path in changed:
        write_bytes(path, files[path])
    for stale in set(TRACES.glob("part-*.jsonl")) - files.keys():
        stale.unlink()
    JOURNAL.unlink(missing_ok=True)


def forget(keys: Iterable[str], keep_in: Path | None = None) -> None:
    """Take answers out of the journal, so that they are asked again; `keep_in` gets a copy."""
    unwanted = set(keys)
    rows = list(read_jsonl(JOURNAL)) if JOURNAL.exists() else []
    if keep_in:
        earlier = keep_in.read_bytes() if keep_in.exists() else b""
        write_bytes(keep_in, earlier + jsonl(row for row in rows if row["key"] in unwanted))
    write_bytes(JOURNAL, jsonl(row for row in rows if row["key"] not in unwanted))


def _cut_torn_line() -> None:
    """Drop the unfinished last line of a killed run, so that the next line starts on its own."""
    if not JOURNAL.exists():
        return
    data = JOURNAL.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with JOURNAL.open("r+b") as file:
            file.truncate(whole)
