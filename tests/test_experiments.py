"""The parts of the experiments that no run shows."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import trial
from experiments.variant import cut


def test_the_likeliest_tokens_keep_their_odds_and_the_others_have_none() -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0]]])
    found = cut(logits, 2).softmax(-1)
    first = torch.tensor([3.0, 2.0]).softmax(-1)
    assert torch.allclose(found[0, 0], torch.tensor([0, first[0], first[1], 0]))
    assert found[0, 1].count_nonzero() == 2
    assert torch.equal(cut(logits, 4), logits)


def test_a_draft_made_again_replaces_its_own_row_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TABLE", tmp_path / "experiments.csv")
    one = {"arm": "b", "seed": 0, "acceptance_length": 2.0}
    trial.record("states", one)
    trial.record("states", one | {"seed": 1})
    trial.record("reasoning", one | {"arm": "keep", "acceptance_length": 3.5})
    trial.record("states", one | {"acceptance_length": 2.5})
    table = pd.read_csv(tmp_path / "experiments.csv")
    assert table.to_numpy().tolist() == [
        ["reasoning", "keep", 0, 3.5],
        ["states", "b", 0, 2.5],
        ["states", "b", 1, 2.0],
    ]


def test_the_summary_has_median_and_spread_of_the_seeds() -> None:
    rows = pd.DataFrame({"arm": ["x"] * 3 + ["y"], "acceptance_length": [1.0, 4.0, 2.0, 3.0]})
    assert trial.summary(rows).loc["x"].tolist() == [2.0, 1.0, 4.0]
    assert trial.summary(rows).index.tolist() == ["x", "y"]
