"""What makes a stage safe to kill and free to run again.

A file appears whole or not at all (temp file in the same folder, fsync, `os.replace`), an output
folder has one writer (flock), and a row is known by the hash of what determines it.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from pipeline.errors import DataError, UserError

TEMP_SUFFIX = ".tmp"
BOM = b"\xef\xbb\xbf"  # what some editors put before the first line of a file


def content_key(value: Any) -> str:
    """sha256 of `value` as canonical JSON (sorted keys, no spaces): 64 hex digits."""
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Write to the path given; it takes the place of `path` only when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(path.name + TEMP_SUFFIX)
    try:
        yield temp
        with temp.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically, and not at all when the bytes are there already (mtime stays)."""
    if path.exists() and path.read_bytes() == data:
        return
    with atomic_path(path) as temp:
        temp.write_bytes(data)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), sorted keys, two-space indent: stable under git and `dvc diff`."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_bytes(path, (text + "\n").encode())


def jsonl(rows: Iterable[Any]) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


def read_json(path: Path) -> Any:
    """Raises DataError when the file is missing or no JSON."""
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; `dvc repro` makes it") from error
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is no JSON ({error}); `dvc repro -f` makes it again") from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSONL file that a stage wrote, one by one. Raises DataError when it is missing or
    torn."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; `dvc repro` makes it") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path}:{number} is no JSON ({error})") from error


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process. Raises UserError at once when another process holds it.

    The lock file lies beside the folder, because the folder is a DVC output; it is not made here,
    for to DVC an empty output is one that has changed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = folder.with_name(f".{folder.name}.lock")
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UserError(
                f"{folder} is being written by process {lock.read().strip() or 'unknown'}; "
                "wait for it or end it"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
