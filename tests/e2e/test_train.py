"""Training of the demo draft that is killed for real."""

import random
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def outputs(project: Project) -> dict[str, bytes]:
    files = [
        *(project.root / "models/draft").iterdir(),
        *(project.root / "reports").glob("*train*"),
        project.root / "reports/held_out_curve.csv",
    ]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.full
def test_ten_kills_leave_the_weights_of_an_uninterrupted_run(copy: Project) -> None:
    """In float32, on one thread: bit for bit, the report and curves too."""
    copy.set_params(train__num_steps=60, train__checkpoint_steps=4, train__dtype="float32")
    command = ["env", "OMP_NUM_THREADS=1", "python", "-m", "pipeline.train"]
    copy.run(*command)
    whole = outputs(copy)
    copy.run("rm", "-r", "models/draft")

    rng, log = random.Random(0), copy.root / "train.out"
    for _ in range(10):
        with log.open("w") as out:
            stage = subprocess.Popen(
                command, cwd=copy.root, env=copy.env, stdout=out, stderr=subprocess.STDOUT
            )
        wait_for_a_checkpoint(copy.root, stage)
        time.sleep(rng.uniform(0, 1.5))
        assert stage.poll() is None
        stage.kill()
        stage.wait()
        assert not (copy.root / "models/draft").exists()
    copy.run(*command)
    assert outputs(copy) == whole
    assert not list((copy.root / "models/.draft-in-progress").iterdir())


def wait_for_a_checkpoint(root: Path, stage: subprocess.Popen[bytes]) -> None:
    """Of this run, so that each of ten goes on from another place."""

    def newest() -> int:
        files = (root / "models/.draft-in-progress").glob("*/last.pt")
        return max((path.stat().st_mtime_ns for path in files), default=0)

    before, deadline = newest(), time.monotonic() + 120
    while newest() == before:
        assert stage.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
