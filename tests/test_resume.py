"""What makes a stage safe to kill: whole files, one writer, torn tails."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.errors import DataError, UserError
from pipeline.resume import (
    atomic_path,
    content_key,
    file_sha256,
    jsonl,
    one_writer,
    read_json,
    read_jsonl,
    write_bytes,
    write_json,
)
from tests.conftest import ROOT


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_block_that_raises_leaves_the_old_file_and_no_temp_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def dies_half_way() -> None:
        with atomic_path(path) as temp:
            temp.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        dies_half_way()
    assert path.read_text() == "old"
    assert files(tmp_path) == ["a.txt"]


def test_a_block_that_ends_well_puts_the_new_file_in_place(tmp_path):
    path = tmp_path / "new" / "folder" / "a.txt"
    with atomic_path(path) as temp:
        temp.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert files(path.parent) == ["a.txt"]


def test_equal_bytes_are_not_written_again(tmp_path):
    path = tmp_path / "a.bin"
    write_bytes(path, b"same")
    os.utime(path, (1, 1))
    before = path.stat()
    write_bytes(path, b"same")
    after = path.stat()
    assert (after.st_mtime, after.st_ino) == (before.st_mtime, before.st_ino)
    write_bytes(path, b"other")
    assert path.read_bytes() == b"other"
    assert path.stat().st_mtime != 1


def test_json_is_strict_sorted_and_ends_in_a_newline(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": "é"})
    assert path.read_bytes() == '{\n  "a": "é",\n  "b": 1\n}\n'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_is_no_json_number_and_keeps_the_old_file(tmp_path, value):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": value})
    assert json.loads(path.read_bytes()) == {"a": 1}


def test_a_key_depends_on_content_and_not_on_the_order_of_names():
    # sha256 of {"a":1,"b":[2]}
    expected = hashlib.sha256(b'{"a":1,"b":[2]}').hexdigest()
    assert content_key({"b": [2], "a": 1}) == expected
    assert content_key({"a": 1, "b": [3]}) != expected


def test_a_key_tells_true_1_and_the_text_apart():
    assert len({content_key(value) for value in (True, 1, "1", "true", 1.5, None)}) == 6


def test_a_file_is_hashed_by_its_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    assert file_sha256(tmp_path / "a") == hashlib.sha256(b"x" * 100_000).hexdigest()


def test_jsonl_survives_line_separators_inside_text(tmp_path):
    rows = [{"a": "one\u2028two\u0085three\rfour\nfive"}, {"a": ""}]
    write_bytes(tmp_path / "a.jsonl", jsonl(rows))
    assert list(read_jsonl(tmp_path / "a.jsonl")) == rows
    assert (tmp_path / "a.jsonl").read_bytes().count(b"\n") == 2


@pytest.mark.parametrize(
    ("content", "line"), [(b'{"a":1}\n{"a":2}\n{"a"', 3), (b'{"a":1}\n{"a"\n{"a":3}\n', 2)]
)
def test_a_torn_line_is_an_error_that_names_it(tmp_path, content, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jsonl:{line}"):
        list(read_jsonl(path))


@pytest.mark.parametrize("read", [read_json, lambda path: list(read_jsonl(path))])
def test_a_missing_file_is_a_data_error_that_names_it(tmp_path, read):
    with pytest.raises(DataError, match="gone"):
        read(tmp_path / "gone.json")


def test_a_file_that_is_no_json_is_a_data_error_that_names_it(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(DataError, match=r"a\.json"):
        read_json(tmp_path / "a.json")


def test_the_second_writer_gets_an_error_that_names_the_first(tmp_path):
    folder = tmp_path / "out"
    with (
        one_writer(folder),
        pytest.raises(UserError, match=f"process {os.getpid()}"),
        one_writer(folder),
    ):
        pass
    assert (
        not folder.exists()
    )  # the lock lies beside the output, and an empty output is a changed one


def test_the_folder_is_free_again_after_the_block_also_when_it_raised(tmp_path):
    with pytest.raises(RuntimeError), one_writer(tmp_path / "out"):
        raise RuntimeError
    with one_writer(tmp_path / "out"):
        pass


def test_a_killed_writer_holds_nothing(tmp_path):
    code = (
        "import os, sys, pathlib; from pipeline.resume import one_writer\n"
        "with one_writer(pathlib.Path(sys.argv[1])):\n"
        "    print('holding', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "out")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "holding\n"
        with (
            pytest.raises(UserError, match=f"process {holder.pid}"),
            one_writer(tmp_path / "out"),
        ):
            pass
    finally:
        holder.kill()
        holder.communicate()
    with one_writer(tmp_path / "out"):
        pass
