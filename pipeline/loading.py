"""What a step of training reads: sequences and their states, as speculators' ArrowDataset gives
them, without the copies that it makes on the way.

Where it goes through `datasets` and a tensor of all four layers, a sample here is views of two
mapped files, the sequences' and a shard, until it is copied into its batch.
"""

from typing import Any

import torch
from datasets import Dataset
from speculators.train.data import ArrowDataset

from pipeline.errors import DataError
from pipeline.shards import ShardTransfer, padded_last

COLUMNS = ["input_ids", "loss_mask"]


class Rows:
    """Rows of a `datasets` folder as tensors. `with_format("torch")` gives the same and takes
    0.3 ms for each, which is most of what loading a short sample costs."""

    def __init__(self, sequences: Dataset) -> None:
        self._rows = sequences.with_format("arrow", columns=COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {name: torch.tensor(row.column(name)[0].values.to_numpy()) for name in COLUMNS}


class StatesDataset(ArrowDataset):
    """An ArrowDataset that is quick with a ShardTransfer; with any other it is what it was."""

    def _get_raw_data(self, index: int) -> Any:
        """What the parent returns, cut behind the last token that a batch has room for.

        Raises:
            DataError: the shard holds other tokens.
        """
        if not isinstance(self.transfer, ShardTransfer):
            return super()._get_raw_data(index)
        row = self.data[index]
        stop = self.max_len + 1  # shift_batch drops the first token
        states = self.transfer.states(self._map_to_file_idx(index), stop)
        token_ids, aux, last = states  # [T], [T, 3, H], [T_s, H]
        if not torch.equal(token_ids, row["input_ids"][:stop]):
            raise DataError(
                f"the states of {self.transfer.key(index)} are those of other tokens; "
                "`make verify-states` finds the shard"
            )
        return {
            "hidden_states": aux.flatten(1),  # [T, 3H]
            "input_ids": token_ids,
            "verifier_last_hidden_states": padded_last(aux, last),  # [T, H]
            "loss_mask": row["loss_mask"][:stop],
        }
