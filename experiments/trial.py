"""One draft of an experiment: trained and judged in a scratch project, and a row for it.

    rows = run_all([Arm("float8", {"extract.dtype": "float8_e4m3"}, ["extract"])], seeds=[0, 1, 2])
    record("states", rows)               # reports/experiments.csv

A trial borrows what the stages before it made here. It runs the stages of its arm, then trains and
evaluates. Trainings of a small draft use one core each, so several run side by side.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from perf.project import ROOT, Project, scratch_project
from pipeline.errors import UserError
from pipeline.progress import progress_bar
from pipeline.resume import read_json, write_bytes

TABLE = ROOT / "reports/experiments.csv"
BORROWED = ("verifier.json", "prompts", "traces", "sequences", "hidden_states")
KEY = ["experiment", "arm", "seed"]


@dataclass(frozen=True)
class Arm:
    """A way to make a draft: params that differ from params.yaml, and how."""

    name: str
    changes: Mapping[str, Any]
    stages: Sequence[str] = ()
    """that run before train, on copies of what is there"""
    train: Sequence[str] = ("pipeline.train",)
    """module and arguments"""


def run_all(arms: Sequence[Arm], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each arm and seed. Raises UserError when a stage fails, with its last line."""
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    with (
        progress_bar("experimenting", len(jobs), "drafts") as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        rows = []
        for row in threads.map(lambda job: run(*job), jobs):
            rows.append(row)
            bar.advance(note=f"{row['arm']} {row['acceptance_length']}")
    return rows


def run(arm: Arm, seed: int) -> dict[str, Any]:
    with scratch_project({**arm.changes, "train.seed": seed}) as project:
        borrow(project.folder, copied=bool(arm.stages))
        for stage in arm.stages:
            step(project, f"pipeline.{stage}")
        step(project, *arm.train)
        step(project, "pipeline.evaluate")
        return row_of(project.folder, arm, seed)


def borrow(folder: Path, *, copied: bool) -> None:
    (folder / "data").mkdir()
    for name in BORROWED:
        source = ROOT / "data" / name
        if not source.exists():
            raise UserError(f"{source.relative_to(ROOT)} is not there: `make repro` first")
        if copied and source.is_dir():
            shutil.copytree(source, folder / "data" / name)
        else:
            (folder / "data" / name).symlink_to(source)


def step(project: Project, *module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=project.folder,
        env=project.env(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise UserError(f"{' '.join(module)} failed: {done.stdout.strip().splitlines()[-1]}")


def row_of(folder: Path, arm: Arm, seed: int) -> dict[str, Any]:
    """A row of reports/experiments.csv."""
    train = read_json(folder / "reports/train.json")
    judged = read_json(folder / "reports/evaluate.json")
    return {
        "arm": arm.name,
        "seed": seed,
        "supervised_tokens": train["supervised_tokens"],
        "steps": train["steps"],
        "acceptance_length": judged["acceptance_length"]["overall"],
        "acceptance_length_reasoning": judged["acceptance_length"]["reasoning"],
        "acceptance_length_answer": judged["acceptance_length"]["answer"],
        "held_out_accuracy": train["held_out"]["accuracy"]["1"],
    }


def record(experiment: str, rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Put the rows in the place of those of the same experiment; returns the rows."""
    new = pd.DataFrame(rows)
    new.insert(0, "experiment", experiment)
    table = new
    if TABLE.exists():
        old = pd.read_csv(TABLE)
        table = pd.concat([old[old["experiment"] != experiment], new])
    write_bytes(TABLE, table.sort_values(KEY).to_csv(index=False).encode())
    return new


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance length by arm, over the seeds: median, least and largest."""
    lengths = rows.groupby("arm", sort=False)["acceptance_length"]
    return lengths.agg(["median", "min", "max"]).round(3)
