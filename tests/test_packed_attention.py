"""Attention within the sequences of a batch, against plain attention under speculators' mask."""

import pytest
import torch
from speculators.models.eagle3.attention import (
    create_combined_mask_mod,
    extend_dense_mask_for_draft_tokens,
)
from torch.nn.attention.flex_attention import create_mask

from pipeline.packed_attention import packed_attention, sequence_lengths

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 3, 3, -1, -1, -1])
HEADS, KEY_HEADS, HEAD_SIZE = 4, 2, 8


def mask_of(documents: torch.Tensor, num_draft_tokens: int = 0) -> torch.Tensor:
    length = len(documents)
    mask_mod = create_combined_mask_mod(documents, length)
    mask = create_mask(mask_mod, B=None, H=None, Q_LEN=length, KV_LEN=length, device="cpu")
    for _ in range(num_draft_tokens):
        mask = extend_dense_mask_for_draft_tokens(mask, length)
    return mask


def plain(query, key, value, mask, scaling):
    key, value = (tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1) for tensor in (key, value))
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2])
def test_values_and_gradients_are_those_of_plain_attention(num_draft_tokens: int) -> None:
    torch.manual_seed(0)
    num_tokens, num_keys = len(DOCUMENTS), len(DOCUMENTS) * (num_draft_tokens + 1)
    tensors = [
        torch.randn(1, heads, length, HEAD_SIZE, requires_grad=True)
        for heads, length in [(HEADS, num_tokens), (KEY_HEADS, num_keys), (KEY_HEADS, num_keys)]
    ]
    mask, is_real = mask_of(DOCUMENTS, num_draft_tokens), DOCUMENTS >= 0
    outputs, gradients = [], []
    for output in (
        packed_attention(torch.nn.Identity(), *tensors, mask, 0.3)[0],
        plain(*tensors, mask, 0.3),
    ):
        assert output.shape == (1, num_tokens, HEADS, HEAD_SIZE)
        outputs.append(output[:, is_real])
        gradients.append(torch.autograd.grad(output[:, is_real].square().sum(), tensors))
    torch.testing.assert_close(*outputs)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("documents", "lengths"),
    [
        (DOCUMENTS.tolist(), [3, 4, 1, 2, 3]),
        ([0, 0], [2]),
        ([0, 0, 1], [2, 1]),
        ([-1, -1], [2]),
        ([0, 1, 2, 2, 3, 4, 4], [1, 1, 2, 1, 2]),
        ([0, -1], [2]),  # one token and padding, which nobody reads
    ],
)
def test_the_mask_tells_the_sequences(documents: list[int], lengths: list[int]) -> None:
    assert sequence_lengths(mask_of(torch.tensor(documents))[0, 0]) == lengths
