"""speculators' trainer for a number of steps, on any device, and safe to kill.

    trainer = DraftTrainer(device, Checkpoints(folder), checkpoint_steps, draft, config, loaders…)
    trainer.go_on()                        where a killed run stopped
    trainer.run(after_step, before_save)   ends with the best weights in the draft
    trainer.weights()                      whole and on the CPU, however many processes trained

Every `checkpoint_steps` steps the draft is judged on the held-out sequences, and what training
needs to go on is written to the folder of the run:

    last.pt     weights, optimizers, schedulers, the place in the data, the curves, and the weights
                that accepted most so far; as trained, in float32

It appears whole or not at all. Nothing in a step is random but the order of the sequences, which
follows from the seed and the epoch, so a run that was killed ends with the weights of one that was
not: bit for bit, where the device computes the same twice.
"""

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speculators.train.trainer import Trainer
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from pipeline.errors import BadRun
from pipeline.resume import atomic_path

# All of a state on the first process's CPU, and each process's part of it back: the same calls for
# one process and for shards on many.
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
PARTS = StateDictOptions(full_state_dict=True, strict=False)
ACCURACY = re.compile(r"all_acc_\d+_epoch")


class Checkpoints:
    """The folder of one run: one of the same inputs goes on in it, others begin anew."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, folder / "last.pt"

    def load(self) -> dict[str, Any] | None:
        """The state that was saved last; None: there is none, or it is damaged. Raises OSError when
        the file cannot be read at this moment."""
        if not self._last.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(self._last, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # torch.load raises what the damage happens to lead to
            print(f"{self._last} is damaged ({str(error)[:100]}): training starts anew", flush=True)
            return None
        return state

    def save(self, state: dict[str, Any]) -> None:
        with atomic_path(self._last) as temp, temp.open("wb") as file:
            torch.save(state, file)  # into a file of ours: a full disk is an OSError then

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class DraftTrainer(Trainer):
    """`held_out` has what was measured at each checkpoint: step, acceptance and metrics.

    Its own `run_training` is left alone: it counts epochs, chooses by loss, writes checkpoints in
    half precision and not atomically, and takes SIGTERM for a wish to finish.
    """

    def __init__(
        self,
        device: torch.device,
        checkpoints: Checkpoints,
        checkpoint_steps: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._device = device
        super().__init__(*args, **kwargs)
        self._checkpoints, self._checkpoint_steps = checkpoints, checkpoint_steps
        self._epoch_step = 0
        self.held_out: list[dict[str, float]] = []
        self.best: dict[str, float] = {"acceptance": 0.0}
        """of `held_out`, the one whose weights the draft has in the end"""
        self._best_weights: dict[str, Any] = {}
        self.train_curve: list[dict[str, float]] = []
        """filled by whoever hears the steps; kept here, since a run that goes on needs it"""

    def setup_trainer(self) -> None:
        super().setup_trainer()
        self.local_rank, self.device_type = self._device, self._device.type

    def go_on(self) -> int:
        """Load what a killed run left; returns the number of steps done."""
        if (state := self._checkpoints.load()) is None:
            return 0
        # First: where an optimizer has no state yet, torch takes a step of size zero to make one.
        set_optimizer_state_dict(self.model, self.optimizers, state["optimizers"], options=PARTS)
        set_model_state_dict(self.model, state["model"], options=PARTS)
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.global_step, self.current_epoch = state["step"], state["epoch"]
        self._epoch_step = self._resume_local_step = state["epoch_step"]
        self.held_out, self.train_curve = state["held_out"], state["train_curve"]
        self.best, self._best_weights = state["best"], state["best_weights"]
        return self.global_step

    def run(self, after_step: Callable[[], None], before_save: Callable[[], None]) -> None:
        """Train to the last step; the draft has the best weights then. What `before_save` raises
        ends the run and is in no checkpoint.

        Raises:
            BadRun: the held-out loss is no number any more.
        """
        assert self.config.max_steps

        def step() -> None:
            self._epoch_step += 1
            after_step()
            is_last = self.global_step == self.config.max_steps
            if is_last or self.global_step % self._checkpoint_steps == 0:
                self._checkpoint(before_save)

        while self.global_step < self.config.max_steps:
            self.train_epoch(self.current_epoch, step_callback=step)
            self.current_epoch += 1
            self._epoch_step = 0
        state = self._checkpoints.load()  # the first process alone has the weights in memory
        assert state
        set_model_state_dict(self.model, state["best_weights"], options=PARTS)

    def weights(self) -> dict[str, torch.Tensor]:
        """Those of the draft, frozen ones too; in the first process, empty in the others."""
        weights: dict[str, Any] = get_model_state_dict(self.model, options=WHOLE)
        return weights

    def judge(self) -> dict[str, torch.Tensor]:
        """Measure the draft on the held-out sequences, and keep its weights if it is the best so
        far. Returns what is trained of them, as `weights` does. Raises BadRun as `run` does."""
        metrics = self.val_epoch(0)
        self.model.train()
        check_finite(metrics["loss_epoch"], self.global_step)
        point = {"step": self.global_step, "acceptance": expected_acceptance(metrics), **metrics}
        self.held_out.append(point)
        trained = {name for name, one in self.model.named_parameters() if one.requires_grad}
        weights = {name: one for name, one in self.weights().items() if name in trained}
        if point["acceptance"] > self.best["acceptance"]:
            self.best = point
            self._best_weights = {name: one.clone() for name, one in weights.items()}
        return weights

    def _checkpoint(self, before_save: Callable[[], None]) -> None:
        # Gathered by all processes, written by the first.
        weights = self.judge()
        before_save()
        optimizers = get_optimizer_state_dict(self.model, self.optimizers, options=WHOLE)
        if self.rank == 0:
            self._checkpoints.save(
                {
                    "model": weights,
                    "optimizers": optimizers,
                    "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
                    "step": self.global_step,
                    "epoch": self.current_epoch,
                    "epoch_step": self._epoch_step,
                    "held_out": self.held_out,
                    "best": self.best,
                    "best_weights": self._best_weights,
                    "train_curve": self.train_curve,
                }
            )
        if self.is_distributed:
            distributed.barrier()  # no process reads what the first one is still writing


def check_finite(loss: float, step: int) -> None:
    """Raises BadRun when it is no number: what is trained from there on is none either."""
    if not math.isfinite(loss):
        raise BadRun(
            f"the loss is {loss} at step {step}: lower train.learning_rate and "
            "train.muon_learning_rate, or set train.dtype: float32"
        )


def expected_acceptance(metrics: dict[str, float]) -> float:
    """Tokens that a verification step would write if steps began at every token of the answers,
    not only where a server's begin: its own, and draft token k where all up to it are right (see
    pipeline.phases)."""
    return 1 + sum(value for name, value in metrics.items() if ACCURACY.fullmatch(name))
