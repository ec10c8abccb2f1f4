"""Shards: what is written is read, what is there stays, what is broken is made again."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors import safe_open

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
    plan,
    survey,
)
from pipeline.resume import write_json
from pipeline.shards import HiddenStates, Shard, ShardTransfer, ShardWriter, States
from tests.small_sequences import sequence

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
        writer.put(place, states(index, found.num_tokens, writer.dtype))
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


def test_reading_copies_nothing(tmp_path: Path) -> None:
    path = tmp_path / "shard-00000.safetensors"
    write(path, entry(record(0), record(1)))
    shard = Shard(path)
    first, second = shard.read(0).aux, shard.read(1).aux
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


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


def test_a_reader_can_be_sent_to_another_process(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"shard-00000.safetensors": entry(record(0))})
    reader = HiddenStates(folder)
    reader.read("key0")
    copy = pickle.loads(pickle.dumps(reader))
    assert torch.equal(copy.read("key0").aux, states(0).aux)


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
        pytest.param(entry(record(0), dtype="bfloat16"), id="dtype"),
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


def test_other_cuts_of_the_shards_copy_everything(tmp_path: Path) -> None:
    before = there(tmp_path, a=entry(record(0), record(1)), b=entry(record(2)))
    todo = plan({"a": entry(record(0)), "b": entry(record(1)), "c": entry(record(2))}, before)
    assert set(todo.to_make) == {"a", "b", "c"}
    assert todo.to_ask == []


def test_a_new_key_with_the_same_tokens_copies_the_states(tmp_path: Path) -> None:
    renamed = record(0).model_copy(update={"key": "another"})
    todo = plan({"a": entry(renamed)}, there(tmp_path, a=entry(record(0))))
    assert (set(todo.to_make), todo.to_ask) == ({"a"}, [])


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


NAME = "shard-00000.safetensors"


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


def test_a_failing_write_leaves_the_old_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = write(tmp_path / NAME, entry(record(0)))

    def half(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half a shard")
        raise OSError("no space left on device")

    monkeypatch.setattr("pipeline.shards.save_file", half)
    with pytest.raises(OSError, match="no space"):
        write(tmp_path / NAME, entry(record(1)))
    assert {path.name for path in tmp_path.iterdir()} == {NAME}
    assert describe(tmp_path / NAME, old.entry()) == old


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


def test_no_states_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"manifest.json: No such file.*dvc repro"):
        HiddenStates(tmp_path)
