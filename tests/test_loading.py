"""A step's data: what the quick way gives is what speculators' own way gives, number for number."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn

from pipeline.errors import DataError
from pipeline.loading import COLUMNS, StatesDataset
from pipeline.manifest import MANIFEST, Manifest, SequenceRecord, describe, ids_sha256
from pipeline.resume import write_json
from pipeline.shards import STORED_AS, HiddenStates, ShardWriter, States
from tests.small_sequences import sequence
from tests.test_shards import HIDDEN, NAME, entry

MAX_LEN = 128
ROWS = [
    sequence(0),
    sequence(1, 17, 9),
    sequence(2, 129, 5),
    sequence(3, 300, 40),
    sequence(4, 6, 1),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "train"))
    return tmp_path


def write_states(folder: Path, dtype: str) -> None:
    """Random states of ROWS, the last one from the first supervised token on."""
    records = [
        SequenceRecord(
            sample_id=row["sample_id"],
            key=row["key"],
            ids_sha256=ids_sha256(torch.tensor(row["input_ids"]).numpy()),
            num_tokens=row["seq_len"],
            num_last_states=sum(row["loss_mask"]),
        )
        for row in ROWS
    ]
    writer = ShardWriter(folder / "states" / NAME, entry(*records, dtype=dtype), HIDDEN)
    for index, row in enumerate(ROWS):
        values = torch.randn(row["seq_len"], 4, HIDDEN)
        writer.put(index, States(torch.tensor(row["input_ids"]), values[:, :3], values[:, 3]))
    shard = describe(folder / "states" / NAME, writer.write())
    write_json(folder / "states" / MANIFEST, Manifest(shards=[shard]).model_dump())


def dataset(folder: Path, kind: type[ArrowDataset]) -> ArrowDataset:
    states, rows = HiddenStates(folder / "states"), Dataset.load_from_disk(str(folder / "train"))
    if kind is StatesDataset:
        return StatesDataset(folder / "train", rows, states, MAX_LEN, torch.bfloat16)
    transfer = states.transfer([row["key"] for row in ROWS])
    made = ArrowDataset(MAX_LEN, folder / "train", transfer, on_missing="raise")
    made.data = rows.with_format("torch", columns=COLUMNS)
    return made


@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", STORED_AS)
@pytest.mark.parametrize("batch", [[0, 1], [2], [3], [4, 0], [3, 1]])
def test_batches_are_those_of_speculators(
    folder: Path, stored: str, trained_in: torch.dtype, batch: list[int]
) -> None:
    write_states(folder, stored)
    collate = CollateFn(MAX_LEN, HIDDEN, dtype=trained_in, preprocess=shift_batch)
    ours, theirs = (
        collate([made[index] for index in batch])
        for made in (dataset(folder, StatesDataset), dataset(folder, ArrowDataset))
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(ours[name], tensor), name
            assert ours[name].dtype == tensor.dtype
    assert ours["hidden_states"].dtype == trained_in
    assert ours["hidden_states"].shape == (1, MAX_LEN, 3 * HIDDEN)


def test_a_long_sequence_is_read_as_far_as_a_batch_has_room(folder: Path) -> None:
    write_states(folder, "float8_e4m3")
    sample = dataset(folder, StatesDataset)[3]
    assert {len(sample[name]) for name in ("hidden_states", "input_ids", "loss_mask")} == {129}


def test_states_of_other_tokens_stop_the_run(folder: Path) -> None:
    """speculators leaves such a sample out with a warning; here it is a damaged run."""
    write_states(folder, "float32")
    Dataset.from_list([ROWS[0] | {"input_ids": [1] * 10}]).save_to_disk(str(folder / "train"))
    with pytest.raises(DataError, match=r"0{64} are those of other tokens; `make verify-states`"):
        dataset(folder, StatesDataset)[0]
