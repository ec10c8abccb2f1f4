"""Stage 6, train: an EAGLE-3 draft that predicts the verifier's next tokens.

    python -m pipeline.train

reads   data/sequences (train, held_out, d2t.npy, t2d.npy), data/hidden_states, data/verifier.json
writes  models/draft (`vllm serve` takes it as it is), reports/train.json, reports/train_curve.csv
params  train.*, extract.layer_ids, extract.mode, verifier.dtype, verifier.trust_remote_code

The training is speculators' own: its draft, trainer, packing, losses and optimizers (Muon for the
matrices, AdamW for the rest). Every draft token after the first is trained on the draft's own
hidden states (training-time test), as it will be drawn when served.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import speculators.train.trainer
import torch
from loguru import logger as loguru_logger
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import set_seed
from speculators.train.data import CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from pipeline.devices import losses, num_loader_workers, training_device
from pipeline.draft import check_layer_ids, load_vocabulary, new_draft, save_draft
from pipeline.errors import BadRun, DataError
from pipeline.loading import Fate, StatesDataset
from pipeline.params import Params, Train, load_params
from pipeline.progress import Bar, progress_bar
from pipeline.records import DRAFT, SEQUENCES, Split
from pipeline.resume import write_bytes, write_json
from pipeline.sequences import load_split
from pipeline.shards import HiddenStates
from pipeline.stage import LOGS, run_stage
from pipeline.streaming import StreamedStates, open_states
from pipeline.verifier import VerifierIdentity, load_verifier
from pipeline.vocabulary import vocabulary_sha256

METRICS_PATH = Path("reports/train.json")
CURVE = Path("reports/train_curve.csv")
CURVE_POINTS = 200
TTT_STEP_LOSS_DECAY = 1.0  # every draft token counts the same


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
    ) -> None:
        rows = load_split(folder)
        layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
        with_states = states.of(rows, layer_ids, verifier.weights_fingerprint)
        max_len = params.train.max_tokens_per_batch
        supervised = np.array([sum(mask[: max_len + 1]) for mask in with_states["loss_mask"]])
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


def make_loader(dataset: SequenceDataset, hidden_size: int, device: torch.device, seed: int) -> Any:
    """Whole sequences packed into batches of dataset.max_len tokens, as speculators packs them."""
    num_workers = num_loader_workers(device)
    return DataLoader(
        dataset,
        batch_sampler=MultipackDistributedBatchSamplerV2(
            batch_max_length=dataset.max_len,
            lengths=dataset.approx_lengths,
            num_replicas=1,
            rank=0,
            seed=seed,
        ),
        collate_fn=CollateFn(
            dataset.max_len, hidden_size, dtype=dataset.hidden_states_dtype, preprocess=shift_batch
        ),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        multiprocessing_context="spawn" if num_workers else None,
        pin_memory=device.type != "cpu",
    )


class DraftTrainer(Trainer):
    """speculators' trainer on any device, for a number of steps instead of epochs.

    Its own `run_training` is left alone: it validates and saves once more for every epoch that is
    left after the last step, writes optimizer states that nobody reads, and takes SIGTERM for a
    wish to finish.
    """

    def __init__(self, device: torch.device, *args: Any, **kwargs: Any) -> None:
        self._device = device
        super().__init__(*args, **kwargs)

    def setup_trainer(self) -> None:
        super().setup_trainer()
        self.local_rank, self.device_type = self._device, self._device.type

    def run(self, num_steps: int, after_step: Callable[[], None]) -> dict[str, float]:
        """Train and validate once. Returns speculators' means over the held-out batches."""
        epoch = 0
        while self.global_step < num_steps:
            self.train_epoch(epoch, step_callback=after_step)
            epoch += 1
        return self.val_epoch(epoch)


class Curve(logging.Handler):
    """Keeps what speculators logs about its steps: [(step, metrics)]."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.points: list[tuple[int, dict[str, float]]] = []
        self.tokens_per_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.points.append((record.msg["global_step"] + 1, record.msg["train"]))
            self.tokens_per_s = record.msg["profile"]["tokens_per_s"]

    def after_step(self, bar: Bar) -> None:
        """Raises BadRun when the loss is no number any more."""
        step, metrics = self.points[-1]
        if not math.isfinite(metrics["loss"]):
            raise BadRun(
                f"the loss is {metrics['loss']} at step {step}: lower train.learning_rate and "
                "train.muon_learning_rate, or set train.dtype: float32"
            )
        bar.advance(note=f"loss {metrics['loss']:.3f}, {self.tokens_per_s:,.0f} tokens/s")

    def csv(self, ttt_steps: int) -> bytes:
        header = ["step", "loss", *(f"accuracy_{k + 1}" for k in range(ttt_steps))]
        lines = [",".join(header)]
        for step, metrics in self.points:
            values = [metrics["loss"], *(metrics[f"full_acc_{k}"] for k in range(ttt_steps))]
            lines.append(",".join([str(step), *(f"{value:.4f}" for value in values)]))
        return ("\n".join(lines) + "\n").encode()


def trainer_config(train: Train, draft: Eagle3DraftModel, device: torch.device) -> TrainerConfig:
    train_kwargs, val_kwargs = draft.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation=losses(device),
        ttt_steps=train.ttt_steps,
        ttt_step_loss_decay=TTT_STEP_LOSS_DECAY,
    )
    return TrainerConfig(
        lr=train.learning_rate,
        muon_lr=train.muon_learning_rate,
        optimizer="muon",
        scheduler_type="cosine",
        num_epochs=1,  # DraftTrainer counts steps
        max_steps=train.num_steps,
        save_path=str(DRAFT),  # looked for checkpoints to go on from: there are none
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        hidden_states_dtype=getattr(torch, train.dtype),
        log_freq=max(1, train.num_steps // CURVE_POINTS),
    )


def report(
    training: SequenceDataset,
    held_out: SequenceDataset,
    params: Train,
    validation: dict[str, float],
) -> dict[str, Any]:
    """reports/train.json. Accuracies are per draft position: `accuracy` of a position given that
    those before were right too, counted over all; `conditional_accuracy` over those."""
    positions = range(params.ttt_steps)
    return {
        **training.counts(),
        "steps": params.num_steps,
        "held_out": {
            **held_out.counts(),
            "loss": round(validation["loss_epoch"], 4),
            "accuracy": {
                str(k + 1): round(validation[f"full_acc_{k}_epoch"], 4) for k in positions
            },
            "conditional_accuracy": {
                str(k + 1): round(validation[f"cond_acc_{k}_epoch"], 4) for k in positions
            },
        },
    }


def provenance(training: SequenceDataset) -> dict[str, Any]:
    """What a checkpoint says of the data it comes from."""
    rows = training.sequences
    return {
        "ablation": sorted(set(rows["ablation"])),
        "rebuilt_sequences": sum(rows["rebuilt"]),
        "vocabulary_sha256": vocabulary_sha256(SEQUENCES),
    }


def log_to_file(path: Path) -> None:
    """What the libraries have to say goes to the log; the screen has one bar, ours."""
    path.parent.mkdir(exist_ok=True)
    logging.basicConfig(
        filename=path, level=logging.INFO, format="%(asctime)s %(name)s %(message)s", force=True
    )
    logging.captureWarnings(True)
    loguru_logger.remove()
    loguru_logger.add(path)
    transformers_logging.disable_progress_bar()
    speculators.train.trainer.tqdm = partial(speculators.train.trainer.tqdm, disable=True)


def main() -> None:
    params, verifier = load_params(), load_verifier()
    log_to_file(LOGS / "train.log")
    device = training_device()
    set_seed(params.train.seed)
    draft = new_draft(params, verifier, *load_vocabulary(SEQUENCES, verifier), device)
    curve = Curve()
    logging.getLogger("speculators.metrics").addHandler(curve)
    with open_states(params, verifier) as states:
        training = SequenceDataset(SEQUENCES / Split.TRAIN, states, params, verifier)
        held_out = SequenceDataset(SEQUENCES / Split.HELD_OUT, states, params, verifier)
        trainer = DraftTrainer(
            device,
            draft,
            trainer_config(params.train, draft, device),
            make_loader(training, verifier.hidden_size, device, params.train.seed),
            make_loader(held_out, verifier.hidden_size, device, 0),
        )
        with progress_bar("training", params.train.num_steps, "steps") as bar:
            validation = trainer.run(params.train.num_steps, lambda: curve.after_step(bar))
        training.check_fates()
        held_out.check_fates()
    save_draft(draft, DRAFT, getattr(torch, params.verifier.dtype), provenance(training))
    check_layer_ids(DRAFT, params.extract.layer_ids)
    write_bytes(CURVE, curve.csv(params.train.ttt_steps))
    metrics = report(training, held_out, params.train, validation)
    write_json(METRICS_PATH, metrics)
    cut = metrics["sequences_cut"]
    print(
        f"{DRAFT}: {params.train.num_steps} steps on {metrics['tokens']} tokens of "
        f"{metrics['sequences']} sequences, held-out accuracy {metrics['held_out']['accuracy']}"
        + (f"; {cut} were cut at train.max_tokens_per_batch" if cut else "")
    )


if __name__ == "__main__":
    run_stage("train", main)
