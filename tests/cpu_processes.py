"""pipeline.train as one of torchrun's processes on a machine without GPUs.

    torchrun --nproc-per-node 2 -m tests.cpu_processes        DIES_AT=3: all end at that step

speculators' own set-up asks for an accelerator; these are its answers for a CPU.
"""

import os

import torch
from torch import distributed

from pipeline import train
from pipeline.progress import Bar
from pipeline.stage import run_stage

CPU = torch.device("cpu")
DIES_AT = int(os.environ["DIES_AT"])


def join() -> None:
    patched = torch.accelerator
    accelerator, set_index = patched.current_accelerator, patched.set_device_index
    init = distributed.init_process_group
    patched.current_accelerator = lambda *args, **kwargs: CPU
    patched.set_device_index = lambda index: None
    distributed.init_process_group = lambda backend, **kwargs: init(backend)
    maybe_setup_distributed()
    patched.current_accelerator, patched.set_device_index = accelerator, set_index
    distributed.init_process_group = init


def after_step(curve: train.Curve, bar: Bar) -> None:
    heard(curve, bar)
    if len(curve.points) == DIES_AT:
        os._exit(9)


maybe_setup_distributed, train.maybe_setup_distributed = train.maybe_setup_distributed, join
heard, train.Curve.after_step = train.Curve.after_step, after_step
run_stage("train", train.main)
