"""Weights that are set and not learnt: a model that walks one chain of tokens.

Every layer adds nothing to the residual stream (what writes to it is zero), so that the state of a
token is its embedding, from the first layer to the last. The head's row of a token has the
direction of the embedding of the token before it in the chain. So the likeliest token is the next
one of the chain, by so much that sampling at temperature 1 takes it too.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

# Of the next token's logit; that of any other is noise of a sixteenth of it.
LOGIT = 32.0
# The matrices that write to the residual stream, in the names of all architectures here.
WRITES = ("o_proj", "down_proj")


@torch.no_grad()
def wire(model: PreTrainedModel, chain: Sequence[int], seed: int) -> None:
    """Set the weights of `model` so that it generates `chain[1:]` after `chain[0]`, wherever it
    meets a token of the chain. Untied embeddings; no token stands in the chain twice."""
    assert len(set(chain)) == len(chain), "a token that comes twice has two tokens after it"
    for name, parameter in model.named_parameters():
        if any(part in WRITES for part in name.split(".")):
            parameter.zero_()
        elif name.endswith("norm.weight"):
            parameter.fill_(1.0)
    embedding_VH = model.get_input_embeddings().weight
    head_VH = model.get_output_embeddings().weight
    assert embedding_VH.data_ptr() != head_VH.data_ptr(), "tied"
    generator = torch.Generator().manual_seed(seed)
    direction_VH = torch.randn(embedding_VH.shape, generator=generator)
    direction_VH /= direction_VH.pow(2).mean(-1, keepdim=True).sqrt()
    # Of different lengths: states that are all equally long look as if the norm were applied.
    length_V1 = torch.rand(len(direction_VH), 1, generator=generator) + 0.5
    embedding_VH.copy_(direction_VH * length_V1)
    head_VH.zero_()
    before, after = torch.tensor(chain[:-1]), torch.tensor(chain[1:])
    head_VH[after] = (direction_VH[before] * (LOGIT / direction_VH.shape[1])).to(head_VH.dtype)
