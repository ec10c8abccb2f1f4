"""What every stage's process does: one line and exit code 1, SIGTERM, the end of its parent."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

STAGE = """
import pathlib, sys, time
from pipeline import errors, stage
def main():
    {body}
stage.run_stage("prompts", main)
"""
WAITING = """try:
        pathlib.Path("ready").write_text("")
        time.sleep(300)
    finally:
        pathlib.Path("finally").write_text("")"""


@pytest.fixture
def start(tmp_path: Path):
    """`start("body of main()")`: a stage in a process of its own, in a scratch folder."""
    started = []

    def run(body: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", STAGE.format(body=body)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def log(tmp_path: Path) -> str:
    return (tmp_path / "logs/prompts.log").read_text()


def test_a_stage_that_ends_well_exits_0_and_says_which_it_is(start):
    process = start("print('42 rows')")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "2/8 prompts" in out
    assert "42 rows" in out
    assert err == ""


@pytest.mark.parametrize("kind", ["ParamsError", "DataError", "ServerError", "BadRun"])
def test_a_pipeline_error_is_one_line_and_exit_code_1(start, tmp_path, kind):
    words = "params.yaml: generate.concurrency [1;2] is no [bold]number[/bold] " + "long " * 40
    process = start(f"raise errors.{kind}({words!r})")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.strip() == f"prompts: {words}".strip()
    assert f"errors.{kind}" in log(tmp_path)
    assert "Traceback" in log(tmp_path)


def test_an_unexpected_error_is_one_line_too_and_names_the_log(start, tmp_path):
    process = start("raise KeyError('token_ids')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "prompts: unexpected KeyError: 'token_ids'" in err
    assert "logs/prompts.log" in err
    assert "Traceback" in log(tmp_path)


@pytest.mark.parametrize("kind", ["ENOSPC", "EDQUOT", "EFBIG"])
def test_a_full_disk_is_one_line_that_says_what_to_do(start, tmp_path, kind):
    process = start(f"import errno, os; raise OSError(errno.{kind}, os.strerror(errno.{kind}))")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.count("\n") == 1
    assert "make room and run again" in err
    assert "Traceback" in log(tmp_path)


def test_the_log_grows_with_each_failure(start, tmp_path):
    for words in ("first", "second"):
        start(f"raise errors.DataError({words!r})").communicate(timeout=60)
    assert "first" in log(tmp_path)
    assert "second" in log(tmp_path)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_an_interrupted_stage_runs_its_finally_blocks(start, tmp_path, eventually, number, code):
    process = start(WAITING)
    eventually((tmp_path / "ready").exists, "the stage")
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert (tmp_path / "finally").exists()
    assert "Traceback" not in err


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_stage_ends_in_order_when_its_parent_is_killed(tmp_path, eventually):
    """As `kill -9` of DVC: the stage gets SIGTERM and leaves through its finally blocks."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])",
            STAGE.format(body=WAITING),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually((tmp_path / "ready").exists, "the stage")
    finally:
        parent.kill()
        parent.wait()
    eventually((tmp_path / "finally").exists, "the stage's way out")
