"""Sequences on disk: the same bytes for the same rows, whole or not at all, as others load them."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline import sequences
from pipeline.errors import DataError
from pipeline.records import SEQUENCE_COLUMNS
from pipeline.sequences import SequenceWriter, load_split

pytestmark = pytest.mark.timeout(120)  # the first import of speculators takes its time


def row(index: int, num_tokens: int = 0) -> dict[str, Any]:
    """Row `index` of 5 to 11 tokens, as the assembler gives it."""
    length = num_tokens or 5 + index % 7
    mask = np.zeros(length, dtype=np.int8)
    mask[2:] = 1
    return {
        "input_ids": np.arange(index, index + length, dtype=np.int64),
        "loss_mask": mask,
        "seq_len": length,
        "sample_id": f"q{index}_gen0",
        "key": f"{index:064x}",
        "prompt_index": index,
        "source": "tést",
        "status": "ok",
        "generated_start": 2,
        "reasoning_start": 3,
        "reasoning_end": length - 2,
        "answer_start": length - 1,
        "answer_end": length - 1,
        "rebuilt": index % 2 == 0,
        "control_text": index % 3 == 0,
        "cut_in": "none",
        "ablation": "none",
    }


def write(folder: Path, num_rows: int) -> dict[str, bytes]:
    with SequenceWriter(folder) as writer:
        for index in range(num_rows):
            writer.add(row(index))
    assert writer.num_rows == num_rows
    return files(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def plain(index: int) -> dict[str, Any]:
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in row(index).items()}


# what is written


# One row; a batch less one row, a batch, one more; several batches.
@pytest.mark.parametrize("num_rows", [1, 255, 256, 257, 600])
def test_the_rows_that_were_added_are_read_in_their_order(tmp_path, num_rows):
    write(tmp_path / "train", num_rows)
    found = load_split(tmp_path / "train")
    assert tuple(found.column_names) == SEQUENCE_COLUMNS
    assert list(found) == [plain(index) for index in range(num_rows)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5])
def test_a_batch_more_or_less_changes_no_row(tmp_path, monkeypatch, num_rows):
    monkeypatch.setattr(sequences, "ROWS_A_BATCH", 2)
    write(tmp_path / "train", num_rows)
    assert list(load_split(tmp_path / "train")) == [plain(index) for index in range(num_rows)]


def test_columns_have_the_types_that_others_rely_on(tmp_path):
    write(tmp_path / "train", 3)
    schema = load_split(tmp_path / "train").data.schema
    assert schema.field("input_ids").type.value_type == pa.int64()
    assert schema.field("loss_mask").type.value_type == pa.int8()
    numbers = {"seq_len", "prompt_index", "generated_start"}
    numbers |= {f"{phase}_{end}" for phase in ("reasoning", "answer") for end in ("start", "end")}
    assert {field.name for field in schema if field.type == pa.int64()} == numbers
    assert {f.name for f in schema if f.type == pa.bool_()} == {"rebuilt", "control_text"}
    texts = {"sample_id", "key", "source", "status", "cut_in", "ablation"}
    assert {field.name for field in schema if field.type == pa.string()} == texts


def test_the_bytes_follow_from_the_rows_alone(tmp_path):
    first = write(tmp_path / "one/train", 300)
    assert write(tmp_path / "other/held_out", 300) == first
    assert write(tmp_path / "one/train", 300) == first
    assert write(tmp_path / "one/train", 299) != first


def test_another_row_is_another_fingerprint(tmp_path):
    """`datasets` would reuse what it derived from a folder with the same fingerprint."""
    states = [json.loads(write(tmp_path / "train", n)["state.json"]) for n in (0, 1, 2, 2)]
    found = [state["_fingerprint"] for state in states]
    assert len(set(found)) == 3
    assert found[2] == found[3]


def test_a_row_of_another_shape_is_an_error(tmp_path):
    with pytest.raises(KeyError), SequenceWriter(tmp_path / "train") as writer:
        writer.add({"input_ids": np.arange(3)})
    assert not (tmp_path / "train").exists()


# whole or not at all


def stop_after(num_added: int, folder: Path, error: type[BaseException]) -> None:
    with SequenceWriter(folder) as writer:
        for index in range(num_added):
            writer.add(row(index))
        raise error


@pytest.mark.parametrize("num_added", [0, 1, 256, 300])
def test_an_error_leaves_the_earlier_folder_as_it_was(tmp_path, num_added):
    before = write(tmp_path / "train", 3)
    with pytest.raises(RuntimeError):
        stop_after(num_added, tmp_path / "train", RuntimeError)
    assert files(tmp_path / "train") == before
    assert [path.name for path in tmp_path.iterdir()] == ["train"]


@pytest.mark.parametrize("num_added", [0, 1, 256, 300])
def test_an_error_where_nothing_was_leaves_nothing(tmp_path, num_added):
    with pytest.raises(KeyboardInterrupt):
        stop_after(num_added, tmp_path / "train", KeyboardInterrupt)
    assert list(tmp_path.iterdir()) == []


def test_nothing_takes_its_place_before_the_end(tmp_path):
    before = write(tmp_path / "train", 3)
    with SequenceWriter(tmp_path / "train") as writer:
        for index in range(600):
            writer.add(row(index))
            assert index % 100 or files(tmp_path / "train") == before
    assert len(load_split(tmp_path / "train")) == 600


def test_no_rows_are_a_folder_of_no_rows(tmp_path):
    write(tmp_path / "train", 0)
    found = load_split(tmp_path / "train")
    assert len(found) == 0
    assert tuple(found.column_names) == SEQUENCE_COLUMNS


def test_a_row_of_another_shape_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), SequenceWriter(tmp_path / "train") as writer:
        writer.add({"input_ids": np.arange(3)})
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_replaces_all_of_an_old_one(tmp_path):
    expected = write(tmp_path / "other", 3)
    write(tmp_path / "train", 600)
    (tmp_path / "train/data-00001-of-00002.arrow").write_bytes(b"of another version")
    assert write(tmp_path / "train", 3) == expected


def test_what_a_killed_run_left_does_no_harm(tmp_path):
    expected = write(tmp_path / "other", 3)
    left = tmp_path / "train.tmp"
    (left / "whole").mkdir(parents=True)
    (left / "rows.arrow").write_bytes(b"half a row")
    (left / "whole/data-00000-of-00002.arrow").write_bytes(b"half a row")
    assert write(tmp_path / "train", 3) == expected
    assert not left.exists()


# who reads it


def test_datasets_loads_it(tmp_path):
    import datasets

    write(tmp_path / "train", 600)
    found = datasets.load_from_disk(str(tmp_path / "train"))
    assert found.num_rows == 600
    assert found[599]["sample_id"] == "q599_gen0"
    assert found[599]["input_ids"].tolist() == plain(599)["input_ids"]
    assert [file["filename"] for file in found.cache_files] == [
        str(tmp_path / "train/data-00000-of-00001.arrow")
    ]


class NoStates:
    """A transfer of hidden states, all zero, of the rows that `row` makes."""

    def get_cached(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(row(index)["input_ids"])
        return {"token_ids": ids, "hidden_states": torch.zeros(len(ids), 4, 8)}


def test_speculators_loads_it(tmp_path):
    from speculators.train.data import ArrowDataset

    write(tmp_path / "train", 600)
    dataset = ArrowDataset(512, tmp_path / "train", transfer=NoStates(), on_missing="raise")
    assert len(dataset) == 600
    for column in ("input_ids", "loss_mask"):
        assert dataset[599][column].tolist() == plain(599)[column]


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a file"])
def test_no_sequences_are_one_clear_error(tmp_path, there):
    folder = tmp_path / "train"
    if there == "an empty folder":
        folder.mkdir()
    elif there == "a file":
        folder.write_bytes(b"")
    with pytest.raises(DataError, match=r"train holds no sequences; `dvc repro` makes them"):
        load_split(folder)


def peak_bytes(folder: Path, num_rows: int) -> int:
    """The most memory that writing so many rows of 300 tokens takes, in Python and in Arrow."""
    in_arrow = 0
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    with SequenceWriter(folder) as writer:
        for index in range(num_rows):
            writer.add(row(index, 300))
            in_arrow = max(in_arrow, pa.total_allocated_bytes() - before)
    _, in_python = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return in_arrow + in_python


def test_memory_does_not_grow_with_the_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(sequences, "ROWS_A_BATCH", 16)
    peak_bytes(tmp_path / "warm", 32)
    few, many = (peak_bytes(tmp_path / f"{n}", n) for n in (200, 2000))
    data = (tmp_path / "2000/data-00000-of-00001.arrow").stat().st_size
    assert data > 5_000_000
    assert many - few < data / 10  # of all batches; the list of their places grows a little
