"""Speculation above temperature 0, for a server on a CPU.

vLLM 0.32's CPU build spreads the temperature of a request over its draft tokens by a kernel that
writes into a copy of the result: the logits are then divided by what was in memory. Loaded by
`--worker-extension-cls pipeline.cpu_sampling.Extension`, this module does it in plain torch; a GPU
needs none of it.
"""

import torch
from vllm.v1.sample import rejection_sampler


class Extension:
    """What vLLM asks for. It is the import of this module that counts."""


def expand_batch_to_tokens(
    x: torch.Tensor,  # [requests]
    cu_num_tokens: torch.Tensor,  # [requests]
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """[a, b] with 2 and 3 tokens → [a, a, b, b, b]; `replace_from` becomes `replace_to`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts.long(), output_size=num_tokens)


rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
