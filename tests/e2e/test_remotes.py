"""What one machine computed, pulled by another: through the folder in git, S3, SSH and WebDAV."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e import remotes
from tests.e2e.conftest import ROOT, Project, commit
from tests.e2e.remotes import Remote

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

# Of the Makefile: all but the hidden states.
SHARED = re.findall(r"^SHARED +:= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
MB_IN_GIT = 8
UNFINISHED = ".cache/pull-unfinished"
# Without its set-up, as if that were the newest.
READY = next((ROOT / ".venv").glob(".ready-*"))
MAKE = ("make", "-o", f".venv/{READY.name}")


def contents(root: Path) -> dict[str, bytes]:
    paths = [path for name in SHARED for path in [root / name, *(root / name).rglob("*")]]
    return {str(path.relative_to(root)): path.read_bytes() for path in paths if path.is_file()}


@pytest.fixture
def first(copy: Project) -> Project:
    """The machine that computed, with all of it committed."""
    (copy.root / ".venv").symlink_to(ROOT / ".venv")
    shutil.rmtree(copy.root / "remote", ignore_errors=True)
    commit(copy, "run")
    return copy


def clone_of(project: Project, target: Path) -> Project:
    subprocess.run(["git", "clone", "-q", project.root, target], check=True)
    (target / ".venv").symlink_to(ROOT / ".venv")
    return Project(target)


def use(project: Project, remote: Remote) -> None:
    for name, value in remote.settings.items():
        project.run("dvc", "remote", "modify", "--local", "mine", name, value)
    project.extra_env = remote.env


@pytest.mark.parametrize("storage", [remotes.s3, remotes.ssh, remotes.webdav])
def test_what_one_clone_pushes_another_pulls(
    first: Project, tmp_path: Path, storage: Callable[[Path], AbstractContextManager[Remote]]
) -> None:
    (tmp_path / "store").mkdir()
    with storage(tmp_path / "store") as remote:
        first.run("dvc", "remote", "add", "-d", "mine", remote.url)
        commit(first, "a remote of our own")
        second = clone_of(first, tmp_path / "second")
        for project in (first, second):
            use(project, remote)
        first.run("dvc", "push", *SHARED)
        second.run(*MAKE, "pull")
        assert contents(second.root) == contents(first.root) != {}
        config = (second.root / ".dvc/config").read_text()
        assert not any(secret in config for secret in [remotes.PASSWORD, "keyfile"])


def test_a_clone_has_all_but_the_states_from_git_alone(first: Project, tmp_path: Path) -> None:
    """And runs nothing, when told that they may be missing."""
    first.run(*MAKE, "share")
    stored = [path for path in (first.root / "remote").rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in stored) <= MB_IN_GIT * 1e6
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    second.run(*MAKE, "pull")
    assert contents(second.root) == contents(first.root)
    assert second.repro("--allow-missing") == []
    status = json.dumps(json.loads(second.run("dvc", "status", "--json").stdout.split("\n")[-2]))
    assert "data/hidden_states" in status
    assert not any(name in status for name in SHARED)


def test_sharing_again_leaves_no_old_objects(first: Project) -> None:
    first.run(*MAKE, "share")
    old = first.root / "remote/files/md5/00/0123456789abcdef0123456789abcd"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(b"of an earlier run")
    first.run(*MAKE, "share")
    assert not old.exists()


def test_what_is_not_one_whole_run_is_not_shared(first: Project) -> None:
    first.run(*MAKE, "share")
    before = sorted(path for path in (first.root / "remote").rglob("*"))
    first.set_params(prompts__sample_cap=390)
    first.repro("prompts")
    stale = first.run(*MAKE, "share", check=False)
    assert (
        "share: `dvc repro` first, it is not one run yet: Running stage 'generate'" in stale.stdout
    )
    first.run("git", "checkout", "-q", ".")
    first.run("dvc", "checkout")
    shutil.rmtree(first.root / ".dvc/cache")
    lacking = first.run(*MAKE, "share", check=False)
    assert f"DVC's cache does not have all of {', '.join(SHARED)}" in lacking.stdout
    assert sorted(path for path in (first.root / "remote").rglob("*")) == before


@pytest.mark.parametrize("named", ["", "./data/hidden_states/", "extract", "data/hidden_states"])
def test_the_states_do_not_fit_into_git(first: Project, named: str) -> None:
    done = first.run(*MAKE, "push", f"TARGETS={named}", check=False)
    assert done.returncode
    assert "MB are too much for remote/, which is in git" in done.stdout
    assert "dvc remote add -d mine s3://bucket/path" in done.stdout
    assert not (first.root / "remote").exists()


def test_a_damaged_object_is_not_taken_for_the_data(first: Project, tmp_path: Path) -> None:
    first.run(*MAKE, "share")
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    part = first.root / "data/traces/part-00000.jsonl"
    name = hashlib.md5(part.read_bytes()).hexdigest()
    stored = second.root / "remote/files/md5" / name[:2] / name[2:]
    stored.chmod(0o644)
    os.truncate(stored, 100)
    assert second.run(*MAKE, "pull", check=False).returncode
    assert not (second.root / "data/traces/part-00000.jsonl").exists()
    assert (second.root / UNFINISHED).exists()


def test_after_a_failed_pull_nothing_is_computed_unasked(first: Project, tmp_path: Path) -> None:
    """An object is missing; then the answers that someone paid for would be asked for again."""
    first.run(*MAKE, "share")
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    lock = (first.root / "dvc.lock").read_text()
    trace_hash = lock.split("path: data/traces\n")[-1].split("md5: ")[1][:32]
    missing = second.root / "remote/files/md5" / trace_hash[:2] / trace_hash[2:]
    missing = missing.with_name(missing.name + ".dir")
    held = missing.read_bytes()
    missing.unlink()
    done = second.run(*MAKE, "pull", check=False)
    assert done.returncode
    assert trace_hash in done.stdout
    stopped = second.run(*MAKE, "repro", check=False)
    assert stopped.returncode
    assert "the last 'make pull' did not finish" in stopped.stdout
    assert not (second.root / "data/traces").exists()
    missing.write_bytes(held)
    second.run(*MAKE, "pull")
    assert contents(second.root) == contents(first.root)


def test_a_wrong_password_is_said_and_changes_nothing(first: Project, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with remotes.webdav(tmp_path / "store") as remote:
        first.run("dvc", "remote", "add", "-d", "mine", remote.url)
        use(first, remote)
        first.run("dvc", "push", *SHARED)
        before = contents(first.root)
        first.run("dvc", "remote", "modify", "--local", "mine", "password", "wrong")
        shutil.rmtree(first.root / ".dvc/cache")
        done = first.run(*MAKE, "pull", check=False)
        assert done.returncode
        assert "401" in done.stdout or "uthoriz" in done.stdout, done.stdout
        assert contents(first.root) == before


def test_after_a_pull_a_raised_cap_asks_only_the_new_questions(
    first: Project, tmp_path: Path
) -> None:
    first.run(*MAKE, "share")
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    second.run(*MAKE, "pull")
    old = second.traces()
    second.set_params(prompts__sample_cap=410)
    assert second.repro("generate") == ["prompts", "generate"]
    keys = {trace["key"] for trace in old}
    assert [trace for trace in second.traces() if trace["key"] in keys] == old
    assert len(second.traces()) == len(old) + 10
    log = (second.root / "logs/vllm-generate.log").read_text()
    # The ten, and what the probe asks of a server that it does not know.
    assert 10 <= log.count("POST /v1/chat/completions") < 40


def test_only_what_was_to_come_ends_the_wait_for_it(first: Project, tmp_path: Path) -> None:
    """The folder in git holds no states: a pull of the rest does not bring them."""
    first.run(*MAKE, "share")
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    refused = second.run(*MAKE, "pull", "TARGETS=data/trace", check=False)
    assert "'data/trace' does not exist as an output" in refused.stdout
    assert not (second.root / UNFINISHED).exists()
    assert second.run(*MAKE, "pull", "TARGETS=data/hidden_states", check=False).returncode
    second.run(*MAKE, "pull")
    stopped = second.run(*MAKE, "repro", check=False)
    assert stopped.returncode
    assert 'make pull TARGETS="data/hidden_states"' in stopped.stdout
    shutil.copytree(first.root / ".dvc/cache", second.root / ".dvc/cache", dirs_exist_ok=True)
    second.run(*MAKE, "pull", "TARGETS=data/hidden_states")
    assert not (second.root / UNFINISHED).exists()


@pytest.mark.full
def test_a_pull_that_was_killed_goes_on(first: Project, tmp_path: Path) -> None:
    first.run(*MAKE, "share")
    commit(first, "share")
    second = clone_of(first, tmp_path / "second")
    for num_files in (1, 4, 8):
        kill_when(num_files, second.root / ".dvc/cache", second, *MAKE, "pull")
        assert (second.root / UNFINISHED).exists()
    second.run(*MAKE, "pull")
    assert contents(second.root) == contents(first.root)


@pytest.mark.full
def test_a_push_that_was_killed_goes_on(first: Project, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with remotes.webdav(tmp_path / "store") as remote:
        first.run("dvc", "remote", "add", "-d", "mine", remote.url)
        commit(first, "a remote of our own")
        second = clone_of(first, tmp_path / "second")
        for project in (first, second):
            use(project, remote)
        for num_files in (1, 4, 8):
            kill_when(num_files, tmp_path / "store", first, *MAKE, "push")
        first.run(*MAKE, "push")
        second.run(*MAKE, "pull")
        assert contents(second.root) == contents(first.root)


def kill_when(num_files: int, there: Path, project: Project, *command: str) -> None:
    """Kill a command as soon as so many files lie in a folder."""
    run = subprocess.Popen(
        command,
        cwd=project.root,
        env=project.env,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while sum(path.is_file() for path in there.rglob("*")) < num_files:
        assert run.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
