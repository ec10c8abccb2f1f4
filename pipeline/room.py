"""Is there room for the shards? Asked before anything is spent on them, and before each is written.

What will be written follows from the plan: tokens × layers × hidden size × bytes of a value, and of
the last layer only what training reads.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.errors import UserError
from pipeline.manifest import Plan, ShardEntry
from pipeline.params import Params
from pipeline.shards import STORED_AS
from pipeline.stage import NO_ROOM
from pipeline.verifier import VerifierIdentity

ADVICE = (
    "a smaller extract.dtype or a smaller prompts.sample_cap, or the project on another file system"
)
PAGE = 4096


def num_bytes(entry: ShardEntry, hidden_size: int) -> int:
    """Of a shard on disk, at most: rejected sequences take nothing."""
    value = STORED_AS[entry.dtype].itemsize
    num_tokens = sum(record.num_tokens for record in entry.sequences)
    num_last = sum(record.num_last_states for record in entry.sequences)
    rows = num_tokens * (len(entry.layer_ids) - 1) + num_last
    scales = rows if value == 1 else 0
    offsets = 2 * 8 * (len(entry.sequences) + 1)
    header = len(json.dumps(entry.model_dump_json())) + PAGE  # a string in the header's JSON
    return rows * hidden_size * value + scales + num_tokens * 8 + offsets + header


def most_bytes(todo: Plan, hidden_size: int, folder: Path) -> int:
    """That must be free: a shard takes the place of an old one only when it is whole, and one
    whose states are copied stays mapped to the end."""
    copied_from = {file for file, _ in todo.known.values()}
    used = most = 0
    for name, entry in todo.to_make.items():
        used += num_bytes(entry, hidden_size)
        most = max(most, used)
        if (folder / name).exists() and name not in copied_from:
            used -= (folder / name).stat().st_size
    return most


def staging_bytes(params: Params, hidden_size: int) -> int:
    """That the files of the requests in flight can take, at most: the server writes its own dtype,
    and one request more than is in flight may have a file not yet packed."""
    layers = len(params.extract.layer_ids) + 1
    token = layers * hidden_size * STORED_AS[params.verifier.dtype].itemsize + 8
    return 2 * params.extract.concurrency * params.verifier.max_model_len * token


def check_room(todo: Plan, params: Params, verifier: VerifierIdentity, folder: Path) -> None:
    """Before anything is asked. Raises UserError."""
    require(folder, most_bytes(todo, verifier.hidden_size, folder), "the hidden states")


def require(folder: Path, needed: int, what: str, what_helps: str = ADVICE) -> None:
    """Raises UserError when less than `needed` bytes are free where `folder` is."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{what} need {size(needed)}, but {size(free)} are free in {folder}; what helps: "
            f"{what_helps}"
        )


@contextmanager
def told_plainly(folder: Path) -> Iterator[None]:
    """Raises UserError instead of what the disk says when a write finds no room."""
    try:
        yield
    except OSError as error:
        number = error.errno
        if number is None or number not in NO_ROOM:
            raise
        reason = "over the limit for a file" if number == errno.EFBIG else os.strerror(number)
        free = size(shutil.disk_usage(folder).free)
        raise UserError(
            f"{folder}: {reason} ({free} are free); what is stored stays, make room and run "
            f"again; what helps: {ADVICE}"
        ) from error


def size(count: int) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.3f} MB"
