"""Hidden states on disk: few large safetensors files, memory-mapped when read.

A shard is token-major, its sequences one after the other (T, T_s: sums over its sequences):

    aux_hidden_states  [T, 3, H]   what the draft sees, for every token
    last_hidden_state  [T_s, H]    before the final norm, for the tokens whose next-token
                                   distribution training reads: a suffix of each sequence
    token_ids          [T]         int64
    offsets            [N + 1]     rows of sequence i in the first: offsets[i] … offsets[i + 1]
    last_offsets       [N + 1]     the same for last_hidden_state
    aux_scales         [T, 3]      with float8_e4m3 alone, as last_scales: see pipeline.float8
    last_scales        [T_s]

docs/hidden_states.md tells why it is so and what a shard costs.
"""

import argparse
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeline.errors import DataError
from pipeline.float8 import CODES, SCALES, decode, encode
from pipeline.manifest import (
    HEADER_KEY,
    ShardEntry,
    StatesRejection,
    load_manifest,
    with_states,
)
from pipeline.resume import atomic_path

TENSORS = ("aux_hidden_states", "last_hidden_state", "token_ids", "offsets", "last_offsets")
STORED_AS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": CODES,
}


class States(NamedTuple):
    """Hidden states of one sequence of T tokens, or of T tokens of it: views of a mapped file, but
    where float8 is stored, which is read as bfloat16."""

    token_ids: torch.Tensor  # [T]
    aux: torch.Tensor  # [T, 3, H]
    last: torch.Tensor  # [T_s, H], of the last T_s tokens


class ShardWriter:
    """Takes the sequences of one shard in any order and writes them in the entry's order.

    The shard is in memory until then: bytes = tokens × 4 layers × hidden size × bytes of a value.
    """

    def __init__(self, path: Path, entry: ShardEntry, hidden_size: int) -> None:
        self.path = path
        self._records = list(entry.sequences)
        self._entry = entry
        self._missing = set(range(len(self._records)))  # put() may run in several threads
        self._rows = _offsets([record.num_tokens for record in self._records])
        self._last_rows = _offsets([record.num_last_states for record in self._records])
        self.num_layers, self.hidden_size = len(entry.layer_ids), hidden_size
        self.dtype = STORED_AS[entry.dtype]
        total, total_last = int(self._rows[-1]), int(self._last_rows[-1])
        shape = (total, self.num_layers - 1, hidden_size)
        self._aux = torch.empty(shape, dtype=self.dtype)  # [T, 3, H]
        self._last = torch.empty(total_last, hidden_size, dtype=self.dtype)  # [T_s, H]
        self._token_ids = torch.empty(total, dtype=torch.long)  # [T]
        if self.dtype is CODES:
            self._aux_scales = torch.empty(shape[:2], dtype=SCALES)  # [T, 3]
            self._last_scales = torch.empty(total_last, dtype=SCALES)  # [T_s]

    @property
    def complete(self) -> bool:
        return not self._missing

    def put(self, index: int, states: States) -> None:
        """States of the entry's sequence `index`; further last states in front are left out."""
        rows = slice(self._rows[index], self._rows[index + 1])
        last_rows = slice(self._last_rows[index], self._last_rows[index + 1])
        num_last = self._records[index].num_last_states
        assert len(states.last) >= num_last
        last = states.last[len(states.last) - num_last :]
        if self.dtype is CODES:
            self._aux[rows], self._aux_scales[rows] = encode(states.aux)
            self._last[last_rows], self._last_scales[last_rows] = encode(last)
        else:
            self._aux[rows], self._last[last_rows] = states.aux, last
        self._token_ids[rows] = states.token_ids
        self._missing.discard(index)

    def reject(self, index: int, reason: StatesRejection) -> None:
        self._records[index] = self._records[index].model_copy(update={"rejected": reason})
        self._missing.discard(index)

    def write(self) -> ShardEntry:
        """Raises OSError when the disk is full: the old shard, if there was one, stays then."""
        assert self.complete
        entry = self._entry.model_copy(update={"sequences": self._records})
        kept = torch.tensor([record.rejected is None for record in self._records], dtype=torch.bool)
        lengths, last_lengths = self._rows.diff(), self._last_rows.diff()
        by_token = {"aux_hidden_states": self._aux, "token_ids": self._token_ids}
        by_last = {"last_hidden_state": self._last}
        if self.dtype is CODES:
            by_token["aux_scales"], by_last["last_scales"] = self._aux_scales, self._last_scales
        if not bool(kept.all()):
            rows, last_rows = kept.repeat_interleave(lengths), kept.repeat_interleave(last_lengths)
            by_token = {name: tensor[rows] for name, tensor in by_token.items()}
            by_last = {name: tensor[last_rows] for name, tensor in by_last.items()}
        tensors = {
            **by_token,
            **by_last,
            "offsets": _offsets(lengths[kept].tolist()),
            "last_offsets": _offsets(last_lengths[kept].tolist()),
        }
        with atomic_path(self.path) as temp:
            try:
                save_file(tensors, temp, metadata={HEADER_KEY: entry.model_dump_json()})
            except SafetensorError as error:
                raise _os_error(error, temp) from error
            temp.chmod(0o644)  # safetensors makes files for the owner alone
        return entry


class Shard:
    """One shard, mapped into memory: opening it reads the header and the offsets alone."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self._aux = tensors["aux_hidden_states"]  # [T, 3, H]
        self._last = tensors["last_hidden_state"]  # [T_s, H]
        self._token_ids = tensors["token_ids"]  # [T]
        self._aux_scales = tensors.get("aux_scales")  # [T, 3]
        self._last_scales = tensors.get("last_scales")  # [T_s]
        self._offsets: list[int] = tensors["offsets"].tolist()
        self._last_offsets: list[int] = tensors["last_offsets"].tolist()

    def read(self, row: int, start: int = 0, stop: int | None = None) -> States:
        """States of the `row`-th stored sequence, or of its tokens start … stop - 1."""
        first, end = self._offsets[row], self._offsets[row + 1]
        first_last, end_last = self._last_offsets[row], self._last_offsets[row + 1]
        start, stop, _ = slice(start, stop).indices(end - first)
        without_last = (end - first) - (end_last - first_last)  # tokens in front
        rows = slice(first + start, first + stop)
        last_rows = slice(
            first_last + max(start - without_last, 0), first_last + max(stop - without_last, 0)
        )
        aux, last = self._aux[rows], self._last[last_rows]
        if self._aux_scales is not None and self._last_scales is not None:
            aux = decode(aux, self._aux_scales[rows])
            last = decode(last, self._last_scales[last_rows])
        return States(self._token_ids[rows], aux, last)


class HiddenStates:
    """All of data/hidden_states, by trace key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._shards = {shard.file: shard for shard in load_manifest(folder).shards}
        self._places: dict[str, tuple[str, int]] = {}  # key: (file, row)
        self._open: dict[str, Shard] = {}
        for shard in self._shards.values():
            for row, record in enumerate(shard.stored()):
                self._places[record.key] = (shard.file, row)

    def of(self, sequences: Dataset, layer_ids: list[int], fingerprint: str) -> Dataset:
        """The sequences that have states here. Raises DataError as `with_states` does."""
        return with_states(sequences, self._shards, layer_ids, fingerprint, self.folder)

    def transfer(self, keys: list[str]) -> "ShardTransfer":
        """How speculators' datasets read rows with these keys."""
        return ShardTransfer(self, keys)

    def __contains__(self, key: str) -> bool:
        """False for a sequence that extract rejected."""
        return key in self._places

    def read(self, key: str, start: int = 0, stop: int | None = None) -> States:
        """States of the sequence with this key, or of its tokens start … stop - 1.

        Raises:
            DataError: its shard is damaged or not there.
        """
        file, row = self._places[key]
        if file not in self._open:
            try:
                self._open[file] = Shard(self.folder / file)
            except (SafetensorError, OSError) as error:
                raise DataError(
                    f"{self.folder / file} cannot be opened ({error}); `make verify-states`, then "
                    "`dvc repro`"
                ) from error
        return self._open[file].read(row, start, stop)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # a worker process maps the files itself


class ShardTransfer(HiddenStatesTransfer):
    """Row numbers of a `datasets` folder → what speculators' ArrowDataset wants of each."""

    def __init__(self, states: HiddenStates, keys: list[str]) -> None:
        self._states, self._keys = states, keys

    def key(self, file_idx: int) -> str:
        return self._keys[file_idx]

    def states(self, file_idx: int, stop: int | None = None) -> States:
        """The first `stop` tokens, without the copy that get_cached makes."""
        return self._states.read(self._keys[file_idx], stop=stop)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | None:
        if self._keys[file_idx] not in self._states:
            return None
        token_ids, aux, last = self.states(file_idx)
        full = aux.new_empty(aux.shape[0], aux.shape[1] + 1, aux.shape[2])  # [T, 4, H]
        full[:, :-1] = aux
        full[:, -1] = padded_last(aux, last)
        return {"hidden_states": full, "token_ids": token_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> None:
        raise NotImplementedError("states are made by the extract stage")


@HiddenStatesBackend.register("shards")
class ShardBackend(HiddenStatesBackend):
    """`speculators train --hidden-states-backend shards`, where this module has been imported."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--hidden-states-path", type=str, default="data/hidden_states")

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--hidden-states-path", type=str, required=True)

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ShardTransfer:
        keys = Dataset.load_from_disk(data_path)["key"]
        return ShardTransfer(HiddenStates(Path(args.hidden_states_path)), list(keys))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """vLLM stages one file a request there; the extract stage packs them."""
        return {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": args.hidden_states_path},
        }


def padded_last(aux: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[T, H] with zeros where no last state is stored: the loss mask is zero there too."""
    padded = last.new_zeros(aux.shape[0], aux.shape[2])
    padded[aux.shape[0] - last.shape[0] :] = last
    return padded


def _os_error(error: SafetensorError, path: Path) -> Exception:
    """What the system said; safetensors has its number in the text alone."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    if number is None:
        return error
    code = int(number[1])
    return OSError(code, os.strerror(code), str(path))


def _offsets(lengths: list[int]) -> torch.Tensor:
    """[2, 3] → [0, 2, 5], int64."""
    return torch.tensor([0, *lengths], dtype=torch.long).cumsum(0)
