"""One run of the real pipeline, in a clone of the working tree, that all tests here share."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Project:
    """A git and DVC working tree to run the pipeline in."""

    root: Path
    extra_env: dict[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """As in the activated .venv: what a person has who types `dvc repro`."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "DVC_NO_ANALYTICS": "1", "NO_COLOR": "1"}
        return {**env, **self.extra_env}

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if check and done.returncode:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}")
        return done

    def stale(self) -> set[str]:
        """The stages that `dvc status` says have changed."""
        status = subprocess.run(
            ["dvc", "status", "--json"],
            cwd=self.root,
            env=self.env,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return set(json.loads(status.stdout))

    def repro(self, *arguments: str) -> list[str]:
        """`dvc repro`, and the names of the stages that it ran."""
        return ran_stages(self.run("dvc", "repro", *arguments).stdout)

    def set_params(self, **values: object) -> None:
        """`section__key=value`, as a person edits params.yaml."""
        path = self.root / "params.yaml"
        params = yaml.safe_load(path.read_text())
        for name, value in values.items():
            *sections, key = name.split("__")
            place = params
            for section in sections:
                place = place[section]
            place[key] = value
        path.write_text(yaml.safe_dump(params, sort_keys=False))

    def traces(self) -> list[dict[str, Any]]:
        """The rows that `generate` ended with, in their order."""
        parts = sorted((self.root / "data/traces").glob("part-*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_bytes().splitlines()]

    def processes(self) -> list[str]:
        """Command lines of all processes that work in this tree."""
        found = []
        for process in psutil.process_iter():
            try:
                if Path(process.cwd()).is_relative_to(self.root):
                    found.append(" ".join(process.cmdline()))
            except (psutil.Error, OSError):
                continue
        return found

    def processes_left(self) -> list[str]:
        """Those that have not ended after a minute."""
        deadline = time.monotonic() + 60
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        return self.processes()


# How a run of DVC ends


Run = subprocess.Popen[bytes]  # of DVC, in a session of its own as in a terminal


def ctrl_c(dvc: Run) -> None:
    os.killpg(dvc.pid, signal.SIGINT)


def terminate_the_group(dvc: Run) -> None:
    os.killpg(dvc.pid, signal.SIGTERM)


def terminate_dvc(dvc: Run) -> None:
    dvc.terminate()


def kill_dvc(dvc: Run) -> None:
    dvc.kill()


def kill_the_stage(dvc: Run) -> None:
    [stage] = [child for child in psutil.Process(dvc.pid).children() if child.name() != "sh"]
    stage.kill()


def ran_stages(output: str) -> list[str]:
    return [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]


def commit(project: Project, message: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    project.run("git", "add", "-A")
    project.run("git", *identity, "commit", "-q", "--allow-empty", "-m", message)


def clone_of_the_working_tree(target: Path) -> Project:
    """What git would have if everything here were committed, and no DVC cache."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    project = Project(target)
    project.run("git", "init", "-q")
    commit(project, "clone")
    return project


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A clone in which `dvc repro` has run from nothing to the end."""
    project = clone_of_the_working_tree(tmp_path_factory.mktemp("finished"))
    project.repro()
    yield project
    assert project.processes() == []


@pytest.fixture(scope="session")
def identified(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A clone in which `identify` has run: it can be asked as soon as there are questions."""
    project = clone_of_the_working_tree(tmp_path_factory.mktemp("identified"))
    project.run("python", "-m", "pipeline.identify")
    return project


@pytest.fixture
def copy(finished: Project, tmp_path: Path) -> Project:
    """The finished run, to change at will."""
    shutil.copytree(finished.root, tmp_path / "copy", symlinks=True)
    return Project(tmp_path / "copy")
