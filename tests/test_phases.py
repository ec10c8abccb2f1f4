"""Loss and accuracy by phase, counted by hand."""

import pytest
import torch

from pipeline.phases import ANSWER, REASONING, UNLEARNT, phase_ids, phase_metrics


def test_a_token_has_the_phase_of_the_one_behind_it() -> None:
    """Two of the prompt, four of the reasoning (the think-end is the last), two of the answer."""
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1], dtype=torch.int8)
    assert phase_ids(mask, answer_start=6).tolist() == [
        *[UNLEARNT] * 2,
        *[REASONING] * 3,
        *[ANSWER] * 3,
    ]


def test_what_was_cut_in_the_reasoning_has_no_answer() -> None:
    mask = torch.tensor([0, 1, 1, 1], dtype=torch.int8)
    assert phase_ids(mask, answer_start=4).tolist() == [UNLEARNT, *[REASONING] * 3]


def test_an_answer_without_reasoning_is_all_answer() -> None:
    mask = torch.tensor([0, 1, 1], dtype=torch.int8)
    assert phase_ids(mask, answer_start=0).tolist() == [UNLEARNT, ANSWER, ANSWER]


def test_sums_and_totals() -> None:
    """Two documents of four and three tokens and one of padding; two draft tokens.

    Draft token 0 at position j is for token j + 1, draft token 1 for j + 2. The last token of a
    document has none behind it, and what is drafted from it is not counted.
    """
    ids = torch.tensor([[10, 11, 12, 13, 20, 21, 22, 0]])
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, -1]])
    phases = torch.tensor([[1, 1, 2, 2, 0, 2, 2, 0]])
    first = torch.tensor([[11, 12, 99, 99, 21, 22, 99, 0]])  # wrong at 2
    second = torch.tensor([[12, 99, 13, 99, 22, 99, 99, 0]])  # wrong at 1
    losses = [
        torch.tensor([[1.0, 2.0, 4.0, 8.0, 100.0, 16.0, 32.0, 100.0]]),
        torch.tensor([[1.0, 2.0, 4.0, 100.0, 100.0, 8.0, 100.0]]),
    ]
    found = phase_metrics(ids, documents, phases, [first, second], losses)
    counts = {name: value.item() for name, value in found.items()}
    for name in [name for name in counts if name.endswith("_of")]:
        assert counts.pop(name) == counts[name.replace("_of", "_total")]
    assert counts == {
        # positions 0 and 1; both drafts of 0 are right, of 1 the first one
        "reasoning_acc_0_sum": 2,
        "reasoning_acc_0_total": 2,
        "reasoning_acc_1_sum": 1,
        "reasoning_acc_1_total": 2,
        "reasoning_loss_0_sum": 1 + 2,
        "reasoning_loss_0_total": 2,
        "reasoning_loss_1_sum": 1 + 2,
        "reasoning_loss_1_total": 2,
        # positions 2 and 5 have a token behind them, neither has two
        "answer_acc_0_sum": 1,
        "answer_acc_0_total": 2,
        "answer_acc_1_sum": 0,
        "answer_acc_1_total": 0,
        # 2, 3, 5, 6 are learnt; one further on, in the same document: from 2 and from 5
        "answer_loss_0_sum": 4 + 8 + 16 + 32,
        "answer_loss_0_total": 4,
        "answer_loss_1_sum": 4 + 8,
        "answer_loss_1_total": 2,
        "all_acc_0_sum": 3,
        "all_acc_0_total": 4,
        "all_acc_1_sum": 1,
        "all_acc_1_total": 2,
        "all_loss_0_sum": 63,
        "all_loss_0_total": 6,
        "all_loss_1_sum": 15,
        "all_loss_1_total": 4,
    }


def test_a_batch_without_sequences_counts_as_nothing() -> None:
    nothing = torch.zeros(1, 4, dtype=torch.long)
    found = phase_metrics(nothing, nothing - 1, nothing, [nothing], [torch.full((1, 4), 7.0)])
    assert not any(value.item() for value in found.values())


@pytest.mark.parametrize("k", [0, 1])
def test_padding_is_no_document(k: int) -> None:
    ids = torch.tensor([[1, 0, 0]])
    documents, phases = torch.tensor([[0, -1, -1]]), torch.tensor([[2, 0, 0]])
    zeros = torch.zeros_like(ids)
    found = phase_metrics(
        ids, documents, phases, [zeros, zeros], [torch.ones(1, 3), torch.ones(1, 2)]
    )
    assert found[f"answer_acc_{k}_total"] == 0
