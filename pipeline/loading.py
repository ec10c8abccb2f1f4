"""What a step of training reads: sequences and their states, as speculators' ArrowDataset gives
them, without the copies that it makes on the way.

Where it goes through `datasets` and a tensor of all four layers, a sample here is views of two
mapped files, the sequences' and a shard, until it is copied into its batch. With
extract.mode streamed it is ArrowDataset's own way: ask a server, all sequences of a batch at once.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import torch
from datasets import Dataset
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import get_worker_info

from pipeline.errors import DataError, ServerError
from pipeline.server import api_key
from pipeline.shards import HiddenStates, ShardTransfer, padded_last
from pipeline.streaming import StreamedStates

COLUMNS = ["input_ids", "loss_mask"]
# Of a sequence that a server gives no states for, and of the way there and back.
MAX_RETRIES = 1


class Rows:
    """Rows of a `datasets` folder as tensors, cut behind `stop` tokens. `with_format("torch")`
    gives the same and takes 0.3 ms for each, which is most of what loading a short sample costs."""

    def __init__(self, sequences: Dataset, stop: int) -> None:
        self._rows = sequences.with_format("arrow", columns=COLUMNS)
        self._stop = stop

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows[index]
        return {
            name: torch.tensor(row.column(name)[0].values[: self._stop].to_numpy())
            for name in COLUMNS
        }


class StatesDataset(ArrowDataset):
    """Sequences with their states, each cut behind the last token that a batch has room for.

    `sequences` are rows of `folder` that `states.of` gave.
    """

    def __init__(
        self,
        folder: Path,
        sequences: Dataset,
        states: HiddenStates | StreamedStates,
        max_len: int,
        dtype: torch.dtype,
    ) -> None:
        self._streamed = states if isinstance(states, StreamedStates) else None
        super().__init__(
            max_len=max_len,
            datapath=folder,
            transfer=states.transfer(list(sequences["key"])),
            on_missing="generate" if self._streamed else "raise",
            hidden_states_dtype=dtype,
            request_timeout=self._streamed and self._streamed.timeout_s,
            max_retries=MAX_RETRIES,
            generation_validation_retries=MAX_RETRIES,
        )
        self.sequences = sequences
        self.stop = max_len + 1  # speculators' shift_batch drops the first token
        self.data = Rows(sequences, self.stop)
        self.approx_lengths: list[int] = list(sequences["seq_len"])
        self.unavailable = torch.zeros(len(sequences), dtype=torch.bool).share_memory_()
        """which sequences got no states from the server when last asked, by whatever process"""

    def _setup_client(self) -> None:
        """The parent's with our key, past any proxy; worker processes share the servers out."""
        assert self._streamed
        worker = get_worker_info()
        urls = self._streamed.base_urls
        self.model = self._streamed.model
        self.client = openai.OpenAI(
            base_url=urls[worker.id % len(urls) if worker else 0],
            api_key=api_key(),
            max_retries=0,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch, for torch's DataLoader."""
        if not self._streamed:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(len(indices)) as threads:
            return list(threads.map(self.__getitem__, indices))

    def _get_raw_data(self, index: int) -> Any:
        """What the parent returns.

        Raises:
            DataError: the shard holds other tokens.
            ServerError: the server gives no states for one sequence after the other.
        """
        if isinstance(self.transfer, ShardTransfer):
            return self._from_shard(self.transfer, index)
        found = super()._get_raw_data(index)
        unavailable = isinstance(found, SampleUnavailable)
        self.unavailable[index] = unavailable
        if unavailable and found.fatal:
            raise ServerError(
                f"{found.consecutive_failures} sequences in a row got no hidden states, the last "
                f"one {self.sequences[index]['sample_id']}: {found.reason[-200:]}"
            )
        return found

    def _from_shard(self, transfer: ShardTransfer, index: int) -> dict[str, torch.Tensor]:
        row = self.data[index]
        token_ids, aux, last = transfer.states(index, self.stop)  # [T], [T, 3, H], [T_s, H]
        if not torch.equal(token_ids, row["input_ids"]):
            raise DataError(
                f"the states of {transfer.key(index)} are those of other tokens; "
                "`make verify-states` finds the shard"
            )
        return {
            "hidden_states": aux.flatten(1),  # [T, 3H]
            "input_ids": token_ids,
            "verifier_last_hidden_states": padded_last(aux, last),  # [T, H]
            "loss_mask": row["loss_mask"],
        }
