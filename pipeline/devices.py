"""What differs between a CPU and an accelerator when a draft is trained or evaluated, all of it.

speculators is written for accelerators; on a CPU a few of its look-ups have no answer. Everything
else runs the same code on both. (For vLLM on a CPU see pipeline.cpu_connector.)
"""

import torch

from pipeline.packed_attention import NAME as PACKED_ATTENTION

# Tokens of a block of flex attention. speculators' masks fit lengths that are a multiple.
ATTENTION_BLOCK = 128


def training_device() -> torch.device:
    """Where a draft is trained and evaluated; on a CPU also answers speculators' step timer."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        return accelerator
    torch.accelerator.synchronize = _nothing_to_wait_for
    return torch.device("cpu")


def _nothing_to_wait_for(device: torch.types.Device = None) -> None:
    """A CPU has finished when the call returns; torch's own function raises there."""


def attention(device: torch.device) -> str:
    """speculators' `draft_attn_impl`: flex attention needs compiled kernels."""
    return PACKED_ATTENTION if device.type == "cpu" else "simple_flex_attention"


def losses(device: torch.device) -> str:
    """speculators' `loss_implementation`: the fused ones are Triton kernels."""
    return "eager" if device.type == "cpu" else "fused"


def num_loader_workers(device: torch.device) -> int:
    """Processes that read batches ahead; on a CPU they would compete with the training."""
    return 0 if device.type == "cpu" else 4
