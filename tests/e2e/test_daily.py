"""DVC as its users live with it: experiments, comparing, going back, two at once."""

import json
import math
import subprocess
import time
from collections import Counter
from typing import Any

import pytest

from tests.e2e.conftest import Project, commit, ran_stages, terminate_the_group

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture
def committed(copy: Project) -> Project:
    commit(copy, "run")
    return copy


def test_going_back_brings_everything_back_without_computing(committed: Project) -> None:
    runs = committed.root / "data/acceptance/runs.parquet"
    before = runs.read_bytes()
    committed.set_params(evaluate__max_draft_tokens=4, evaluate__context_bins=[100])
    assert committed.repro() == ["evaluate"]
    commit(committed, "fewer draft tokens")
    assert runs.read_bytes() != before
    committed.run("dvc", "gc", "--all-commits", "--force")
    committed.run("git", "checkout", "-q", "HEAD~1")
    committed.run("dvc", "checkout")
    assert runs.read_bytes() == before
    assert committed.repro() == []


def test_diffs_tell_what_was_changed_and_what_it_did(committed: Project) -> None:
    committed.set_params(evaluate__max_draft_tokens=4)
    committed.repro()
    params = json.loads(committed.run("dvc", "params", "diff", "--json").stdout)
    assert params == {
        "params.yaml": {"evaluate.max_draft_tokens": {"old": 5, "new": 4, "diff": -1}}
    }
    metrics = json.loads(committed.run("dvc", "metrics", "diff", "--json").stdout)
    assert list(metrics) == ["reports/evaluate.json"]
    names = list(metrics["reports/evaluate.json"])
    assert names  # those of the fifth draft token are gone
    assert all(name.startswith("by_num_draft_tokens.5.") for name in names)


def test_curves_of_two_commits_stand_beside_each_other(committed: Project) -> None:
    curve = committed.root / "reports/train_curve.csv"
    lines = curve.read_text().splitlines(keepends=True)
    curve.write_text("".join(lines[:-1]))
    page = json.loads(committed.run("dvc", "plots", "diff", "HEAD", "--json").stdout)
    assert not page.get("errors")
    [loss] = page["data"]["reports/train_curve.csv"]
    points = loss["content"]["data"]["values"]
    counts = Counter(point["rev"] for point in points)
    assert counts == {"HEAD": len(lines) - 1, "workspace": len(lines) - 2}


def test_reports_have_sorted_names_and_finite_numbers(finished: Project) -> None:
    """So that a diff of two of them shows what changed and nothing else."""
    for path in (finished.root / "reports").glob("*.json"):
        assert_sorted_and_finite(json.loads(path.read_text()), path.stem)


def assert_sorted_and_finite(value: Any, name: str) -> None:
    if isinstance(value, dict):
        assert list(value) == sorted(value), name
        for key, below in value.items():
            assert_sorted_and_finite(below, f"{name}.{key}")
    else:
        assert not (isinstance(value, float) and not math.isfinite(value)), name


def test_compare_puts_what_changed_first(committed: Project) -> None:
    committed.set_params(benchmark__num_draft_tokens=2)
    committed.repro("evaluate")
    lines = committed.run("python", "-m", "pipeline.compare", "HEAD").stdout.splitlines()
    lines = [" ".join(line.split()) for line in lines]
    assert "benchmark.num_draft_tokens 3 2 -1" in lines
    lengths = [line for line in lines if line.startswith("evaluate.acceptance_length.")]
    first_equal = lines.index("train.best_step 320 320")
    assert len(lengths) == 3
    assert all(lines.index(line) < first_equal for line in lengths)


def test_an_experiment_of_generate_asks_nothing_that_was_answered(committed: Project) -> None:
    (committed.root / "logs/vllm-generate.log").unlink()
    before = committed.traces()
    done = committed.run("dvc", "exp", "run", "-n", "longer", "-S", "generate.max_tokens=640")
    assert ran_stages(done.stdout) == ["generate"]
    assert committed.traces() == before
    assert not (committed.root / "logs/vllm-generate.log").exists(), "a server was started"


def test_queued_experiments_run_beside_the_work(committed: Project) -> None:
    change = ("-S", "evaluate.context_bins=[100,200]")
    committed.run("dvc", "exp", "run", "--queue", "-n", "aside", *change)
    committed.run("dvc", "queue", "start")
    wait_for_the_queue(committed)
    assert committed.run("git", "status", "--porcelain").stdout == ""
    committed.run("dvc", "exp", "apply", "aside")
    report = json.loads((committed.root / "reports/evaluate.json").read_text())
    assert list(report["by_context"]) == ["above_200", "to_100", "to_200"]


def wait_for_the_queue(project: Project) -> None:
    while "Queued" in (status := project.run("dvc", "queue", "status").stdout) or (
        "Running" in status
    ):
        time.sleep(1)
    assert "Success" in status, status + project.run("dvc", "queue", "logs", "aside").stdout
    project.run("dvc", "queue", "stop")


def test_the_second_of_two_runs_says_who_holds_the_lock(committed: Project) -> None:
    committed.set_params(train__seed=1)
    first = subprocess.Popen(
        ["dvc", "repro", "train"],
        cwd=committed.root,
        env=committed.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not any("-m pipeline.train" in line for line in committed.processes()):
        assert first.poll() is None
        time.sleep(0.1)
    second = committed.run("dvc", "repro", "train", check=False)
    assert second.returncode
    assert str(first.pid) in second.stdout
    terminate_the_group(first)
    first.wait()
    assert committed.processes_left() == []
