"""Hidden states of the real run: streamed instead of stored, and extraction that is killed."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from pipeline.manifest import load_manifest
from pipeline.sequences import load_split
from pipeline.shards import HiddenStates
from tests.e2e.conftest import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
STATES, SPLITS = Path("data/hidden_states"), ("train", "held_out")


def report(project: Project, stage: str) -> Any:
    return json.loads((project.root / f"reports/{stage}.json").read_text())


def losses(project: Project) -> list[float]:
    lines = (project.root / "reports/train_curve.csv").read_text().splitlines()
    return [float(line.split(",")[1]) for line in lines[1:]]


def test_streamed_states_train_the_draft_that_stored_ones_do(copy: Project) -> None:
    """The states come from another run of the server, in other batches: equal but for rounding."""
    copy.set_params(train__num_steps=20)
    assert copy.repro("evaluate") == ["train", "evaluate"]
    stored = losses(copy), report(copy, "train"), report(copy, "evaluate")
    copy.set_params(train__num_steps=20, extract__mode="streamed")
    assert copy.repro("evaluate") == ["extract", "train", "evaluate"]

    assert {path.name for path in (copy.root / STATES).iterdir()} == {"plan.json", "parity.json"}
    assert report(copy, "extract")["rows_streamed"] == stored[1]["rows_in"] + stored[2]["rows_in"]
    assert losses(copy) == pytest.approx(stored[0], rel=0.01)
    trained = report(copy, "train")
    assert {**trained, "held_out": None} == {**stored[1], "held_out": None}
    assert trained["held_out"]["loss"] == pytest.approx(stored[1]["held_out"]["loss"], rel=0.01)
    judged = report(copy, "evaluate")
    assert judged["samples"] == stored[2]["samples"]
    assert judged["acceptance_length"]["overall"] == pytest.approx(
        stored[2]["acceptance_length"]["overall"], rel=0.01
    )
    assert copy.processes() == []


@pytest.mark.full
def test_killed_servers_and_stages_leave_what_an_uninterrupted_run_does(copy: Project) -> None:
    """kill -9 of vLLM's engine and of the stage in turn, each after some more shards."""
    copy.set_params(extract__samples_per_shard=8)
    folder = copy.root / STATES
    for path in folder.iterdir():
        path.unlink()
    rng = random.Random(0)
    for turn in range(6):
        there, enough = set(folder.glob("shard-*.safetensors")), rng.randint(1, 8)
        stage = subprocess.Popen(
            ["python", "-m", "pipeline.extract"],
            cwd=copy.root,
            env=copy.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        deadline = time.monotonic() + 300
        while len(set(folder.glob("shard-*.safetensors")) - there) < enough:
            assert stage.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        before = {path: path.read_bytes() for path in folder.glob("shard-*.safetensors")}
        if turn % 2:
            os.kill(stage.pid, signal.SIGKILL)
            stage.communicate()
        else:
            [vllm] = [
                process
                for process in psutil.Process(stage.pid).children()
                if "serve" in process.cmdline()
            ]
            os.kill(vllm.pid, signal.SIGKILL)
            said = stage.communicate()[0]
            assert stage.returncode != 0
            assert "vLLM ended with code -9" in said.splitlines()[-1]
        # What was whole stays, byte for byte; no file is half a shard.
        assert all(path.read_bytes() == data for path, data in before.items())
        while copy.processes():  # the watcher ends a server whose stage was killed
            assert time.monotonic() < deadline
            time.sleep(0.1)

    copy.run("python", "-m", "pipeline.extract")
    rows = [row for split in SPLITS for row in load_split(copy.root / "data/sequences" / split)]
    manifest = load_manifest(folder)
    assert sum(len(shard.stored()) for shard in manifest.shards) == len(rows)
    assert {path.name for path in folder.iterdir()} == {
        "manifest.json",
        "parity.json",
        *(shard.file for shard in manifest.shards),
    }
    copy.run("python", "-m", "pipeline.verify_states")
    # Read now: a mapped shard stays what it was when the one of the finished run takes its place.
    killed, found = HiddenStates(folder), {}
    for row in rows:
        found[row["key"]] = killed.read(row["key"])
    copy.set_params(extract__samples_per_shard=128)
    copy.run("dvc", "checkout", "--force", str(STATES))
    whole = HiddenStates(folder)
    for key, ours in found.items():
        for one, other in zip(ours, whole.read(key), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
