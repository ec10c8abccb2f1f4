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

With train.num_processes above 1 the stage becomes torchrun, which runs this module once for each
GPU: the draft is sharded over them (FSDP), and the first of them writes.
"""

import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import speculators.train.trainer
import torch
import yaml
from loguru import logger as loguru_logger
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.cli import set_seed
from speculators.train.distributed import (
    get_dp_size,
    get_rank,
    maybe_destroy_distributed,
    maybe_setup_distributed,
)
from speculators.train.logger import TensorBoardHandler
from speculators.train.trainer import TrainerConfig
from transformers.utils import logging as transformers_logging

from pipeline.batches import SequenceDataset, check_split, make_loader
from pipeline.devices import losses, training_device
from pipeline.draft import (
    WEIGHTS,
    load_vocabulary,
    new_draft,
    save_draft,
    trained_draft,
)
from pipeline.errors import ParamsError
from pipeline.manifest import MANIFEST, PLAN
from pipeline.params import Params, Train, load_params
from pipeline.phases import PHASES, PhaseMetrics
from pipeline.progress import Bar, progress_bar
from pipeline.records import DRAFT, HIDDEN_STATES, SEQUENCES, Split
from pipeline.resume import content_key, file_sha256, one_writer, write_bytes, write_json
from pipeline.sequences import load_split
from pipeline.stage import LOGS, run_stage
from pipeline.streaming import open_states
from pipeline.trainer import Checkpoints, DraftTrainer, check_finite
from pipeline.verifier import VerifierIdentity, load_verifier
from pipeline.vocabulary import coverage, vocabulary_sha256

METRICS_PATH = Path("reports/train.json")
CURVE, HELD_OUT_CURVE = Path("reports/train_curve.csv"), Path("reports/held_out_curve.csv")
IN_PROGRESS = DRAFT.with_name(".draft-in-progress")
ROOT, DATA = Path(__file__).resolve().parent.parent, {".arrow", ".npy"}
CURVE_POINTS = 200


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
        """Raises BadRun when the loss of a step that was measured is no number."""
        last = self.points[-1]
        check_finite(last["loss"], int(last["step"]))
        bar.advance(note=f"loss {last['loss']:.3f}, {self.tokens_per_s:,.0f} tokens/s")


@contextmanager
def hearing(*handlers: logging.Handler) -> Iterator[None]:
    """Have them hear speculators' metrics."""
    metrics = logging.getLogger("speculators.metrics")
    for handler in handlers:
        metrics.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            metrics.removeHandler(handler)
            handler.close()


def trainer_config(
    train: Train, draft: Eagle3DraftModel, phases: PhaseMetrics, device: torch.device
) -> TrainerConfig:
    train_kwargs, val_kwargs = draft.get_trainer_kwargs(
        loss_fn="kl_div",
        loss_implementation=losses(device),
        ttt_steps=train.ttt_steps,
        ttt_step_loss_decay=train.ttt_step_loss_decay,
    )
    for kwargs in (train_kwargs, val_kwargs):
        [(name, (loss, weight))] = kwargs["loss_config"].items()
        kwargs["loss_config"] = {name: (phases.hearing(loss), weight)}
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
        fsdp_shard=train.num_processes > 1,
    )


def curve_csv(points: list[dict[str, float]], train: Train, suffix: str = "") -> bytes:
    """What DVC plots: a row for each point that speculators measured, and loss and accuracy of each
    draft position, of all tokens and of each phase. What was not measured is left blank."""
    measured = pd.DataFrame(points)
    table = measured[["step"]].assign(loss=measured[f"loss{suffix}"])
    for phase, column in (("all", ""), *((phase, f"{phase}_") for phase in PHASES)):
        for metric, name in (("loss", "loss"), ("acc", "accuracy")):
            for k in range(train.ttt_steps):
                values = measured[f"{phase}_{metric}_{k}{suffix}"]
                is_measured = measured[f"{phase}_{metric}_{k}_of{suffix}"] > 0
                table[f"{column}{name}_{k + 1}"] = values.where(is_measured)
    return table.to_csv(index=False, float_format="%.4f", lineterminator="\n").encode()


def report(
    training: SequenceDataset,
    held_out: SequenceDataset,
    params: Train,
    trainer: DraftTrainer,
    vocabulary: dict[str, Any],
) -> dict[str, Any]:
    """reports/train.json, `held_out` for the best step. `accuracy` of a draft position is how often
    all up to it are right (pipeline.phases); speculators' own is by its masks, and against what the
    verifier finds likeliest."""
    best = trainer.best

    def by_position(name: str) -> dict[str, float | None]:
        return {
            str(k + 1): round(best[f"{name}_{k}_epoch"], 4)
            if best.get(f"{name}_{k}_of_epoch", 1)
            else None
            for k in range(params.ttt_steps)
        }

    return {
        **training.counts(),
        "vocabulary": vocabulary,
        "steps": params.num_steps,
        "best_step": best["step"],
        "held_out": {
            **held_out.counts(),
            "loss": round(best["loss_epoch"], 4),
            "expected_acceptance_length": round(best["acceptance"], 4),
            "accuracy": by_position("all_acc"),
            "speculators_accuracy": by_position("full_acc"),
            "by_phase": {
                phase: {
                    "accuracy": by_position(f"{phase}_acc"),
                    "loss": by_position(f"{phase}_loss"),
                }
                for phase in PHASES
            },
        },
    }


def in_short(metrics: dict[str, Any]) -> str:
    cut = metrics["sequences_cut"]
    return (
        f"{DRAFT}: the best was step {metrics['best_step']} of {metrics['steps']}, on "
        f"{metrics['tokens']} tokens of {metrics['sequences']} sequences; held-out accuracy "
        f"{metrics['held_out']['accuracy']}"
        + (f"; {cut} were cut at train.max_tokens_per_batch" if cut else "")
    )


def inputs(params: Params, verifier: VerifierIdentity) -> dict[str, Any]:
    """All that decides what the draft becomes: the key of a run, and what a checkpoint says of it.

    The states are known by their manifest or plan, which has the checksum of each shard, the code
    is what dvc.yaml names for the stage.
    """
    states = HIDDEN_STATES / (MANIFEST if params.extract.mode == "stored" else PLAN)
    files = [states, *sorted(path for path in SEQUENCES.rglob("*.*") if path.suffix in DATA)]
    folder = params.train.init_from
    stage = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]["train"]
    code = [ROOT / dep for dep in stage["deps"] if dep.startswith("pipeline/")]
    return {
        "data_sha256": {path.as_posix(): file_sha256(path) for path in files if path.exists()},
        "init_from_sha256": [
            file_sha256(Path(folder, name)) for name in ("config.json", WEIGHTS) if folder
        ],
        "params": {
            "train": params.train.model_dump(exclude={"tensorboard"}),
            "layer_ids": params.extract.layer_ids,
            "verifier_dtype": params.verifier.dtype,
        },
        "weights_fingerprint": verifier.weights_fingerprint,
        "thinking": params.generate.thinking,
        "code_sha256": content_key([file_sha256(path) for path in code]),
        "libraries": {name: version(name) for name in ("torch", "transformers", "speculators")},
    }


def provenance(
    training: SequenceDataset, draft: Eagle3DraftModel, made_from: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint says of the data it comes from."""
    rows = training.sequences
    return {
        "vocabulary_sha256": vocabulary_sha256(draft.d2t.cpu().numpy()),
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


def torchrun_command(num_processes: int) -> list[str]:
    """This module in as many processes on this machine; the first one speaks."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(num_processes), "--local-ranks-filter", "0"),
        *("-m", "pipeline.train"),
    ]


def become_torchrun(num_processes: int) -> None:
    """Raises ParamsError when there are fewer GPUs."""
    if (found := torch.accelerator.device_count()) < num_processes:
        raise ParamsError(
            f"train.num_processes is {num_processes}, but this machine has {found} GPUs"
        )
    command = torchrun_command(num_processes)
    print(shlex.join(command), flush=True)
    os.execv(command[0], command)


def draft_to_train(
    params: Params, verifier: VerifierIdentity, device: torch.device
) -> Eagle3DraftModel:
    if params.train.init_from:
        return trained_draft(Path(params.train.init_from), params, verifier, device)
    return new_draft(params, verifier, *load_vocabulary(SEQUENCES, verifier), device)


def main() -> None:
    params, verifier = load_params(), load_verifier()
    if params.train.num_processes > 1 and "LOCAL_RANK" not in os.environ:
        become_torchrun(params.train.num_processes)
    maybe_setup_distributed()
    log_to_file(LOGS / "train.log")
    device = training_device()
    set_seed(params.train.seed)
    draft = draft_to_train(params, verifier, device)
    made_from = inputs(params, verifier)
    key, is_first = content_key(made_from), get_rank() == 0
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(one_writer(IN_PROGRESS))
        states = stack.enter_context(open_states(params, verifier))
        weight = params.train.reasoning_weight
        training = SequenceDataset(SEQUENCES / Split.TRAIN, states, params, verifier, weight)
        held_out = SequenceDataset(SEQUENCES / Split.HELD_OUT, states, params, verifier)
        check_split(training, held_out)
        checkpoints = Checkpoints(IN_PROGRESS / key)
        trainer = DraftTrainer(
            device,
            checkpoints,
            params.train.checkpoint_steps,
            draft,
            trainer_config(params.train, draft, PhaseMetrics(draft), device),
            make_loader(training, verifier.hidden_size, device, params.train.seed, get_dp_size()),
            # All of it in each process: what does not divide by their number would be left out.
            make_loader(held_out, verifier.hidden_size, device, 0, num_parts=1),
        )

        def check_fates() -> None:
            """Before a checkpoint keeps what was learnt without the sequences that failed."""
            training.check_fates()
            held_out.check_fates()

        bar = stack.enter_context(progress_bar("training", params.train.num_steps, "steps"))
        if done := trainer.go_on():
            print(f"goes on behind step {done} of {params.train.num_steps}")
            bar.begin_at(done)
        curve = Curve(trainer.train_curve)
        handlers: list[logging.Handler] = [curve]
        if params.train.tensorboard and is_first:
            handlers.append(TensorBoardHandler(run_name=key[:12], log_dir=LOGS / "tensorboard"))
        with hearing(*handlers):
            if params.train.init_from and not done:
                trainer.judge()  # what training does not improve stays
            trainer.run(lambda: curve.after_step(bar), check_fates)
        weights = trainer.weights()
        if is_first:
            vocabulary = coverage(load_split(SEQUENCES / Split.TRAIN), draft.t2d.cpu().numpy())
            made_from = provenance(training, draft, made_from)
            save_draft(draft, weights, DRAFT, getattr(torch, params.verifier.dtype), made_from)
            metrics = report(training, held_out, params.train, trainer, vocabulary)
            write_bytes(CURVE, curve_csv(trainer.train_curve, params.train))
            write_bytes(HELD_OUT_CURVE, curve_csv(trainer.held_out, params.train, "_epoch"))
            write_json(METRICS_PATH, metrics)
            checkpoints.remove()
            print(in_short(metrics))
    maybe_destroy_distributed()


if __name__ == "__main__":
    run_stage("train", main)
