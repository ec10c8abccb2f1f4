"""However a run ends, under either shell: no server of a stage is left behind."""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.e2e.conftest import (
    Project,
    Run,
    ctrl_c,
    kill_dvc,
    kill_the_stage,
    terminate_dvc,
    terminate_the_group,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def ask_again(project: Project) -> None:
    shutil.rmtree(project.root / "data/traces")


def extract_again(project: Project) -> None:
    shutil.rmtree(project.root / "data/hidden_states")


def measure_again(project: Project) -> None:
    project.set_params(benchmark__num_prompts=23)


def stream_the_states(project: Project) -> None:
    project.set_params(extract__mode="streamed")
    project.run("dvc", "repro", "--single-item", "extract")


STAGES = {
    "generate": ask_again,
    "extract": extract_again,
    "train": stream_the_states,
    "evaluate": stream_the_states,
    "benchmark": measure_again,
}
ENDS = [ctrl_c, terminate_the_group, terminate_dvc, kill_dvc, kill_the_stage]
CELLS = [
    pytest.param(stage, end, shell, marks=pytest.mark.full, id=f"{stage} {end.__name__} {shell}")
    for stage in STAGES
    for end in ENDS
    for shell in (["dash", "bash"] if stage == "generate" else ["dash"])
]


@pytest.mark.parametrize(("stage", "end", "shell"), CELLS)
def test_no_server_is_left(
    copy: Project, stage: str, end: Callable[[Run], None], shell: str
) -> None:
    """DVC runs a stage by the shell that $SHELL names."""
    STAGES[stage](copy)
    dvc = subprocess.Popen(
        ["dvc", "repro", "--single-item", stage],
        cwd=copy.root,
        env={**copy.env, "SHELL": f"/bin/{shell}"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(lambda: any("vllm serve" in line for line in copy.processes()), dvc)
    time.sleep(5)  # somewhere in its start
    end(dvc)
    dvc.wait(120)
    assert copy.processes_left() == []


def wait_for(condition: Callable[[], bool], dvc: Run) -> None:
    while not condition():
        assert dvc.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.1)
