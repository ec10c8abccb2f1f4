"""A value of each request, spread over its draft tokens: what vLLM's CPU build leaves undone."""

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from pipeline.cpu_sampling import expand_batch_to_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_draft_token_gets_the_value_of_its_request(dtype):
    value = torch.tensor([2, 0, 5], dtype=dtype)
    ends = torch.tensor([2, 3, 6], dtype=torch.int32)  # two, one and three draft tokens
    spread = expand_batch_to_tokens(value, ends, 6, replace_from=0, replace_to=1)
    assert spread.tolist() == [2, 2, 1, 5, 5, 5]
    assert spread.dtype == dtype


def test_vllm_uses_it():
    logits, temperature = torch.tensor([[0.6, 1.2]]), torch.tensor([0.6])
    metadata = type("M", (), {"all_greedy": False, "temperature": temperature, "top_k": None,
                              "top_p": None})()  # fmt: skip
    scaled = rejection_sampler.apply_sampling_constraints(logits, torch.tensor([1]), metadata)
    assert scaled.flatten().tolist() == pytest.approx([1.0, 2.0])
