"""The table at the end of `make repro`, from literal reports."""

import json
import re
from pathlib import Path

import pytest

from pipeline import summary

STATUSES = {"ok": 380, "truncated_in_reasoning": 12, "empty_reasoning": 8, "failed": 0}
REPORTS = {
    "prompts": {
        "rows_in": 500,
        "held_out": 64,
        "train": 336,
        "beyond_cap": 90,
        "rejected": {"duplicate": 7, "blank": 3, "tools": 0},
    },
    "generate": {"rows_in": 400, "status": STATUSES},
    "reassemble": {
        "rows_in": 400,
        "train": 330,
        "held_out": 62,
        "ablated": 0,
        "rejected": {"empty_reasoning": 8, "usage": 0},
        "reasoning_tokens": {"mean": 61.5, "p50": 58.0, "p95": 120.0, "max": 300},
    },
    "evaluate": {
        "acceptance_length": {"overall": 2.888, "reasoning": 3.111, "answer": 2.222},
        "ngram_acceptance_length": {"overall": 1.5, "reasoning": 1.25, "answer": None},
    },
    "benchmark": {
        "num_draft_tokens": 3,
        "acceptance_length": {"draft": 3.667, "ngram": 1.404},
        "acceptance_by_position": {
            "draft": {"1": 0.94, "2": 0.88, "3": 0.85},
            "ngram": {"1": 0.3, "2": 0.08, "3": 0.03},
        },
        "tokens_per_s": {
            "plain": {"1": 261.0, "8": 900.0},
            "draft": {"1": 348.0, "8": 950.0},
            "ngram": {"1": 208.0, "8": 700.0},
        },
        "speedup": {"draft": 1.333, "ngram": 0.797},
        "rejected": {"refused": 0, "loop": 2, "garbage": 1},
        "noise": {"min": 0.974, "max": 1.012},
        "lossless_fraction": 1.0,
        "lossless_fraction_ngram": 0.9688,
        "plain_vs_plain_fraction": 0.5,
        "by_mode": {
            "thinking_greedy": {
                "thinking": True,
                "temperature": 0.0,
                "num_answered": 21,
                "acceptance_length": {"draft": 3.667, "ngram": 1.404},
                "speedup": {"draft": 1.333, "ngram": 0.797},
            },
            "no_thinking_sampled_0_6": {
                "thinking": False,
                "temperature": 0.6,
                "num_answered": 20,
                "acceptance_length": {"draft": 2.111, "ngram": 1.222},
                "speedup": {"draft": 1.055, "ngram": 0.644},
            },
            "thinking_sampled_0_6": {"thinking": True, "temperature": 0.6, "num_answered": 0},
        },
    },
}


@pytest.fixture
def reports(project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    Path("reports").mkdir()
    for stage, report in REPORTS.items():
        Path(f"reports/{stage}.json").write_text(json.dumps(report))


def cells(capsys) -> list[list[str]]:
    """What was printed, cut into columns where two spaces or more stand."""
    return [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.usefixtures("reports")
def test_each_stage_shows_what_came_in_what_is_left_and_why(capsys):
    summary.main()
    rows = cells(capsys)
    kept = "336 to train on, 64 held out, 90 beyond the cap"
    assert ["prompts", "500", kept, "7 duplicate, 3 blank"] in rows
    lost = "12 truncated_in_reasoning, 8 empty_reasoning"
    assert ["generate", "400", "380 ok", lost] in rows
    assert ["reassemble", "400", "330 to train on, 62 held out", "8 empty_reasoning"] in rows


@pytest.mark.usefixtures("reports")
def test_an_ablation_is_named(capsys):
    ablated = REPORTS["reassemble"] | {"ablated": 392}
    Path("reports/reassemble.json").write_text(json.dumps(ablated))
    summary.main()
    kept = "330 to train on, 62 held out, 392 of them ablated"
    assert ["reassemble", "400", kept, "8 empty_reasoning"] in cells(capsys)


@pytest.mark.usefixtures("reports")
def test_the_draft_stands_beside_ngram_and_no_speculation(capsys):
    summary.main()
    rows = cells(capsys)
    assert ["draft", "3.67", "0.94 0.88 0.85", "348", "x 1.33", "100%"] in rows
    assert ["n-gram", "1.40", "0.30 0.08 0.03", "208", "x 0.80", "97%"] in rows
    assert ["no speculation", "1.00", "261", "x 1.00", "50%"] in rows


@pytest.mark.usefixtures("reports")
def test_the_noise_floor_and_what_does_not_count_stand_below_the_speeds(capsys):
    summary.main()
    shown = capsys.readouterr().out
    assert "no speculation again: x 0.97 to 1.01; not counted: 2 loop, 1 garbage" in shown


@pytest.mark.usefixtures("reports")
def test_each_mode_has_a_row_and_one_in_which_nothing_counts_has_dashes(capsys):
    summary.main()
    rows = cells(capsys)
    assert ["thinking, greedy", "3.67", "x 1.33", "1.40", "x 0.80", "21"] in rows
    assert ["no thinking, temperature 0.6", "2.11", "x 1.05", "1.22", "x 0.64", "20"] in rows
    assert ["thinking, temperature 0.6", "–", "–", "–", "–", "0"] in rows


@pytest.mark.usefixtures("reports")
def test_a_single_mode_needs_no_table_of_modes(capsys):
    served = REPORTS["benchmark"]
    only = {"thinking_greedy": served["by_mode"]["thinking_greedy"]}
    Path("reports/benchmark.json").write_text(json.dumps(served | {"by_mode": only}))
    summary.main()
    assert "in each mode" not in capsys.readouterr().out


@pytest.mark.usefixtures("reports")
def test_acceptance_by_phase_and_reasoning_length_are_shown(capsys):
    summary.main()
    shown = capsys.readouterr().out
    assert "draft: overall 2.89, reasoning 3.11, answer 2.22" in shown
    assert "n-gram: overall 1.50, reasoning 1.25, answer \u2013" in shown
    assert "mean 61.5, p50 58.0, p95 120.0" in shown


@pytest.mark.usefixtures("reports")
def test_the_last_line_is_a_command_to_paste(capsys):
    summary.main()
    assert capsys.readouterr().out.splitlines()[-1] == (
        "VLLM_CPU_KVCACHE_SPACE=1 vllm serve models/verifier --dtype float32 "
        "--max-model-len 1024 --reasoning-parser qwen3 "
        "--enforce-eager --speculative-config "
        '\'{"method":"eagle3","model":"models/draft","num_speculative_tokens":3}\' --host 127.0.0.1'
    )


@pytest.mark.usefixtures("reports")
def test_a_missing_report_is_named_and_exits_1():
    Path("reports/evaluate.json").unlink()
    with pytest.raises(SystemExit, match=r"summary: reports/evaluate\.json"):
        summary.main()
