"""Two revisions side by side."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline import compare

IDENTITY = ("-c", "user.name=test", "-c", "user.email=test@localhost")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, check=True)
    (tmp_path / "reports").mkdir()
    return tmp_path


def commit(params: Any, **reports: Any) -> None:
    write(params, **reports)
    subprocess.run(["git", "add", "-A"], check=True)
    subprocess.run(["git", *IDENTITY, "commit", "-qm", "run"], check=True)


def write(params: Any, **reports: Any) -> None:
    Path("params.yaml").write_text(yaml.safe_dump(params))
    for stage, report in reports.items():
        Path(f"reports/{stage}.json").write_text(json.dumps(report))


def said(*revisions: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["compare", *revisions])
        compare.main()
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_what_differs_comes_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"train": 100, "held_out": 8, "rejected": {"blank": 1, "tools": 0}}
    commit({"prompts": {"seed": 0, "sample_cap": 100}}, prompts=first)
    second = {**first, "train": 110}
    commit({"prompts": {"seed": 0, "sample_cap": 110}}, prompts=second)
    lines = said("HEAD~1", "HEAD", capsys=capsys)
    assert "prompts.sample_cap 100 110 +10" in lines
    assert "1 more are equal" in lines
    assert not any(line.startswith("prompts.seed") for line in lines)
    data = [line for line in lines if line.startswith("prompts.") and "cap" not in line]
    assert data == [
        "prompts.train 100 110 +10",
        "prompts.held_out 8 8",
        "prompts.rejected.blank 1 1",
    ]


def test_without_a_second_revision_it_is_the_folder_as_it_is(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit({"a": {"b": 1}})
    write({"a": {"b": 1, "c": None}}, train={"best_step": 80})
    for revisions in (["HEAD"], ["HEAD", ""]):
        lines = said(*revisions, capsys=capsys)
        assert "a.c – null" in lines  # new, though it is nothing
        assert "train.best_step – 80" in lines  # that stage had not run


def test_an_unknown_revision_is_one_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit({})
    with pytest.raises(SystemExit, match=r"compare: nowhere: unknown Git revision 'nowhere'"):
        said("nowhere", capsys=capsys)
    with pytest.raises(SystemExit, match="name a revision"):
        said("", "", capsys=capsys)
    with pytest.raises(SystemExit, match="name a revision"):
        said("", "HEAD", capsys=capsys)


def test_a_new_counter_that_counted_nothing_is_no_change(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit({}, prompts={"train": 100})
    write({}, prompts={"train": 100, "rejected": {"blank": 0}})
    assert "prompts.train 100 100" in (lines := said("HEAD", capsys=capsys))
    assert not any("blank" in line for line in lines)


def test_values_are_shown_as_they_are(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit({"think": {"end": "</think>"}})
    write({"think": {"end": "[/THINK]", "start": "[bold]x"}})
    lines = said("HEAD", capsys=capsys)
    assert 'think.end "</think>" "[/THINK]"' in lines
    assert 'think.start – "[bold]x"' in lines


def test_a_report_that_is_no_json_is_one_line(project: Path) -> None:
    commit({}, prompts={})
    Path("reports/prompts.json").write_text("<<<<<<< HEAD")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["compare", "HEAD"])
        with pytest.raises(SystemExit, match=r"workspace: reports/prompts.json cannot be read"):
            compare.main()


def test_in_a_pipe_no_name_is_cut(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commit({"train": {"max_tokens_per_batch": 640}})
    write({"train": {"max_tokens_per_batch": 1280}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "40")
        lines = said("HEAD", capsys=capsys)
    assert "train.max_tokens_per_batch 640 1280 +640" in lines
