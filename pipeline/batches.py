"""What training reads: one split of data/sequences with its states, packed into batches.

    training = SequenceDataset(SEQUENCES / Split.TRAIN, states, params, verifier)
    loader = make_loader(training, hidden_size, device, seed, num_parts=1)

The packing is speculators' own.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn
from speculators.train.distributed import get_dp_rank
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader

from pipeline.devices import num_loader_workers
from pipeline.errors import DataError
from pipeline.loading import Fate, StatesDataset
from pipeline.params import Params
from pipeline.phases import REASONING, UNLEARNT, phase_ids
from pipeline.sequences import load_split
from pipeline.shards import HiddenStates
from pipeline.streaming import StreamedStates
from pipeline.verifier import VerifierIdentity


class SequenceDataset(StatesDataset):
    """One split of data/sequences with its states.

    Raises:
        DataError: there are no sequences, none has a supervised token that training sees, or the
            states are of others.
    """

    def __init__(
        self,
        folder: Path,
        states: HiddenStates | StreamedStates,
        params: Params,
        verifier: VerifierIdentity,
        reasoning_weight: float = 1.0,
    ) -> None:
        rows = load_split(folder)
        layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
        with_states = states.of(rows, layer_ids, verifier.weights_fingerprint)
        max_len = params.train.max_tokens_per_batch
        least = UNLEARNT if reasoning_weight else REASONING
        supervised = np.array(
            [
                int((phase_ids(torch.tensor(mask[: max_len + 1]), answer_start) > least).sum())
                for mask, answer_start in zip(
                    with_states["loss_mask"], with_states["answer_start"], strict=True
                )
            ]
        )
        sequences = with_states.select(np.flatnonzero(supervised))
        if not len(sequences):
            raise DataError(
                f"{folder}: no supervised token in {len(with_states)} sequences with states, cut "
                f"at train.max_tokens_per_batch {max_len}; reports/reassemble.json and "
                "reports/extract.json say where the rows went"
            )
        super().__init__(folder, sequences, states, max_len, getattr(torch, params.train.dtype))
        self._num_rows, self._num_with_states = len(rows), len(with_states)
        self._supervised = supervised[supervised > 0]
        self._reasoning_weight = reasoning_weight
        self._answer_starts: list[int] = list(sequences["answer_start"])

    def _get_raw_data(self, index: int) -> Any:
        """With the phases, and weights in place of a mask, which is what speculators' losses do
        with it: they multiply by it and divide by its sum."""
        found = super()._get_raw_data(index)
        if isinstance(found, SampleUnavailable):
            return found
        phases = phase_ids(found["loss_mask"], self._answer_starts[index])
        found["phase_ids"] = phases
        if self._reasoning_weight != 1:
            weights = found["loss_mask"].float()  # [T]; of the token behind each
            weights[phases == REASONING] *= self._reasoning_weight
            found["loss_mask"] = weights
        return found

    def prompts(self) -> set[bytes]:
        """What was asked, token for token."""
        rows = self.sequences.with_format("numpy", columns=["input_ids", "generated_start"])
        return {row["input_ids"][: row["generated_start"]].tobytes() for row in rows}

    def counts(self) -> dict[str, Any]:
        """rows_in = sequences + rejected; tokens are those that training sees."""
        available = self.fates.numpy() == Fate.THERE
        lengths = np.array(self.approx_lengths)[available]
        return {
            "rows_in": self._num_rows,
            "sequences": len(lengths),
            "rejected": {
                "no_states": self._num_rows - self._num_with_states + int((~available).sum()),
                "cut_before_answer": self._num_with_states - len(self.sequences),
            },
            "tokens": int(lengths.clip(max=self.stop).sum()),
            "supervised_tokens": int(self._supervised[available].sum()),
            "sequences_cut": int((lengths > self.stop).sum()),
        }


def check_split(training: SequenceDataset, held_out: SequenceDataset) -> None:
    """Raises DataError when a question is in both: the draft would be judged on what it learnt."""
    shared = training.prompts() & held_out.prompts()
    if shared:
        raise DataError(
            f"{len(shared)} questions are in {training.folder} and in {held_out.folder}; "
            "`dvc repro -f prompts` splits them anew"
        )


def make_loader(
    dataset: SequenceDataset, hidden_size: int, device: torch.device, seed: int, num_parts: int
) -> Any:
    """Whole sequences packed into batches of dataset.max_len tokens, as speculators packs them; of
    several parts, this process's. Raises DataError when there are fewer sequences than parts."""
    num_workers = num_loader_workers(device)
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=dataset.max_len,
        lengths=dataset.approx_lengths,
        num_replicas=num_parts,
        rank=get_dp_rank() % num_parts,
        seed=seed,
    )
    if not len(sampler):
        raise DataError(
            f"{dataset.folder}: {len(dataset)} sequences, fewer than train.num_processes, which is "
            f"{num_parts}"
        )
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=CollateFn(
            dataset.max_len, hidden_size, dtype=dataset.hidden_states_dtype, preprocess=shift
        ),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        multiprocessing_context="spawn" if num_workers else None,
        pin_memory=device.type != "cpu",
    )


def shift(sample: dict[str, Any]) -> dict[str, Any]:
    """As speculators lays tokens beside states, with the phases; the empty sample that it puts in
    place of a batch without any has none."""
    phases = sample.get("phase_ids", sample["loss_mask"])
    return {**shift_batch(sample), "phase_ids": phases[1:]}
