"""Shards: what is written is read, what is there stays, what is broken is made again."""

import argparse
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from speculators.train.config import TrainConfig

from pipeline.errors import DataError
from pipeline.manifest import (
    MANIFEST,
    Manifest,
    SequenceRecord,
    ShardEntry,
    ShardFile,
    StatesRejection,
    describe,
    ids_sha256,
    load_manifest,
    plan,
    survey,
)
from pipeline.resume import write_json
from pipeline.shards import (
    STORED_AS,
    HiddenStates,
    Shard,
    ShardBackend,
    ShardTransfer,
    ShardWriter,
    States,
)
from pipeline.staging import Rejected, checked
from tests.small_sequences import ROOT, sequence

NAME = "shard-00000.safetensors"
HIDDEN = 8
LAYERS = [1, 2, 3, 4]


def record(index: int, num_tokens: int = 5, num_last_states: int = 2) -> SequenceRecord:
    ids = np.arange(num_tokens) + 100 * index
    return SequenceRecord(
        sample_id=f"q{index}_gen0",
        key=f"key{index}",
        ids_sha256=ids_sha256(ids),
        num_tokens=num_tokens,
        num_last_states=num_last_states,
    )


def entry(
    *records: SequenceRecord,
    dtype: str = "float32",
    fingerprint: str = "f",
    served_as: str = "s",
) -> ShardEntry:
    return ShardEntry(
        layer_ids=LAYERS,
        dtype=dtype,
        weights_fingerprint=fingerprint,
        served_as=served_as,
        sequences=list(records),
    )


def states(index: int, num_tokens: int = 5, dtype: torch.dtype = torch.float32) -> States:
    generator = torch.Generator().manual_seed(index)
    hidden = torch.randn(num_tokens, 4, HIDDEN, generator=generator).to(dtype)
    ids = torch.arange(num_tokens) + 100 * index
    return States(ids, hidden[:, :-1], hidden[:, -1])


def write(path: Path, wanted: ShardEntry, order: list[int] | None = None) -> ShardFile:
    writer = ShardWriter(path, wanted, HIDDEN)
    for place in order or range(len(wanted.sequences)):
        found = wanted.sequences[place]
        index = int(found.key.removeprefix("key"))
        dtype = torch.float32 if wanted.dtype == "float8_e4m3" else writer.dtype
        writer.put(place, states(index, found.num_tokens, dtype))
    return describe(path, writer.write())


def folder_with(folder: Path, shards: dict[str, ShardEntry]) -> Path:
    files = [write(folder / name, shard) for name, shard in shards.items()]
    write_json(folder / MANIFEST, Manifest(shards=files).model_dump())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "shard-00000.safetensors"
    write(path, entry(record(0, 5, 2), record(1, 3, 3), record(2, 4, 0), dtype=dtype), [2, 0, 1])
    shard = Shard(path)
    for row, (num_tokens, num_last) in enumerate([(5, 2), (3, 3), (4, 0)]):
        expected = states(row, num_tokens, getattr(torch, dtype))
        found = shard.read(row)
        assert found.aux.dtype == getattr(torch, dtype)
        assert torch.equal(found.token_ids, expected.token_ids)
        assert torch.equal(found.aux, expected.aux)
        assert torch.equal(found.last, expected.last[num_tokens - num_last :])


def test_float8_is_read_as_bfloat16_near_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / NAME
    wanted = entry(record(0, 5, 2), record(1, 3, 3), record(2, 4, 0), dtype="float8_e4m3")
    write(path, wanted, [2, 0, 1])
    shard = Shard(path)
    for row, (num_tokens, num_last) in enumerate([(5, 2), (3, 3), (4, 0)]):
        expected, found = states(row, num_tokens), shard.read(row)
        assert (found.aux.dtype, found.last.dtype) == (torch.bfloat16, torch.bfloat16)
        assert found.last.shape == (num_last, HIDDEN)
        for there, wrote in ((found.aux, expected.aux), (found.last, expected.last)):
            error = (there.float() - wrote[num_tokens - len(there) :]).abs()
            assert (error <= wrote[num_tokens - len(there) :].abs() / 16 + 1e-3).all()
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("aux_hidden_states").dtype == torch.float8_e4m3fn
        assert file.get_tensor("aux_scales").shape == (12, 3)
        assert file.get_tensor("last_scales").shape == (5,)


def test_float8_takes_half_of_bfloat16_at_the_demo_verifiers_width(tmp_path: Path) -> None:
    """0.52 is what the project asks for; 300 tokens are two of its sequences."""
    sizes = {}
    for dtype in ("bfloat16", "float8_e4m3"):
        wanted = entry(record(0, 150, 120), record(1, 150, 120), dtype=dtype)
        writer = ShardWriter(tmp_path / dtype, wanted, 256)
        for index in range(2):
            values = torch.randn(150, 4, 256).bfloat16()
            writer.put(index, States(torch.arange(150), values[:, :3], values[:, 3]))
        writer.write()
        sizes[dtype] = (tmp_path / dtype).stat().st_size
    assert sizes["float8_e4m3"] / sizes["bfloat16"] < 0.52
    raw = 2 * (150 * 3 + 120) * 256 * 2
    assert sizes["bfloat16"] / raw < 1.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("span", [(0, None), (0, 4), (2, 7), (6, None), (8, 9), (3, 3), (0, 99)])
def test_a_span_is_that_part_of_the_whole(
    tmp_path: Path, dtype: str, span: tuple[int, int | None]
) -> None:
    """Of ten tokens, six of them with a last state."""
    folder = folder_with(tmp_path, {NAME: entry(record(0), record(1, 10, 6), dtype=dtype)})
    reader, places = HiddenStates(folder), range(10)[slice(*span)]
    whole, found = reader.read("key1"), reader.read("key1", *span)
    assert found.token_ids.tolist() == [100 + place for place in places]
    assert torch.equal(found.aux, whole.aux[slice(*span)])
    expected = [whole.last[place - 4] for place in places if place >= 4]
    assert torch.equal(found.last, torch.stack(expected) if expected else whole.last[:0])


def memory_kb() -> dict[str, int]:
    """Resident, of this process's own (Anon) and of mapped files (File)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line[3:7]: int(line.split()[1]) for line in lines if line.startswith("Rss")}


def mapped_file(tensor: torch.Tensor) -> str:
    """The file whose mapping holds the tensor's first value."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(edge, 16) for edge in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < end:
            return " ".join(line.split()[5:])
    raise AssertionError("it lies nowhere")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_reading_copies_nothing(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / NAME
    write(path, entry(record(0), record(1), dtype=dtype))
    shard = Shard(path)
    for row, start, stop in ((0, 0, None), (1, 0, None), (1, 3, 5)):
        for tensor in shard.read(row, start, stop):
            assert mapped_file(tensor) == str(path)


def test_a_sample_comes_out_without_its_shard(tmp_path: Path) -> None:
    """64 MB in 40 samples: reading one brings in its own pages and little else."""
    wanted = entry(*(record(i, 100, 100) for i in range(40)))
    writer = ShardWriter(tmp_path / NAME, wanted, 1024)
    for index in range(40):
        values = torch.ones(100, 4, 1024)
        writer.put(index, States(torch.arange(100) + 100 * index, values[:, :3], values[:, 3]))
    file = describe(tmp_path / NAME, writer.write())
    assert file.num_bytes > 64_000_000
    write_json(tmp_path / MANIFEST, Manifest(shards=[file]).model_dump())
    del writer
    before = memory_kb()
    reader = HiddenStates(tmp_path)
    assert float(reader.read("key7").aux.sum()) == 100 * 3 * 1024
    grown = {kind: now - before[kind] for kind, now in memory_kb().items()}
    assert grown["Anon"] < 2_000
    assert grown["File"] < 8_000
    total = sum(float(reader.read(f"key{i}").aux.sum()) for i in range(40))  # the test itself
    assert total == 40 * 100 * 3 * 1024
    assert memory_kb()["File"] - before["File"] > 40_000
    assert memory_kb()["Anon"] - before["Anon"] < 2_000


def test_same_content_is_same_bytes_in_any_order_of_arrival(tmp_path: Path) -> None:
    wanted = entry(record(0), record(1, 7, 4), record(2))
    one, other = tmp_path / "shard-00000.safetensors", tmp_path / "shard-00001.safetensors"
    assert write(one, wanted).sha256 == write(other, wanted, [2, 1, 0]).sha256


def test_a_rejected_sequence_leaves_no_rows(tmp_path: Path) -> None:
    wanted = entry(record(0), record(1, 3, 1), record(2))
    writer = ShardWriter(tmp_path / "shard-00000.safetensors", wanted, HIDDEN)
    writer.put(2, states(2))
    writer.reject(1, StatesRejection.NOT_FINITE)
    assert not writer.complete
    writer.put(0, states(0))
    written = writer.write()
    assert [r.rejected for r in written.sequences] == [None, StatesRejection.NOT_FINITE, None]
    with safe_open(writer.path, framework="pt") as file:
        assert file.get_tensor("aux_hidden_states").shape == (10, 3, HIDDEN)
        assert file.get_tensor("offsets").tolist() == [0, 5, 10]
        assert file.get_tensor("last_offsets").tolist() == [0, 2, 4]
    assert torch.equal(Shard(writer.path).read(1).aux, states(2).aux)


def test_speculators_gets_four_layers_with_zeros_where_nothing_is_read(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"shard-00000.safetensors": entry(record(0, 5, 2), record(1))})
    sample = ShardTransfer(HiddenStates(folder), ["key1", "key0"]).get_cached(1)
    expected = states(0, 5)
    assert sample["token_ids"].tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(sample["hidden_states"][:, :3], expected.aux)
    assert torch.equal(sample["hidden_states"][3:, 3], expected.last[3:])
    assert sample["hidden_states"][:3, 3].abs().sum() == 0


def test_speculators_takes_the_backend_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in their own order; one without states is missing, as speculators means it."""
    rejected = record(2).model_copy(update={"rejected": StatesRejection.REFUSED})
    folder = folder_with(tmp_path / "states", {NAME: entry(record(0), record(1))})
    manifest = load_manifest(folder)
    shard = manifest.shards[0]
    shard = shard.model_copy(update={"sequences": [*shard.sequences, rejected]})
    write_json(folder / MANIFEST, Manifest(shards=[shard]).model_dump())
    rows = [{"key": key, "input_ids": [0], "seq_len": 1} for key in ("key1", "key2", "key0")]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "rows"))
    arguments = ["--hidden-states-backend", "shards", "--hidden-states-path", str(folder)]
    arguments += ["--verifier-name-or-path", "v", "--data-path", str(tmp_path / "rows")]
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    config = TrainConfig.resolve()
    assert config.data.hidden_states_backend == "shards"
    transfer = ShardBackend.from_train_args(
        argparse.Namespace(hidden_states_path=str(folder)), str(tmp_path / "rows")
    )
    assert transfer.get_cached(0)["token_ids"].tolist() == [100, 101, 102, 103, 104]
    assert transfer.get_cached(1) is None
    assert transfer.get_cached(2)["token_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"shard-00000.safetensors": entry(record(0))})
    reader = HiddenStates(folder)
    reader.read("key0")
    copy = pickle.loads(pickle.dumps(reader))
    assert torch.equal(copy.read("key0").aux, states(0).aux)


# Values that are not finite

SERVED = ["float32", "bfloat16", "float16"]


def payload(value: float, served: str) -> dict[str, torch.Tensor]:
    """What a server stages for record(0): one value at the last layer of a token is given."""
    hidden = torch.ones(5, 4, HIDDEN).to(getattr(torch, served))
    hidden[1, 3, 2] = value
    return {"hidden_states": hidden, "token_ids": torch.arange(5)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("stored", STORED_AS)
def test_what_a_server_computed_must_be_finite(
    tmp_path: Path, stored: str, served: str, value: float
) -> None:
    """Before it is converted: float8 makes 448 of an infinity."""
    writer = ShardWriter(tmp_path / NAME, entry(record(0), dtype=stored), HIDDEN)
    with pytest.raises(Rejected) as rejected:
        checked(payload(value, served), np.arange(5), writer)
    assert rejected.value.reason == StatesRejection.NOT_FINITE
    found = checked(payload(3.0, served), np.arange(5), writer)
    writer.put(0, found)
    writer.write()
    assert Shard(tmp_path / NAME).read(0).last[:, 2].tolist() == [1.0, 1.0]


def test_what_is_stored_must_be_finite(tmp_path: Path) -> None:
    """After it was converted: float16 has nothing above 65504."""
    for stored, is_kept in {"float16": False, "bfloat16": True, "float8_e4m3": True}.items():
        writer = ShardWriter(tmp_path / NAME, entry(record(0), dtype=stored), HIDDEN)
        if is_kept:
            writer.put(0, checked(payload(1e6, "float32"), np.arange(5), writer))
            continue
        with pytest.raises(Rejected) as rejected:
            checked(payload(1e6, "float32"), np.arange(5), writer)
        assert rejected.value.reason == StatesRejection.NOT_FINITE


# What is to do


def there(tmp_path: Path, **shards: ShardEntry) -> dict[str, ShardFile]:
    return {name: write(tmp_path / name, shard) for name, shard in shards.items()}


def test_growth_touches_the_last_shard_alone(tmp_path: Path) -> None:
    before = there(tmp_path, a=entry(record(0), record(1)), b=entry(record(2)))
    wanted = {
        "a": entry(record(0), record(1)),
        "b": entry(record(2), record(3)),
        "c": entry(record(4)),
    }
    todo = plan(wanted, before)
    assert set(todo.kept) == {"a"}
    assert set(todo.to_make) == {"b", "c"}
    assert [r.key for r in todo.to_ask] == ["key3", "key4"]


def test_nothing_to_do(tmp_path: Path) -> None:
    wanted = {"a": entry(record(0), record(1))}
    todo = plan(wanted, there(tmp_path, **wanted))
    assert (list(todo.kept), todo.to_make, todo.to_ask) == (["a"], {}, [])


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(entry(record(0), dtype="float16"), id="dtype"),
        pytest.param(entry(record(0), fingerprint="g"), id="verifier"),
        pytest.param(entry(record(0), served_as="t"), id="served otherwise"),
        pytest.param(entry(record(0)).model_copy(update={"layer_ids": [0, 2, 3, 4]}), id="layers"),
        pytest.param(entry(record(0, num_last_states=3)), id="more is supervised"),
        pytest.param(entry(record(0, num_tokens=6)), id="other tokens"),
    ],
)
def test_other_states_are_asked_for(tmp_path: Path, changed: ShardEntry) -> None:
    todo = plan({"a": changed}, there(tmp_path, a=entry(record(0))))
    assert [r.key for r in todo.to_ask] == ["key0"]


@pytest.mark.parametrize(
    ("stored", "wanted", "asked"),
    [
        ("float32", "bfloat16", 0),
        ("float32", "float8_e4m3", 0),
        ("float32", "float16", 1),  # has not its range
        ("bfloat16", "float8_e4m3", 1),  # has lost what a float32 server computed
        ("bfloat16", "float32", 1),
        ("float8_e4m3", "bfloat16", 1),
        ("float16", "bfloat16", 1),
    ],
)
def test_states_are_rounded_from_float32_and_never_from_less(
    tmp_path: Path, stored: str, wanted: str, asked: int
) -> None:
    todo = plan(
        {"a": entry(record(0), dtype=wanted)}, there(tmp_path, a=entry(record(0), dtype=stored))
    )
    assert (set(todo.to_make), len(todo.to_ask)) == ({"a"}, asked)
    other = entry(record(0), dtype=wanted, served_as="t")
    assert len(plan({"a": other}, there(tmp_path, a=entry(record(0), dtype=stored))).to_ask) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_rounded_states_are_the_bytes_that_extraction_would_store(
    tmp_path: Path, dtype: str
) -> None:
    write(tmp_path / "float32", entry(record(0), record(1, 7, 4)))
    wanted = entry(record(0), record(1, 7, 4), dtype=dtype)
    writer, old = ShardWriter(tmp_path / "rounded", wanted, HIDDEN), Shard(tmp_path / "float32")
    for index in range(2):
        writer.put(index, old.read(index))
    writer.write()
    extracted = ShardWriter(tmp_path / "extracted", wanted, HIDDEN)
    for index, num_tokens in ((0, 5), (1, 7)):
        extracted.put(index, states(index, num_tokens))
    extracted.write()
    assert (tmp_path / "rounded").read_bytes() == (tmp_path / "extracted").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3"])
def test_states_copied_into_another_shard_keep_their_bytes(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a", entry(record(0), record(1, 7, 4), dtype=dtype))
    wanted = entry(record(1, 7, 4), record(0), dtype=dtype)
    copied, old = ShardWriter(tmp_path / "b", wanted, HIDDEN), Shard(tmp_path / "a")
    copied.put(0, old.read(1))
    copied.put(1, old.read(0))
    written = describe(tmp_path / "b", copied.write())
    assert write(tmp_path / "c", wanted).sha256 == written.sha256


def test_other_cuts_of_the_shards_copy_everything(tmp_path: Path) -> None:
    before = there(tmp_path, a=entry(record(0), record(1)), b=entry(record(2)))
    todo = plan({"a": entry(record(0)), "b": entry(record(1)), "c": entry(record(2))}, before)
    assert set(todo.to_make) == {"a", "b", "c"}
    assert todo.to_ask == []


def test_a_new_key_with_the_same_tokens_copies_the_states(tmp_path: Path) -> None:
    renamed = record(0).model_copy(update={"key": "another"})
    todo = plan({"a": entry(renamed)}, there(tmp_path, a=entry(record(0))))
    assert (set(todo.to_make), todo.to_ask) == ({"a"}, [])


def test_of_two_sequences_of_the_same_tokens_the_longer_mask_decides(tmp_path: Path) -> None:
    """One has last states of two tokens, the other of one, in either order."""
    long, short = record(0, 5, 2), record(0, 5, 1).model_copy(update={"key": "key00"})
    for number, records in enumerate([(long, short), (short, long)]):
        before = there(tmp_path / str(number), a=entry(*records))
        todo = plan({"a": entry(*records, record(1))}, before)
        assert [r.key for r in todo.to_ask] == ["key1"]
        file, row = todo.known[long.ids_sha256]
        assert len(Shard(tmp_path / str(number) / file).read(row).last) == 2
    todo = plan({"a": entry(long, short)}, there(tmp_path / "less", a=entry(short)))
    assert {r.key for r in todo.to_ask} == {"key0", "key00"}


@pytest.mark.parametrize(
    ("reason", "asked"),
    [(StatesRejection.TIMED_OUT, 1), (StatesRejection.FAILED, 1), (StatesRejection.REFUSED, 0)],
)
def test_transient_rejections_are_asked_again(
    tmp_path: Path, reason: StatesRejection, asked: int
) -> None:
    wanted = entry(record(0), record(1))
    writer = ShardWriter(tmp_path / "a", wanted, HIDDEN)
    writer.put(0, states(0))
    writer.reject(1, reason)
    before = {"a": describe(tmp_path / "a", writer.write())}
    assert len(plan({"a": wanted}, before).to_ask) == asked


# Damage and sudden death


def test_a_cut_shard_is_not_there(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {NAME: entry(record(0))})
    assert set(survey(folder)) == {NAME}
    os.truncate(folder / NAME, (folder / NAME).stat().st_size - 8)
    assert survey(folder) == {}


def test_a_touched_shard_must_have_its_checksum(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {NAME: entry(record(0))})
    written = (folder / MANIFEST).stat().st_mtime
    os.utime(folder / NAME, (written + 10, written + 10))
    assert set(survey(folder)) == {NAME}
    damaged = bytearray((folder / NAME).read_bytes())
    damaged[-1] ^= 1
    (folder / NAME).write_bytes(damaged)
    os.utime(folder / NAME, (written + 10, written + 10))
    assert survey(folder) == {}


def test_a_shard_that_the_manifest_does_not_know_is_there(tmp_path: Path) -> None:
    """The run that wrote it was killed before it wrote the manifest."""
    folder = folder_with(tmp_path, {NAME: entry(record(0))})
    rewritten = entry(record(0), record(1))
    expected = write(folder / NAME, rewritten)
    later = (folder / MANIFEST).stat().st_mtime + 10
    os.utime(folder / NAME, (later, later))
    assert survey(folder) == {NAME: expected}
    (folder / MANIFEST).unlink()
    assert survey(folder) == {NAME: expected}


HARM = """
import os, resource, signal, sys
from pathlib import Path
from tests.test_shards import entry, record, write
path, harm = Path(sys.argv[1]), sys.argv[2]
if harm == "too large":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
elif harm == "killed":
    import pipeline.resume
    pipeline.resume.os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
try:
    write(path, entry(*(record(i, 500, 400) for i in range(9))))
finally:
    print("left:", [file.name for file in path.parent.iterdir() if "tmp" in file.name])
"""


def write_elsewhere(path: Path, harm: str) -> subprocess.CompletedProcess[str]:
    """A shard of 600 kB in a process of its own: `too large` after 100 kB, `full` after 128 kB
    (the disk is a tmpfs that only this process sees), `killed` at its end."""
    command = [sys.executable, "-c", HARM, str(path), harm]
    if harm == "full":
        mount = f'mount -t tmpfs -o size=128k tmpfs {path.parent}/disk && exec "$@"'
        command[3] = str(path.parent / "disk" / path.name)
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *command]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("harm", ["too large", "killed"])
def test_a_failing_write_leaves_the_old_shard(tmp_path: Path, harm: str) -> None:
    old = write(tmp_path / NAME, entry(record(0)))
    ended = write_elsewhere(tmp_path / NAME, harm)
    assert ended.returncode == (1 if harm == "too large" else -signal.SIGKILL)
    left = {path.name for path in tmp_path.iterdir()} - {NAME}
    assert left == ({f"{NAME}.tmp"} if harm == "killed" else set())
    assert describe(tmp_path / NAME, old.entry()) == old
    assert survey(tmp_path) == {NAME: old}
    write(tmp_path / NAME, entry(record(1)))
    assert {path.name for path in tmp_path.iterdir()} == {NAME}


def test_a_full_disk_is_told_as_one(tmp_path: Path) -> None:
    """safetensors has an exception of its own for it; `run_stage` knows OSError."""
    (tmp_path / "disk").mkdir()
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs of their own")
    ended = write_elsewhere(tmp_path / NAME, "full")
    assert "OSError: [Errno 28] No space left on device" in ended.stderr
    assert "left: []" in ended.stdout


def test_a_reader_never_sees_half_a_shard(tmp_path: Path) -> None:
    """A file that is replaced over and over is whole whenever it is opened, and what is open stays
    what it was."""
    path = tmp_path / NAME
    small, large = entry(record(0)), entry(record(1, 5000, 5000))
    write(path, small)
    first, done = Shard(path), threading.Event()

    def write_over_and_over() -> None:
        while not done.is_set():
            write(path, large)
            write(path, small)

    writer = threading.Thread(target=write_over_and_over)
    writer.start()
    seen = set()
    deadline = time.monotonic() + 20
    while len(seen) < 2 and time.monotonic() < deadline:
        found = Shard(path).read(0)
        seen.add(len(found.token_ids))
        expected = states(0) if len(found.token_ids) == 5 else states(1, 5000)
        assert torch.equal(found.aux, expected.aux)
    done.set()
    writer.join()
    assert seen == {5, 5000}
    assert torch.equal(first.read(0).aux, states(0).aux)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_no_dtype_goes_through_numpy(tmp_path: Path, dtype: str) -> None:
    """numpy has neither: surveying, planning and reading are the same as for float32."""
    wanted = {NAME: entry(record(0), dtype=dtype)}
    folder = folder_with(tmp_path, wanted)
    (folder / MANIFEST).unlink()
    assert plan(wanted, survey(folder)).to_make == {}


# The sequences that have states


def dataset(*indices: int) -> Dataset:
    return Dataset.from_list([sequence(index) for index in indices])


def reader(folder: Path, *indices: int, rejected: int | None = None) -> HiddenStates:
    records = [
        SequenceRecord(
            sample_id=row["sample_id"],
            key=row["key"],
            ids_sha256=ids_sha256(np.array(row["input_ids"])),
            num_tokens=row["seq_len"],
            num_last_states=1,
            rejected=StatesRejection.REFUSED if row["prompt_index"] == rejected else None,
        )
        for row in map(sequence, indices)
    ]
    shard = ShardFile(**entry(*records).model_dump(), file=NAME, sha256="", num_bytes=0)
    write_json(folder / MANIFEST, Manifest(shards=[shard]).model_dump())
    return HiddenStates(folder)


def test_rejected_sequences_are_left_out(tmp_path: Path) -> None:
    kept = reader(tmp_path, 0, 1, 2, rejected=1).of(dataset(0, 1, 2), LAYERS, "f")
    assert kept["prompt_index"] == [0, 2]


def test_a_missing_sequence_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no states for q1_gen0"):
        reader(tmp_path, 0).of(dataset(0, 1), LAYERS, "f")


def test_states_of_other_tokens_are_an_error(tmp_path: Path) -> None:
    other = dataset(0).map(lambda row: {"input_ids": [i + 1 for i in row["input_ids"]]})
    with pytest.raises(DataError, match="states of other tokens for q0_gen0"):
        reader(tmp_path, 0).of(other, LAYERS, "f")


def test_states_of_another_verifier_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"layers \[1, 2, 3, 4\] of verifier f, wanted .* of g"):
        reader(tmp_path, 0).of(dataset(0), LAYERS, "g")


def test_states_of_other_layers_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"of layers \[1, 2, 3, 4\] .* wanted are \[0, 2, 3, 4\]"):
        reader(tmp_path, 0).of(dataset(0), [0, 2, 3, 4], "f")


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_shard_that_cannot_be_opened_is_named(tmp_path: Path, harm: Any) -> None:
    folder = folder_with(tmp_path, {NAME: entry(record(0))})
    harm(folder / NAME)
    with pytest.raises(DataError, match=rf"{NAME} cannot be opened .*make verify-states"):
        HiddenStates(folder).read("key0")


def test_no_states_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: No such file.*dvc repro"):
        HiddenStates(tmp_path)
