"""Hidden states on disk: what they take, and how fast they are read beside speculators' own files.

No server: the states are random, of sequences as long as the demo verifier's and, `…_wide`, of some
as wide as Kimi-K2.5's. speculators has one safetensors file a sequence, as its
`generate-offline-data` leaves them. Both readers load one epoch of the same packed batches in one
process, taking turns; cold, the files are dropped from the page cache before, and the kernel must
have read them again.

    state_bytes_vs_raw        bytes of shards and manifest over those of the stored tensors alone
    fp8_bytes_vs_bf16         bytes of float8_e4m3 shards over those of bfloat16 ones
    loader_vs_speculators     tokens a second into collated batches, as `train` loads them, over
                              speculators' ArrowDataset with its FileTransfer
    transfer_vs_speculators   the same with our ShardTransfer in speculators' ArrowDataset, as
                              `speculators train --hidden-states-backend shards` loads them
    open_10k_samples_s        seconds to open data/hidden_states with 10,000 samples

Run      python -m perf.states                                  # or, for a short trial:
         python -m perf.states --sequences 100 --rounds 1
"""

import gc
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from hs_connectors import FileTransfer
from safetensors.torch import save_file
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader

from perf.report import publish, result, sizes
from pipeline.loading import COLUMNS, StatesDataset
from pipeline.manifest import (
    MANIFEST,
    Manifest,
    SequenceRecord,
    ShardEntry,
    ShardFile,
    describe,
    ids_sha256,
    shard_name,
)
from pipeline.resume import content_key, write_json
from pipeline.shards import HiddenStates, ShardWriter, States

COMMAND = "python -m perf.states"
NUM_SEQUENCES = 1000
NUM_ROUNDS = 5
SAMPLES_PER_SHARD = 128
NUM_OPENED = 10_000
MOST_CACHED = 0.1  # of the bytes of a cold run, or it was not cold


@dataclass(frozen=True)
class Kind:
    """Sequences of one kind, and the batches they are packed into."""

    name: str
    num_sequences: int
    num_tokens: tuple[int, int]  # at least, at most
    num_prompt_tokens: int
    hidden_size: int
    dtype: str
    max_len: int

    def lengths(self) -> list[int]:
        rng = Random(0)
        return [rng.randint(*self.num_tokens) for _ in range(self.num_sequences)]


def main() -> None:
    size, is_full = sizes(COMMAND, sequences=NUM_SEQUENCES, rounds=NUM_ROUNDS)
    torch.set_num_threads(1)  # a loader's worker has one
    kinds = [
        Kind("", size.sequences, (100, 200), 32, 256, "float32", 640),
        Kind("_wide", max(size.sequences // 40, 4), (300, 700), 100, 7168, "bfloat16", 2048),
    ]
    results: dict[str, list[float]] = {}
    for kind in kinds:
        with TemporaryDirectory(prefix="perf-") as folder:
            results.update(measure(kind, Path(folder), size.rounds))
    results["open_10k_samples_s"] = seconds_to_open(size.rounds)
    publish({name: result(each, COMMAND) for name, each in results.items()}, is_full=is_full)


def measure(kind: Kind, folder: Path, num_rounds: int) -> dict[str, list[float]]:
    num_bytes = {
        dtype: write_shards(kind, folder / dtype, dtype)
        for dtype in dict.fromkeys(["float8_e4m3", "bfloat16", kind.dtype])
    }
    write_files(kind, folder)
    tokens = list(zip(kind.lengths(), [kind.num_prompt_tokens] * kind.num_sequences, strict=True))
    num_states = sum(3 * length + length - prompt for length, prompt in tokens)
    num_values = num_states * kind.hidden_size
    raw = num_values * getattr(torch, kind.dtype).itemsize
    results = {
        f"state_bytes_vs_raw{kind.name}": [num_bytes[kind.dtype] / raw],
        f"fp8_bytes_vs_bf16{kind.name}": [num_bytes["float8_e4m3"] / num_bytes["bfloat16"]],
    }
    loaders = {
        "speculators": lambda: speculators_loader(kind, folder),
        "loader": lambda: our_loader(kind, folder, StatesDataset),
        "transfer": lambda: our_loader(kind, folder, ArrowDataset),
    }
    for state in ("warm", "cold"):
        for number in range(-1, num_rounds):
            speeds = {}
            order = list(loaders)
            for name in order[number % 3 :] + order[: number % 3]:
                files = folder / ("files" if name == "speculators" else kind.dtype)
                speeds[name] = tokens_per_s(loaders[name], files, is_cold=state == "cold")
            print(state + kind.name, {name: f"{speed:,.0f}" for name, speed in speeds.items()})
            for name in ("loader", "transfer"):
                if number >= 0:  # the first round warms up
                    ratio = speeds[name] / speeds["speculators"]
                    results.setdefault(f"{name}_vs_speculators_{state}{kind.name}", []).append(
                        ratio
                    )
    return results


def tokens_per_s(make_loader: Callable[[], Any], files: Path, *, is_cold: bool) -> float:
    """Of one epoch. Raises SystemExit when the page cache was not as it was meant to be."""
    gc.collect()  # a mapping that is still there keeps its pages
    if is_cold:
        drop_from_cache(files)
    loader, before, num_tokens = make_loader(), bytes_read(), 0
    began = time.perf_counter()
    for batch in loader:
        num_tokens += int((batch["document_ids"] >= 0).sum())
    seconds = time.perf_counter() - began
    there = sum(path.stat().st_size for path in files.iterdir())
    if is_cold and bytes_read() - before < (1 - MOST_CACHED) * there:
        sys.exit(f"{files} was still in the page cache: TMPDIR must lie on a disk")
    return num_tokens / seconds


def drop_from_cache(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_read() -> int:
    """From disks, by this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def speculators_loader(kind: Kind, folder: Path) -> Any:
    dataset = ArrowDataset(kind.max_len, folder / "rows", FileTransfer(folder / "files"), **RAISE)
    return batches(kind, dataset)


RAISE: Any = {"on_missing": "raise"}


def our_loader(kind: Kind, folder: Path, dataset_class: type[ArrowDataset]) -> Any:
    states = HiddenStates(folder / kind.dtype)
    rows = Dataset.load_from_disk(str(folder / "rows")).with_format(None)
    if dataset_class is StatesDataset:
        quick = StatesDataset(folder / "rows", rows, states, kind.max_len, torch.bfloat16)
        return batches(kind, quick)
    transfer = states.transfer(list(rows["key"]))
    return batches(kind, ArrowDataset(kind.max_len, folder / "rows", transfer, **RAISE))


def batches(kind: Kind, dataset: ArrowDataset) -> Any:
    """As pipeline.train packs them."""
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=kind.max_len, lengths=kind.lengths(), num_replicas=1, rank=0, seed=0
    )
    collate = CollateFn(kind.max_len, kind.hidden_size, preprocess=shift_batch)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)


# The data


def key_of(index: int) -> str:
    return content_key(["sequence", index])


def ids_of(index: int, num_tokens: int) -> torch.Tensor:
    return torch.randint(0, 1000, (num_tokens,), generator=torch.Generator().manual_seed(index))


def states_of(kind: Kind, index: int, num_tokens: int) -> torch.Tensor:
    """[T, 4, H]"""
    generator = torch.Generator().manual_seed(index)
    values = torch.randn(num_tokens, 4, kind.hidden_size, generator=generator)
    return values.to(getattr(torch, kind.dtype))


def records_of(kind: Kind) -> list[SequenceRecord]:
    return [
        SequenceRecord(
            sample_id=f"{key_of(index)[:16]}_gen0",
            key=key_of(index),
            ids_sha256=ids_sha256(ids_of(index, length).numpy()),
            num_tokens=length,
            num_last_states=length - kind.num_prompt_tokens,
        )
        for index, length in enumerate(kind.lengths())
    ]


def entry_of(records: list[SequenceRecord], dtype: str) -> ShardEntry:
    return ShardEntry(
        layer_ids=[1, 2, 3, 4],
        dtype=dtype,
        weights_fingerprint=content_key("weights"),
        served_as=content_key("served"),
        sequences=records,
    )


def write_shards(kind: Kind, folder: Path, dtype: str) -> int:
    """Bytes of the folder."""
    records, lengths, shards = records_of(kind), kind.lengths(), []
    for start in range(0, len(records), SAMPLES_PER_SHARD):
        entry = entry_of(records[start : start + SAMPLES_PER_SHARD], dtype)
        path = folder / shard_name(start // SAMPLES_PER_SHARD)
        writer = ShardWriter(path, entry, kind.hidden_size)
        for place in range(len(entry.sequences)):
            index = start + place
            states = states_of(kind, index, lengths[index])
            ids = ids_of(index, lengths[index])
            writer.put(place, States(ids, states[:, :-1], states[:, -1]))
        shards.append(describe(path, writer.write()))
    write_json(folder / MANIFEST, Manifest(shards=shards).model_dump())
    return sum(path.stat().st_size for path in folder.iterdir())


def write_files(kind: Kind, folder: Path) -> None:
    """speculators' own: the rows, and a file for each."""
    lengths, prompt, rows = kind.lengths(), kind.num_prompt_tokens, []
    (folder / "files").mkdir()
    for index, length in enumerate(lengths):
        ids = ids_of(index, length)
        tensors = {"hidden_states": states_of(kind, index, length), "token_ids": ids}
        save_file(tensors, folder / f"files/hs_{index}.safetensors")
        loss_mask = [0] * prompt + [1] * (length - prompt)
        row = {"key": key_of(index), "input_ids": ids.tolist(), "loss_mask": loss_mask}
        rows.append({**row, "seq_len": length})
    dataset = Dataset.from_list(rows).with_format("torch", columns=[*COLUMNS, "seq_len"])
    dataset.save_to_disk(str(folder / "rows"))


def seconds_to_open(num_rounds: int) -> list[float]:
    kind = Kind("", NUM_OPENED, (1000, 3000), 100, 0, "bfloat16", 0)
    records, shards = records_of(kind), []
    for start in range(0, NUM_OPENED, SAMPLES_PER_SHARD):
        entry = entry_of(records[start : start + SAMPLES_PER_SHARD], kind.dtype)
        name = shard_name(start // SAMPLES_PER_SHARD)
        shards.append(
            ShardFile(**entry.model_dump(), file=name, sha256=content_key(name), num_bytes=1)
        )
    times = []
    with TemporaryDirectory(prefix="perf-") as folder:
        write_json(Path(folder) / MANIFEST, Manifest(shards=shards).model_dump())
        for _ in range(num_rounds):
            began = time.perf_counter()
            HiddenStates(Path(folder))
            times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    main()
