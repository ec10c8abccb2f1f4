"""The walk through an answer, against cases counted by hand."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.evaluate import (
    Answer,
    at_boundaries,
    by_source,
    draft_runs,
    ngram_runs,
    report,
    save_runs,
    walk,
)
from pipeline.resume import write_json

HIDDEN = 4


def answer(
    runs: list[int], start: int = 3, answer_start: int = 1000, end: int = 2000, source: str = "x"
) -> Answer:
    places = (start, answer_start - 1, answer_start, end)
    return Answer("q0_gen0", source, *places, np.array(runs, dtype=int))


def advanced(runs: list[int], k: int) -> list[int]:
    return [step.advanced for step in walk(answer(runs), k)]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_perfect_draft_advances_by_k_plus_1(k: int) -> None:
    tokens = 4 * (k + 1)  # after the first one, which costs no step
    runs = [min(k, tokens - i) for i in range(tokens)]
    assert advanced(runs, k) == [k + 1] * 4


@pytest.mark.parametrize("k", [1, 3])
def test_a_wrong_draft_advances_by_one(k: int) -> None:
    assert advanced([0] * 6, k) == [1] * 6


def test_only_the_runs_that_a_step_meets_count() -> None:
    # Steps begin at 0 (2 accepted, on to 3), 3 (none, on to 4), 4 (1, on to 6), 6 (1 of 1 left).
    runs = [2, 3, 3, 0, 1, 3, 1]
    steps = list(walk(answer(runs), 3))
    assert [step.accepted for step in steps] == [2, 0, 1, 1]
    assert [step.advanced for step in steps] == [3, 1, 2, 1]


def test_fewer_draft_tokens_cut_the_runs() -> None:
    assert advanced([3, 2, 1, 0], 1) == [2, 2]


def test_the_last_step_ends_with_the_answer() -> None:
    # A run of all that is left has no room for the verifier's own token.
    assert advanced([3, 2, 1], 3) == [3]
    assert sum(advanced([0, 3, 3, 2, 1], 3)) == 5


def test_nothing_to_draft_after_a_single_token() -> None:
    assert advanced([], 3) == []


def test_a_step_belongs_to_the_phase_of_the_first_token_it_writes() -> None:
    # Tokens 3…8 are generated, 6 is the think-end, the answer begins at 7.
    steps = list(walk(answer([0] * 5, start=3, answer_start=7), 3))
    assert [step.context for step in steps] == [4, 5, 6, 7, 8]
    assert [step.phase for step in steps] == ["reasoning"] * 3 + ["answer"] * 2


def test_the_report_adds_up() -> None:
    answers = [
        answer([1, 0, 0, 2, 1, 0], start=3, answer_start=7),  # k = 2: 2, 1, 3 tokens
        answer([0, 0], start=10, answer_start=10),  # 1, 1
    ]
    found = report(answers, num_draft_tokens=2, max_draft_tokens=3, bounds=[4, 7])
    assert found["samples"] == 2
    assert found["tokens"] == 7 + 3
    assert found["steps"] == 5
    assert found["acceptance_length"] == {
        "overall": 8 / 5,
        "reasoning": 1.5,  # 2 and 1
        "answer": 1.6667,  # 3, 1 and 1
    }
    assert found["acceptance"] == {
        "joint": {"1": 0.4, "2": 0.2},
        "conditional": {"1": 0.4, "2": 0.5},
    }
    assert found["by_context"] == {
        "to_4": {"acceptance_length": 2.0, "steps": 1},  # 4 tokens before the step
        "to_7": {"acceptance_length": 2.0, "steps": 2},  # 6 and 7
        "above_7": {"acceptance_length": 1.0, "steps": 2},
    }
    assert set(found["by_num_draft_tokens"]) == {"1", "2", "3"}
    # k = 1: 2, 1, 2, 1 and 1, 1 tokens.
    assert found["by_num_draft_tokens"]["1"]["steps"] == 6


def test_boundary_tokens_are_counted_apart() -> None:
    # Tokens 3…10 are generated: 5 is the think-end, 6…8 the answer, 9 its end, 10 beyond. A run
    # belongs to the token before: that of 4 says if 5 was proposed.
    found = at_boundaries([answer([0, 2, 1, 0, 1, 0, 3], answer_start=6, end=9)])
    assert found["think_end"] == {"accepted": 1.0, "tokens": 1}  # the run of token 4
    assert found["answer_begins"] == {"accepted": 0.5, "tokens": 4}  # of 5, 6, 7, 8
    assert found["end_of_turn"] == {"accepted": 0.0, "tokens": 1}  # of 8


def test_what_is_not_there_is_no_boundary() -> None:
    """An answer cut in its reasoning, after token 5: all other places are the end."""
    found = at_boundaries([Answer("q0_gen0", "x", 3, 6, 6, 6, np.array([1, 1]))])
    assert found["think_end"] == {"accepted": None, "tokens": 0}


def test_acceptance_is_told_by_source() -> None:
    answers = [answer([1, 0], source="b"), answer([0, 0], source="a"), answer([2, 1], source="b")]
    assert by_source(answers, 2) == {
        "a": {"acceptance_length": 1.0, "steps": 2},
        "b": {"acceptance_length": 2.0, "steps": 2},  # 2 and 2 tokens
    }


def test_no_answer_gives_null_not_nan(tmp_path: Path) -> None:
    found = report([answer([0, 0])], 1, 1, [4])
    assert found["acceptance_length"]["answer"] is None
    assert found["acceptance"]["conditional"] == {"1": 0.0}
    write_json(tmp_path / "evaluate.json", found)
    assert json.loads((tmp_path / "evaluate.json").read_text()) == found


def test_runs_are_saved_by_position(tmp_path: Path) -> None:
    save_runs(tmp_path / "runs.parquet", [answer([2, 0], start=3, answer_start=5)])
    assert pq.read_table(tmp_path / "runs.parquet").to_pylist() == [
        {"sample_id": "q0_gen0", "position": 3, "phase": "reasoning", "accepted_run": 2},
        {"sample_id": "q0_gen0", "position": 4, "phase": "answer", "accepted_run": 0},
    ]


def test_an_ngram_is_looked_up_at_its_first_place() -> None:
    # Written from token 4 on. After 4: 7 8 was followed by 1 at first, by 2 later.
    tokens = [7, 8, 1, 7, 8, 2, 7, 8, 1, 7]
    # At 4 (…7 8): proposes 1 7 8, written is 2. At 5 (…8 2) and 6 (…2 7): never seen.
    # At 7 (…7 8): proposes 1 7 8, written is 1 7. At 8 (…7 8 1): proposes 7 8 2, written is 7.
    assert ngram_runs(tokens, 4, 3, 2, 4).tolist() == [0, -1, -1, 2, 1]


def test_ngram_runs_are_those_of_vllm() -> None:
    from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

    k, start = 3, 5
    tokens = np.random.default_rng(0).integers(0, 4, 200).astype(np.int32)
    runs = ngram_runs(tokens.tolist(), start, k, 2, 4)
    for last in range(start, len(tokens) - 1):
        proposed = _find_longest_matched_ngram_and_propose_tokens(
            tokens[: last + 1], 2, 4, 1000, k
        ).tolist()
        written = tokens[last + 1 :].tolist()
        run = next(
            (i for i, (a, b) in enumerate(zip(proposed, written, strict=False)) if a != b),
            min(len(proposed), len(written)),
        )
        assert runs[last - start] == (run if proposed else -1)


def test_steps_without_an_ngram_advance_by_one_and_are_not_drafted() -> None:
    steps = list(walk(answer([-1, 2, 1, 0]), 3))
    assert [(step.advanced, step.drafted) for step in steps] == [(1, False), (3, True)]


class ScriptedDraft(SimpleNamespace):
    """Proposes `said[j][s]` at the place where the draft sees token j + 1 and the states at j."""

    device, dtype = torch.device("cpu"), torch.float32
    d2t: torch.Tensor | None = None

    def __call__(self, **batch: Any) -> list[torch.Tensor]:
        self.batch = batch
        padding = batch["input_ids"].shape[1] - len(self.said)
        said = torch.tensor(self.said + [[0, 0]] * padding)  # [P, steps]
        return [said[None, :, step] for step in range(batch["ttt_steps"])]


def sample_of(ids: list[int]) -> dict[str, torch.Tensor]:
    states = torch.arange(len(ids)).float()[:, None].expand(-1, 3 * HIDDEN)
    return {"input_ids": torch.tensor(ids), "hidden_states": states}


IDS = [10, 11, 12, 13, 14, 15]  # two of the prompt, four generated


def test_the_draft_proposes_what_comes_after_the_token_it_sees() -> None:
    # At j the draft sees token j + 1, and the next are j + 2, j + 3; 99 is wrong.
    said = [[12, 13], [13, 99], [14, 15], [99, 99], [99, 99]]
    draft = ScriptedDraft(said=said)
    runs = draft_runs(draft, sample_of(IDS), start=2, max_draft_tokens=2)
    # After token 2 (j = 1): 13 right, 99 wrong. After 3 (j = 2): 14, 15. After 4 (j = 3): wrong.
    assert runs.tolist() == [1, 2, 0]
    assert draft.batch["input_ids"][0, :6].tolist() == [*IDS[1:], 0]
    assert draft.batch["hidden_states"][0, :6, 0].tolist() == [0, 1, 2, 3, 4, 0]
    assert draft.batch["hidden_states"].shape == (1, 128, 3 * HIDDEN)
    assert draft.batch["document_ids"][0, :6].tolist() == [0, 0, 0, 0, 0, -1]


def test_a_right_token_behind_a_wrong_one_is_lost() -> None:
    said = [[0, 0], [99, 14], [14, 15], [15, 0], [0, 0]]
    runs = draft_runs(ScriptedDraft(said=said), sample_of(IDS), 2, 2)
    assert runs.tolist() == [0, 2, 1]


def test_draft_ids_are_mapped_to_the_verifiers() -> None:
    said = [[i - 10 for i in row] for row in [[12, 13], [13, 14], [14, 15], [15, 10], [10, 10]]]
    draft = ScriptedDraft(said=said, d2t=torch.full((8,), 10))
    runs = draft_runs(draft, sample_of(IDS), 2, 2)
    assert runs.tolist() == [2, 2, 1]
