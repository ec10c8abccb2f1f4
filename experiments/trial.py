"""One draft of an experiment: trained and judged in a scratch project, and a row for it.

    arms = [Arm("small steps", {"train.muon_learning_rate": 0.0005})]
    rows = run_all("rates", arms, seeds=[0, 1, 2])            # in reports/experiments.csv

A trial borrows the data of a finished project, this one if nothing else is said, changes nothing in
it, trains and evaluates. `prepared` runs stages before that on copies.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from perf.project import ROOT, Project, scratch_project
from pipeline.errors import UserError
from pipeline.progress import progress_bar
from pipeline.resume import read_json, write_bytes

TABLE = ROOT / "reports/experiments.csv"
DATA = ROOT / "data"
KEY = ["experiment", "arm", "seed"]


@dataclass(frozen=True)
class Arm:
    """A way to make a draft: params that differ from params.yaml, the data, and what there is no
    param for (see experiments.variant)."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    data: Path = DATA
    variant: Mapping[str, Any] = field(default_factory=dict)


def run_all(
    experiment: str, arms: Sequence[Arm], seeds: Sequence[int], judged_on: Path = DATA
) -> pd.DataFrame:
    """A row for each arm and seed, in the table as soon as it is there. All are judged on the
    held-out sequences and states of the folder `judged_on`. Raises UserError when a stage fails,
    with its last line."""
    jobs = [(arm, seed) for seed in seeds for arm in arms]
    with (
        progress_bar("experimenting", len(jobs), "drafts") as bar,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads,
    ):
        rows = []
        for row in threads.map(lambda job: run(job[0], job[1], judged_on), jobs):
            rows.append(row)
            record(experiment, row)
            bar.advance(note=f"{row['arm']} {row['acceptance_length']}")
    return pd.DataFrame(rows)


def run(arm: Arm, seed: int, judged_on: Path) -> dict[str, Any]:
    with scratch_project({**arm.changes, "train.seed": seed}) as project:
        project.borrow(arm.data)
        step(project, "experiments.variant", json.dumps(arm.variant))
        project.borrow(judged_on)
        step(project, "pipeline.evaluate")
        return row_of(project.folder, arm, seed)


@contextmanager
def prepared(source: Path, changes: Mapping[str, Any], stages: Sequence[str]) -> Iterator[Path]:
    """The data folder of a scratch project in which `stages` ran on a copy of `source`."""
    with scratch_project(changes) as project:
        shutil.copytree(source, project.folder / "data", symlinks=True)
        for stage in stages:
            step(project, f"pipeline.{stage}")
        yield project.folder / "data"


def step(project: Project, *module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=project.folder,
        env=project.env(OMP_NUM_THREADS="1"),  # as many run at once as there are cores
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
        "held_out_accuracy": train["held_out"]["speculators_accuracy"]["1"],
    }


def record(experiment: str, row: Mapping[str, Any]) -> None:
    """Put a row into the table, in the place of an earlier one of the same arm and seed."""
    table = pd.DataFrame([{"experiment": experiment, **row}])
    if TABLE.exists():
        table = pd.concat([pd.read_csv(TABLE), table]).drop_duplicates(KEY, keep="last")
    write_bytes(TABLE, table.sort_values(KEY).to_csv(index=False).encode())


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Acceptance length by arm, over the seeds: median, least and largest."""
    lengths = rows.groupby("arm", sort=False)["acceptance_length"]
    return lengths.agg(["median", "min", "max"]).round(3)
