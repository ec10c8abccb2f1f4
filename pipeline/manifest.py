"""What lies in data/hidden_states, known without reading a tensor.

    shard-00000.safetensors …   each says in its own header which sequences it holds (ShardEntry)
    manifest.json               all entries with the files' checksums, derived from those headers
    plan.json                   with extract.mode streamed, instead of the others: one entry of all
                                sequences that a server is asked for when they are needed

A shard is replaced as a whole and carries its own entry, so a killed run needs no repair.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
from datasets import Dataset
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open

from pipeline.errors import DataError
from pipeline.records import Ablation
from pipeline.resume import file_sha256, read_json

Model = TypeVar("Model", bound=BaseModel)
SHARDS, MANIFEST, PLAN = "shard-*.safetensors", "manifest.json", "plan.json"
ROWS_AT_ONCE = 1000
# One key alone: safetensors writes several in no fixed order, and same content is same bytes.
HEADER_KEY = "entry"


class StatesRejection(StrEnum):
    """Why a sequence has no hidden states."""

    REFUSED = "refused"  # HTTP 400: too long, mostly
    TOKEN_IDS = "token_ids"  # the server read other tokens than it was sent
    SHAPE = "shape"  # another number of tokens, layers or values than asked for
    NOT_FINITE = "not_finite"  # NaN or infinity, also after conversion to extract.dtype
    TIMED_OUT = "timed_out"  # transient: asked again whenever the stage runs
    FAILED = "failed"  # transient


TRANSIENT = frozenset({StatesRejection.TIMED_OUT, StatesRejection.FAILED})
# A shard of float32 has lost nothing of what the server computed, and these have its range: states
# stored in them are float32's, rounded. float16 has not, and what overflows there is rejected.
ROUNDED_FROM = {"bfloat16": "float32", "float8_e4m3": "float32"}


class SequenceRecord(BaseModel):
    """One sequence of a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str
    key: str
    """the trace's"""
    ids_sha256: str
    """of the token ids; hidden states depend on nothing else of the sequence"""
    num_tokens: int
    num_last_states: int
    """tokens from the first supervised one on: what training reads of the last state"""
    ablation: Ablation = Ablation.NONE
    """what reassemble took out of the sequence on purpose"""
    rejected: StatesRejection | None = None
    """why the shard has no states of it"""


class ShardEntry(BaseModel):
    """What a shard holds, in the order of its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layer_ids: list[int]
    """0 = embeddings, k = after layer k; the last one is the state before the final norm"""
    dtype: str
    weights_fingerprint: str
    served_as: str
    """content_key of what else decides what the server computes: dtype, quantization, config.json;
    not of verifier.server_args, which say in how much memory and on how many devices"""
    sequences: list[SequenceRecord]

    def stored(self) -> list[SequenceRecord]:
        return [record for record in self.sequences if record.rejected is None]


class ShardFile(ShardEntry):
    """An entry of manifest.json."""

    file: str
    sha256: str
    num_bytes: int

    def entry(self) -> ShardEntry:
        return ShardEntry.model_validate(self.model_dump(include=set(ShardEntry.model_fields)))


class Manifest(BaseModel):
    """manifest.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shards: list[ShardFile]


def ids_sha256(input_ids: np.ndarray) -> str:
    return hashlib.sha256(input_ids.astype("<i8").tobytes()).hexdigest()


def shard_name(index: int) -> str:
    return f"shard-{index:05d}.safetensors"


def read_entry(path: Path) -> ShardEntry | None:
    """The entry in a shard's header; None when the file is damaged or no shard.

    safetensors compares the length of the file with its header, so a cut file is found here.
    """
    try:
        with safe_open(path, framework="np") as shard:
            header = shard.metadata() or {}
        return ShardEntry.model_validate_json(header[HEADER_KEY])
    except (SafetensorError, OSError, KeyError, ValueError):
        return None


def load_manifest(folder: Path) -> Manifest:
    """Raises DataError when manifest.json is missing or of another make."""
    return _load(Manifest, folder / MANIFEST)


def load_plan(folder: Path) -> ShardEntry:
    """Raises DataError when plan.json is missing or of another make."""
    return _load(ShardEntry, folder / PLAN)


def _load(kind: type[Model], path: Path) -> Model:
    try:
        return kind.model_validate(read_json(path))
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} has another shape; `dvc repro -f extract`") from error


def with_states(
    sequences: Dataset,
    entries: Mapping[str, ShardEntry],
    layer_ids: list[int],
    weights_fingerprint: str,
    folder: Path,
) -> Dataset:
    """The sequences that the entries, by file name in `folder`, have states of: all but those that
    extract rejected.

    Raises:
        DataError: states are missing, of other tokens, layers or another verifier.
    """
    for file, entry in entries.items():
        if entry.weights_fingerprint != weights_fingerprint or entry.layer_ids != layer_ids:
            raise DataError(
                f"{folder / file} is of layers {entry.layer_ids} of verifier "
                f"{entry.weights_fingerprint[:12]}, wanted are {layer_ids} of "
                f"{weights_fingerprint[:12]}; `dvc repro`"
            )
    records = {record.key: record for entry in entries.values() for record in entry.sequences}
    kept = []
    columns = sequences.select_columns(["key", "sample_id", "input_ids"]).with_format("arrow")
    rows = (row for table in columns.iter(ROWS_AT_ONCE) for row in zip(*table, strict=True))
    for number, (key, sample_id, input_ids) in enumerate(rows):
        record = records.get(key.as_py())
        if record is None or record.ids_sha256 != ids_sha256(input_ids.values.to_numpy()):
            what = "no states" if record is None else "states of other tokens"
            raise DataError(f"{folder} has {what} for {sample_id}; `dvc repro`")
        if record.rejected is None:
            kept.append(number)
    return sequences.select(kept)


def describe(path: Path, entry: ShardEntry) -> ShardFile:
    return ShardFile(
        **entry.model_dump(),
        file=path.name,
        sha256=file_sha256(path),
        num_bytes=path.stat().st_size,
    )


def survey(folder: Path) -> dict[str, ShardFile]:
    """The sound shards of a folder, by file name.

    A file that was touched since the manifest was written must still have the checksum that stands
    there. One with an entry that the manifest does not know was finished by a run that was killed
    before it wrote the manifest.
    """
    known: dict[str, ShardFile] = {}
    written = 0.0
    manifest_path = folder / MANIFEST
    if manifest_path.exists():
        try:
            known = {shard.file: shard for shard in load_manifest(folder).shards}
            written = manifest_path.stat().st_mtime
        except DataError:
            pass  # the headers say all that is needed
    sound = {}
    for path in sorted(folder.glob(SHARDS)):
        entry, listed = read_entry(path), known.get(path.name)
        if entry is None:
            continue
        if listed is None or listed.entry() != entry:
            sound[path.name] = describe(path, entry)
        elif path.stat().st_mtime <= written or file_sha256(path) == listed.sha256:
            sound[path.name] = listed
    return sound


@dataclass(frozen=True)
class Plan:
    """What has to be done, shard by shard: nothing at all, mostly."""

    kept: dict[str, ShardFile]
    to_make: dict[str, ShardEntry]
    known: dict[str, tuple[str, int]]
    """ids_sha256: (file, row) of states that can be copied or rounded instead of asked for"""

    @property
    def to_ask(self) -> list[SequenceRecord]:
        entries = self.to_make.values()
        return [r for entry in entries for r in entry.sequences if r.ids_sha256 not in self.known]

    @property
    def num_copied(self) -> int:
        return sum(len(entry.sequences) for entry in self.to_make.values()) - len(self.to_ask)


def plan(wanted: dict[str, ShardEntry], there: dict[str, ShardFile]) -> Plan:
    """Compare what is wanted (no rejections in it) with the sound shards that are there."""
    kept = {n: there[n] for n, entry in wanted.items() if n in there and _is(there[n], entry)}
    to_make = {name: entry for name, entry in wanted.items() if name not in kept}
    # Of the same tokens more than one sequence can be wanted, with masks that begin elsewhere.
    needed: dict[tuple[str, ...], int] = {}
    for entry in to_make.values():
        for made_as in (_made_as(entry), _made_as(entry, ROUNDED_FROM.get(entry.dtype))):
            for record in entry.sequences:
                states = (*made_as, record.ids_sha256)
                needed[states] = max(record.num_last_states, needed.get(states, 0))
    known = {}
    for name, shard in there.items():
        for row, record in enumerate(shard.stored()):
            num_last_states = needed.get((*_made_as(shard), record.ids_sha256))
            if num_last_states is not None and num_last_states <= record.num_last_states:
                known[record.ids_sha256] = (name, row)
    return Plan(kept, to_make, known)


def _is(there: ShardFile, wanted: ShardEntry) -> bool:
    """Whether a shard is what is wanted, final rejections aside."""
    if any(record.rejected in TRANSIENT for record in there.sequences):
        return False
    asked_for = [record.model_copy(update={"rejected": None}) for record in there.sequences]
    return _made_as(there) == _made_as(wanted) and asked_for == wanted.sequences


def _made_as(entry: ShardEntry, dtype: str | None = None) -> tuple[str, str, str, str]:
    """What decides the values of a shard, or of one in another dtype."""
    return (str(entry.layer_ids), dtype or entry.dtype, entry.weights_fingerprint, entry.served_as)
