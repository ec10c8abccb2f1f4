"""One trainer's steps, heard from its own log: when each ended, its tokens and its loss.

    python -m perf.steps FILE ours                      pipeline.train
    python -m perf.steps FILE speculators OPTION…       `speculators train OPTION…` on a CPU

Writes FILE as JSONL. For speculators three look-ups are answered that have no answer on a CPU; all
else is as it ships.
"""

import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from pipeline.resume import jsonl


class Steps(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.rows: list[dict[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, dict) and "train" in record.msg:
            profile = record.msg["profile"]
            self.rows.append(
                {
                    "ended_s": time.perf_counter(),
                    "tokens": round(profile["tokens_per_s"] * profile["step_ms"] / 1000),
                    "loss": record.msg["train"]["loss"],
                }
            )


def ours(steps: Steps) -> None:
    from pipeline.train import main

    logging.getLogger("speculators.metrics").addHandler(steps)
    main()


def speculators(steps: Steps, options: list[str]) -> None:
    import speculators.train.checkpointer
    import speculators.train.trainer
    from speculators.__main__ import app

    cpu: Any = torch.device("cpu")
    torch.accelerator.synchronize = lambda *_: None
    speculators.train.trainer.get_local_rank = lambda: cpu
    speculators.train.checkpointer.get_current_device = lambda: cpu
    logging.getLogger().addHandler(steps)  # it takes those of its own loggers away
    app(["train", *options], standalone_mode=False)


def main() -> None:
    file, whose, *options = sys.argv[1:]
    steps = Steps()
    if whose == "ours":
        ours(steps)
    else:
        speculators(steps, options)
    Path(file).write_bytes(jsonl(steps.rows))


if __name__ == "__main__":
    main()
