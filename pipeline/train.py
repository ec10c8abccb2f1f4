"""Stage 6, train: an EAGLE-3 draft that predicts the verifier's next tokens.

    python -m pipeline.train

reads   data/sequences (train, held_out, d2t.npy, t2d.npy), data/hidden_states, data/verifier.json
writes  models/draft (`vllm serve` takes it as it is), reports/train.json,
        reports/{train,held_out}_curve.csv
params  train.*, generate.thinking, extract.layer_ids, extract.mode, verifier.dtype,
        verifier.trust_remote_code

The training is speculators' own: its draft, trainer, packing, losses and optimizers (Muon for the
matrices, AdamW for the rest). Every draft token after the first is trained on the draft's own
hidden states (training-time test), as it will be drawn when served.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import speculators.train.trainer
import torch
from loguru import logger as loguru_logger
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.cli import set_seed
from speculators.train.data import CollateFn
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.recovery import SampleUnavailable
from speculators.train.trainer import TrainerConfig
from torch.utils.data import DataLoader
from transformers.utils import logging as transformers_logging

from pipeline.devices import losses, num_loader_workers, training_device
from pipeline.draft import check_layer_ids, load_vocabulary, new_draft, save_draft
from pipeline.errors import BadRun, DataError
from pipeline.loading import Fate, StatesDataset
from pipeline.manifest import MANIFEST, PLAN
from pipeline.params import Params, Train, load_params
from pipeline.progress import Bar, progress_bar
from pipeline.records import DRAFT, HIDDEN_STATES, SEQUENCES, Split
from pipeline.resume import content_key, file_sha256, one_writer, write_bytes, write_json
from pipeline.sequences import load_split
from pipeline.shards import HiddenStates
from pipeline.stage import LOGS, run_stage
from pipeline.streaming import StreamedStates, open_states
from pipeline.trainer import Checkpoints, DraftTrainer
from pipeline.verifier import VerifierIdentity, load_verifier
from pipeline.vocabulary import vocabulary_sha256

METRICS_PATH = Path("reports/train.json")
CURVE, HELD_OUT_CURVE = Path("reports/train_curve.csv"), Path("reports/held_out_curve.csv")
IN_PROGRESS = DRAFT.with_name(".draft-in-progress")
PACKAGE, DATA = Path(__file__).parent, {".arrow", ".npy"}
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
        reasoning_weight: float = 1.0,
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
        self._reasoning_weight = reasoning_weight
        self._answer_starts: list[int] = list(sequences["answer_start"])

    def _get_raw_data(self, index: int) -> Any:
        """With weights in place of a mask, which is what speculators' losses do with it: they
        multiply by it and divide by its sum."""
        found = super()._get_raw_data(index)
        if self._reasoning_weight != 1 and not isinstance(found, SampleUnavailable):
            weights = found["loss_mask"].float()  # [T]; of the token behind each
            weights[: max(self._answer_starts[index] - 1, 0)] *= self._reasoning_weight
            found["loss_mask"] = weights
        return found

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


class Curve(logging.Handler):
    """Hears what speculators logs about its steps, and adds it to `points`."""

    def __init__(self, points: list[dict[str, float]]) -> None:
        super().__init__(logging.INFO)
        self.points = points
        self.tokens_per_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            self.points.append({"step": record.msg["global_step"] + 1, **record.msg["train"]})
            self.tokens_per_s = record.msg["profile"]["tokens_per_s"]

    def after_step(self, bar: Bar) -> None:
        """Raises BadRun when the loss is no number any more."""
        last = self.points[-1]
        if not math.isfinite(last["loss"]):
            raise BadRun(
                f"the loss is {last['loss']} at step {last['step']}: lower train.learning_rate "
                "and train.muon_learning_rate, or set train.dtype: float32"
            )
        bar.advance(note=f"loss {last['loss']:.3f}, {self.tokens_per_s:,.0f} tokens/s")


@contextmanager
def hearing(curve: Curve) -> Iterator[None]:
    metrics = logging.getLogger("speculators.metrics")
    metrics.addHandler(curve)
    try:
        yield
    finally:
        metrics.removeHandler(curve)


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
        save_path=str(IN_PROGRESS),  # where it looks for checkpoints of its own: there are none
        train_call_kwargs=train_kwargs,
        val_call_kwargs=val_kwargs,
        hidden_states_dtype=getattr(torch, train.dtype),
        log_freq=max(1, train.num_steps // CURVE_POINTS),
    )


def curve_csv(points: list[dict[str, float]], train: Train, suffix: str = "") -> bytes:
    """What DVC plots: a row for each step that speculators measured, with its names for them."""
    accuracy = {f"full_acc_{k}{suffix}": f"accuracy_{k + 1}" for k in range(train.ttt_steps)}
    names = {"step": "step", f"loss{suffix}": "loss", **accuracy}
    table = pd.DataFrame(points)[[*names]].rename(columns=names)
    return table.to_csv(index=False, float_format="%.4f", lineterminator="\n").encode()


def report(
    training: SequenceDataset, held_out: SequenceDataset, params: Train, trainer: DraftTrainer
) -> dict[str, Any]:
    """reports/train.json, `held_out` for the best step. Accuracies are per draft position:
    `accuracy` of a position given that those before were right too, counted over all;
    `conditional_accuracy` over those."""
    best = next(point for point in trainer.held_out if point["step"] == trainer.best_step)
    positions = range(params.ttt_steps)
    return {
        **training.counts(),
        "steps": params.num_steps,
        "best_step": trainer.best_step,
        "held_out": {
            **held_out.counts(),
            "loss": round(best["loss_epoch"], 4),
            "expected_acceptance_length": round(best["acceptance"], 4),
            "accuracy": {str(k + 1): round(best[f"full_acc_{k}_epoch"], 4) for k in positions},
            "conditional_accuracy": {
                str(k + 1): round(best[f"cond_acc_{k}_epoch"], 4) for k in positions
            },
        },
    }


def inputs(params: Params, verifier: VerifierIdentity) -> dict[str, Any]:
    """All that decides what the draft becomes: the key of a run, and what a checkpoint says of it.

    The states are known by their manifest or plan, which has the checksum of each shard, the code
    by what lies beside this file.
    """
    states = HIDDEN_STATES / (MANIFEST if params.extract.mode == "stored" else PLAN)
    files = [states, *sorted(path for path in SEQUENCES.rglob("*.*") if path.suffix in DATA)]
    code = [path.read_text(encoding="utf-8") for path in sorted(PACKAGE.glob("*.py"))]
    return {
        "data_sha256": {path.as_posix(): file_sha256(path) for path in files if path.exists()},
        "params": {
            "train": params.train.model_dump(),
            "layer_ids": params.extract.layer_ids,
            "verifier_dtype": params.verifier.dtype,
        },
        "weights_fingerprint": verifier.weights_fingerprint,
        "vocabulary_sha256": vocabulary_sha256(SEQUENCES),
        "thinking": params.generate.thinking,
        "code_sha256": content_key(code),
        "libraries": {name: version(name) for name in ("torch", "transformers", "speculators")},
    }


def provenance(training: SequenceDataset, made_from: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of the data it comes from."""
    rows = training.sequences
    return {
        "ablation": sorted(set(rows["ablation"])),
        "rebuilt_sequences": sum(rows["rebuilt"]),
        **made_from,
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
    made_from = inputs(params, verifier)
    checkpoints = Checkpoints(IN_PROGRESS / content_key(made_from))
    draft = new_draft(params, verifier, *load_vocabulary(SEQUENCES, verifier), device)
    with one_writer(IN_PROGRESS), open_states(params, verifier) as states:
        weight = params.train.reasoning_weight
        training = SequenceDataset(SEQUENCES / Split.TRAIN, states, params, verifier, weight)
        held_out = SequenceDataset(SEQUENCES / Split.HELD_OUT, states, params, verifier)
        trainer = DraftTrainer(
            device,
            checkpoints,
            params.train.checkpoint_steps,
            draft,
            trainer_config(params.train, draft, device),
            make_loader(training, verifier.hidden_size, device, params.train.seed),
            make_loader(held_out, verifier.hidden_size, device, 0),
        )

        def check_fates() -> None:
            """Before a checkpoint keeps what was learnt without the sequences that failed."""
            training.check_fates()
            held_out.check_fates()

        with progress_bar("training", params.train.num_steps, "steps") as bar:
            bar.advance(trainer.go_on())
            curve = Curve(trainer.train_curve)
            with hearing(curve):
                trainer.run(lambda: curve.after_step(bar), check_fates)
        made_from = provenance(training, made_from)
        save_draft(draft, DRAFT, getattr(torch, params.verifier.dtype), made_from)
        check_layer_ids(DRAFT, params.extract.layer_ids)
        checkpoints.remove()
    write_bytes(CURVE, curve_csv(trainer.train_curve, params.train))
    write_bytes(HELD_OUT_CURVE, curve_csv(trainer.held_out, params.train, "_epoch"))
    metrics = report(training, held_out, params.train, trainer)
    write_json(METRICS_PATH, metrics)
    cut = metrics["sequences_cut"]
    print(
        f"{DRAFT}: the best was step {trainer.best_step} of {params.train.num_steps}, on "
        f"{metrics['tokens']} tokens of {metrics['sequences']} sequences; held-out accuracy "
        f"{metrics['held_out']['accuracy']}"
        + (f"; {cut} were cut at train.max_tokens_per_batch" if cut else "")
    )


if __name__ == "__main__":
    run_stage("train", main)
