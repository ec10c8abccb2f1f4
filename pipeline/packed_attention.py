"""Attention within the sequences of a packed batch, on a CPU, for speculators' EAGLE-3 draft.

speculators' `eager` attention multiplies every token of a batch with every key, those of the
unrolled draft tokens too, and masks nearly all of it. Of that mask only two parts are kept:

    a token and those before it in its own sequence
    a token and its own draft tokens, which stand T, 2 T … keys further on

so only these are multiplied here: the same products, added in another order. On an accelerator
flex attention does that (see pipeline.devices).
"""

from typing import Any

import torch
from transformers import AttentionInterface

NAME = "packed_eager"


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, D]
    key: torch.Tensor,  # [1, key heads, k T, D]; k - 1 draft tokens are drawn so far
    value: torch.Tensor,
    attention_mask: torch.Tensor,  # [1, 1, T, k T], bool
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # [1, T, heads, D]
    num_tokens, heads_a_key = query.shape[2], query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(heads_a_key, dim=1).split(
        num_tokens, dim=2
    )  # k × [1, heads, T, D]
    values = value.repeat_interleave(heads_a_key, dim=1).split(num_tokens, dim=2)
    lengths = sequence_lengths(attention_mask[0, 0, :, :num_tokens])
    query = query * scaling
    drafted = [
        (query.float() * drafts).sum(-1, keepdim=True).to(query.dtype) for drafts in keys[1:]
    ]  # [1, heads, T, 1]
    future = query.new_full((max(lengths), max(lengths)), float("-inf")).triu(1)
    parts = [tensor.split(lengths, dim=2) for tensor in (query, keys[0], *drafted)]
    weights = [
        torch.cat([q @ k.transpose(2, 3) + future[: q.shape[2], : q.shape[2]], *scores], dim=-1)
        .softmax(-1, dtype=torch.float32)
        .to(query.dtype)
        for q, k, *scores in zip(*parts, strict=True)
    ]  # of each sequence [1, heads, L, L + k - 1]
    output = torch.cat(
        [
            weight[..., : v.shape[2]] @ v
            for weight, v in zip(weights, values[0].split(lengths, dim=2), strict=True)
        ],
        dim=2,
    )  # [1, heads, T, D]
    if drafted:
        of_drafts = torch.cat([weight[..., weight.shape[2] :] for weight in weights], dim=2)
        for place, drafts in enumerate(values[1:]):
            output = output + of_drafts[..., place, None] * drafts
    return output.transpose(1, 2).contiguous(), None


def sequence_lengths(own: torch.Tensor) -> list[int]:  # own: [T, T], bool
    """Of the sequences in a batch, from which keys a token sees. Tokens of padding, which see
    themselves alone to the end, count as one sequence: what becomes of them is read by nobody."""
    places = torch.arange(len(own))
    begins = own.to(torch.uint8).argmax(dim=1) == places
    alone = begins & torch.cat([begins[1:], begins.new_ones(1)])
    is_padding = alone.flip(0).int().cumprod(0).flip(0).bool()
    begins[1:] &= ~(is_padding[1:] & is_padding[:-1])
    return torch.diff(begins.nonzero().flatten(), append=places.new_tensor([len(own)])).tolist()


AttentionInterface.register(NAME, packed_attention)
