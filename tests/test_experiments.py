"""The parts of the experiments that no run shows."""

from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments import report, trial
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


# What the committed runs show


def committed(experiment: str) -> pd.DataFrame:
    """Acceptance length by seed and arm."""
    table = pd.read_csv(trial.TABLE)
    rows = table[table["experiment"] == experiment]
    return rows.pivot(index="seed", columns="arm", values="acceptance_length")


def test_reasoning_in_the_data_is_worth_two_and_a_half_times_the_acceptance() -> None:
    lengths = committed("reasoning")
    assert len(lengths) == 3
    assert (lengths["keep"] >= 2.5 * lengths["empty"]).all()
    assert (lengths["keep"] >= 2.5 * lengths["drop"]).all()


def test_the_recipe_beats_the_stock_one_on_each_seed() -> None:
    lengths = committed("recipe").loc[[0, 1, 2]]
    assert (lengths["ours"] > lengths["stock"]).all()


def test_the_tables_of_the_docs_are_those_of_the_committed_runs() -> None:
    everything = pd.read_csv(trial.TABLE)
    for experiment, page in report.PAGES.items():
        rows = everything[everything["experiment"] == experiment]
        assert report.table(rows) in (trial.ROOT / "docs" / page).read_text(encoding="utf-8")


def test_a_table_has_the_best_arm_first_and_median_least_and_most() -> None:
    columns = dict.fromkeys(report.COLUMNS, 0.5)
    rows = pd.DataFrame(
        [
            {"arm": arm, "supervised_tokens": 1200, **columns, "acceptance_length": length}
            for arm, length in [("a", 1.0), ("b", 2.0), ("b", 4.0), ("b", 2.5)]
        ]
    )
    lines = report.table(rows).splitlines()
    assert lines[2].startswith("| b | 3 | 1,200 | 2.500 (2.000 – 4.000) | 0.500 ")
    assert lines[3].startswith("| a | 1 | 1,200 | 1.000 (1.000 – 1.000) | ")
