"""What a step of training reads: sequences and their states, as speculators' ArrowDataset gives
them, without the copies that it makes on the way.

Where it goes through `datasets` and a tensor of all four layers, a sample here is views of two
mapped files, the sequences' and a shard, until it is copied into its batch. With
extract.mode streamed it is what a server answers: all sequences of a batch are asked at once.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import Any

import openai
import torch
from datasets import Dataset
from speculators.data_generation.offline import check_hidden_states
from speculators.data_generation.vllm_client import InvalidResponseError, generate_hidden_states
from speculators.train.data import ArrowDataset
from speculators.train.recovery import SampleUnavailable

from pipeline.errors import DataError, ServerError
from pipeline.server import api_key
from pipeline.shards import HiddenStates, ShardTransfer, padded_last
from pipeline.staging import MAX_FAILED_FRACTION, Rejected
from pipeline.streaming import StreamedStates

COLUMNS = ["input_ids", "loss_mask"]
MAX_IN_A_ROW = 20  # sequences without states: then it is the server
LOGGER = logging.getLogger(__name__)


class Fate(IntEnum):
    """What became of a sequence when the server was last asked for its states."""

    THERE = 0
    WRONG = 1  # refused, or states of other tokens, another shape or not finite
    FAILED = 2  # no answer


HOPELESS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)


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
        self.folder = folder
        self._streamed = states if isinstance(states, StreamedStates) else None
        super().__init__(
            max_len=max_len,
            datapath=folder,
            transfer=states.transfer(list(sequences["key"])),
            hidden_states_dtype=dtype,
        )
        self.sequences = sequences
        self.stop = max_len + 1  # speculators' shift_batch drops the first token
        self.data = Rows(sequences, self.stop)
        self.approx_lengths: list[int] = list(sequences["seq_len"])
        self.fates = torch.zeros(len(sequences), dtype=torch.int8).share_memory_()
        """a Fate of each sequence, whatever process asked"""
        self._clients: dict[str, openai.OpenAI] = {}
        self._in_a_row = 0

    def check_fates(self) -> None:
        """Raises ServerError when the server failed too many, or nothing is there."""
        failed, there = ((self.fates == fate).sum().item() for fate in (Fate.FAILED, Fate.THERE))
        if failed > MAX_FAILED_FRACTION * len(self) or not there:
            raise ServerError(
                f"{len(self) - there} of {len(self)} sequences of {self.folder} got no hidden "
                f"states when last asked, {failed} of them no answer: see logs"
            )

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """A batch, for torch's DataLoader."""
        if not self._streamed:
            return [self[index] for index in indices]
        with ThreadPoolExecutor(len(indices)) as threads:
            return list(threads.map(self.__getitem__, indices))

    def _get_raw_data(self, index: int) -> dict[str, torch.Tensor] | SampleUnavailable:
        """What the parent returns.

        Raises:
            DataError: the shard holds other tokens.
            ServerError: the server gives no states for one sequence after the other.
        """
        if isinstance(self.transfer, ShardTransfer):
            return self._from_shard(self.transfer, index)
        row = self.data[index]
        found = self._from_server(index, row["input_ids"].tolist())
        if found is None:
            return SampleUnavailable()
        states = found["hidden_states"]  # [T, 4, H]
        return {
            "hidden_states": states[:, :-1].flatten(1),  # [T, 3H]
            "input_ids": found["token_ids"],
            "verifier_last_hidden_states": states[:, -1],  # [T, H]
            "loss_mask": row["loss_mask"],
        }

    def _from_server(self, index: int, input_ids: list[int]) -> dict[str, torch.Tensor] | None:
        """By speculators' request and checks; once more, or once of each further server, what went
        wrong."""
        assert self._streamed
        urls = self._streamed.base_urls
        for attempt in range(max(2, len(urls))):
            try:
                payload = self._ask(urls[(index + attempt) % len(urls)], input_ids)
            except HOPELESS as error:
                raise ServerError(f"{error} (OPENAI_API_KEY? another model?)") from error
            except (openai.BadRequestError, InvalidResponseError, Rejected, ValueError) as error:
                fate, why = Fate.WRONG, _said(error)
            except (openai.OpenAIError, TimeoutError) as error:
                fate, why = Fate.FAILED, _said(error)
                if isinstance(error, openai.APITimeoutError | TimeoutError):
                    break  # a second try would take as long again
            else:
                self.fates[index], self._in_a_row = Fate.THERE, 0
                return payload
        self.fates[index] = fate
        self._in_a_row += 1
        name = self.sequences[index]["sample_id"]
        LOGGER.warning("no hidden states of %s: %s", name, why)
        if self._in_a_row >= MAX_IN_A_ROW:
            raise ServerError(
                f"{self._in_a_row} sequences in a row got no hidden states, the last one {name}: "
                f"{why}"
            )
        return None

    def _ask(self, url: str, input_ids: list[int]) -> dict[str, torch.Tensor]:
        assert self._streamed
        if url not in self._clients:
            self._clients[url] = openai.OpenAI(
                base_url=url,
                api_key=api_key(),
                max_retries=0,
                http_client=openai.DefaultHttpxClient(trust_env=False),
            )
        _, handle = generate_hidden_states(
            self._clients[url],
            self._streamed.model,
            {"input_ids": input_ids},
            timeout=self._streamed.timeout_s,
            max_retries=0,
        )
        payload: dict[str, torch.Tensor] = self.transfer.get_generated(handle)
        check_hidden_states(payload, input_ids)
        return payload

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


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
