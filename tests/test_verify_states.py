"""verify-states: every kind of damage is found by name, and only what is damaged is made again."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline import verify_states
from pipeline.errors import DataError, UserError
from pipeline.manifest import MANIFEST, survey
from pipeline.records import HIDDEN_STATES
from pipeline.resume import one_writer
from tests.small_sequences import ROOT
from tests.test_shards import entry, folder_with, record, write

NAMES = [f"shard-0000{i}.safetensors" for i in range(3)]
BAD = HIDDEN_STATES / NAMES[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three shards of two sequences each, under data/hidden_states."""
    monkeypatch.chdir(tmp_path)
    return folder_with(
        HIDDEN_STATES,
        {name: entry(record(2 * i), record(2 * i + 1)) for i, name in enumerate(NAMES)},
    )


def flip(path: Path, place: int) -> None:
    """One bit, in the file itself; its time stays, as when a disk forgets."""
    before = path.stat()
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    os.chmod(path, before.st_mode & 0o777)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def header_only(path: Path) -> None:
    with path.open("rb") as file:
        os.truncate(path, 8 + int.from_bytes(file.read(8), "little"))


def swap(path: Path) -> None:
    shutil.copy(path.with_name(NAMES[0]), path)
    os.utime(path, (0, 0))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in the tensors": (lambda path: flip(path, -1), "its bytes have changed"),
    "a flipped bit in the header": (lambda path: flip(path, 9), "its header is damaged"),
    "a flipped bit in its entry": (lambda path: flip(path, 210), "header|its bytes"),
    "its end cut off": (lambda path: os.truncate(path, path.stat().st_size - 4), "bytes instead"),
    "its header only": (header_only, "bytes instead of"),
    "no bytes": (lambda path: os.truncate(path, 0), "0 bytes instead of"),
    "another shard": (swap, "its header describes other sequences"),
    "gone": (Path.unlink, "it is not there"),
}


def test_states_that_were_not_pulled_stay_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder would be an output that has changed: DVC removes the draft made from it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="is not there"):
        verify_states.main()
    assert not HIDDEN_STATES.exists()


@pytest.mark.parametrize("what", DAMAGES)
def test_damage_is_named_and_only_it_is_removed(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    harm, message = DAMAGES[what]
    harm(BAD)
    with pytest.raises(SystemExit) as ended:
        verify_states.main()
    assert "1 damaged and removed: `dvc repro extract`" in str(ended.value)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{BAD}: ")
    assert any(part in lines[0] for part in message.split("|"))
    assert {path.name for path in folder.iterdir()} == {NAMES[0], NAMES[2], MANIFEST}
    assert set(survey(folder)) == {NAMES[0], NAMES[2]}


def test_a_flipped_bit_under_an_old_time_is_what_the_stages_do_not_see(folder: Path) -> None:
    flip(BAD, -1)
    assert set(survey(folder)) == set(NAMES)
    with pytest.raises(SystemExit):
        verify_states.main()
    assert set(survey(folder)) == {NAMES[0], NAMES[2]}


def test_sound_shards_are_a_line_and_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    verify_states.main()
    assert capsys.readouterr().out == f"{HIDDEN_STATES}: 3 shards, all as manifest.json says\n"
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_the_command_ends_with_code_1_and_then_with_0(folder: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pipeline.verify_states"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )

    os.truncate(BAD, 100)
    ended = run()
    assert ended.returncode == 1
    assert NAMES[1] in ended.stderr
    assert "Traceback" not in ended.stderr
    folder_with(folder, {NAMES[1]: entry(record(2), record(3))})
    assert run().returncode == 0
    (folder / MANIFEST).unlink()
    ended = run()
    assert ended.returncode == 1
    assert "manifest.json: No such file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_a_killed_run_finished_stays_and_what_is_no_shard_goes(folder: Path) -> None:
    folder_with(folder / "new", {"shard-00003.safetensors": entry(record(6))})
    (folder / "new/shard-00003.safetensors").rename(folder / "shard-00003.safetensors")
    shutil.rmtree(folder / "new")
    verify_states.main()
    (folder / "shard-00004.safetensors").write_bytes(b"half a shard")
    with pytest.raises(SystemExit):
        verify_states.main()
    assert {path.name for path in folder.glob("shard-*")} == {*NAMES, "shard-00003.safetensors"}


def test_what_a_killed_run_put_in_the_place_of_another_is_no_damage(folder: Path) -> None:
    """Other layers, say, and no manifest of them yet."""
    path = folder / NAMES[0]
    write(path, entry(record(0), record(1), served_as="another"))
    verify_states.main()
    assert path.exists()
    os.utime(path, (0, 0))  # an old one is
    with pytest.raises(SystemExit):
        verify_states.main()
    assert not path.exists()


@pytest.mark.parametrize("lock", ["", "[]", "stages: 3", "<<<<<<< ours\na: 1\n=======\n"])
def test_a_lock_that_is_none_hides_no_damage(folder: Path, lock: str) -> None:
    Path("dvc.lock").write_text(lock)
    os.truncate(BAD, 100)
    with pytest.raises(SystemExit):
        verify_states.main()
    assert not BAD.exists()


def test_a_running_extract_is_not_disturbed(folder: Path) -> None:
    os.truncate(BAD, 100)
    with one_writer(HIDDEN_STATES), pytest.raises(UserError, match="is being written by"):
        verify_states.main()
    assert BAD.exists()


def test_without_a_manifest_nothing_is_removed(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is no JSON"):
        verify_states.main()
    assert {path.name for path in folder.glob("shard-*")} == set(NAMES)


def test_all_bytes_are_counted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_states, "PIECE", 1000)
    seen: list[int] = []
    listed = verify_states.load_manifest(folder).shards[0]
    assert verify_states.damage(folder / listed.file, listed, seen.append) is None
    assert sum(seen) == listed.num_bytes
    assert len(seen) == -(-listed.num_bytes // 1000)


# With DVC's cache

STAGE = """
import shutil
from pathlib import Path
for source in Path("source").iterdir():
    target = Path("data/hidden_states") / source.name
    if not target.exists():
        print("made", source.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
"""
DVC_YAML = """
stages:
  extract:
    cmd: exec python stage.py
    deps: [stage.py]
    outs: [data/hidden_states: {persist: true}]
"""


def dvc(*arguments: str) -> str:
    return subprocess.run(
        ["dvc", *arguments],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ).stdout


def project_with_cache(folder: Path, cache_type: str) -> dict[str, bytes]:
    """A project whose one stage makes, always the same, what of the folder is not there."""
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    folder.rename("source")
    subprocess.run(["git", "init", "-q"], check=True)
    dvc("init", "-q")
    dvc("config", "core.analytics", "false")
    dvc("config", "cache.type", cache_type)
    Path("stage.py").write_text(STAGE)
    Path("dvc.yaml").write_text(DVC_YAML)
    dvc("repro")
    assert BAD.is_symlink() == (cache_type == "symlink")
    assert (BAD.stat().st_nlink > 1) == (cache_type == "hardlink")
    return sound


@pytest.mark.parametrize("cache_type", ["symlink", "hardlink"])
def test_damage_in_dvcs_cache_does_not_come_back(folder: Path, cache_type: str) -> None:
    sound = project_with_cache(folder, cache_type)
    flip(BAD, -1)
    with pytest.raises(SystemExit, match="`dvc repro extract` makes again"):
        verify_states.main()
    made = [line for line in dvc("repro").splitlines() if line.startswith("made")]
    assert made == [f"made {NAMES[1]}"]
    verify_states.main()
    shutil.rmtree(folder)
    dvc("checkout")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound


def test_a_sound_copy_in_dvcs_cache_is_said_and_used(folder: Path) -> None:
    sound = project_with_cache(folder, "copy")
    flip(BAD, -1)
    with pytest.raises(SystemExit, match="`dvc checkout data/hidden_states` brings back"):
        verify_states.main()
    dvc("checkout", "data/hidden_states")
    verify_states.main()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == sound


def test_what_did_not_change_is_not_pushed_again(folder: Path) -> None:
    """The data grows: its last shard changes and one is added."""
    project_with_cache(folder, "copy")
    dvc("remote", "add", "-d", "there", "remote")

    def pushed() -> set[Path]:
        dvc("push")
        return {path for path in Path("remote").rglob("*") if path.is_file()}

    first = pushed()
    grown = {NAMES[2]: entry(record(4), record(5), record(6)), "shard-00003.safetensors": entry()}
    for name, shard in grown.items():
        write(folder / name, shard)
        write(Path("source") / name, shard)
    dvc("repro", "--force")
    new = {path: path.stat().st_size for path in pushed() - first}
    sizes = {(folder / name).stat().st_size for name in grown}
    assert len(new) == 3  # and DVC's list of the folder
    assert sizes < set(new.values())
