"""The extract stage against a server that writes known states, and once against vLLM."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from pipeline import capture, extract, parity, room, states_server
from pipeline.errors import DataError, ServerError, ServerStopped, UserError, VerifierError
from pipeline.manifest import load_manifest
from pipeline.resume import one_writer
from pipeline.shards import HiddenStates
from tests.small_sequences import (
    HIDDEN_SIZE,
    NUM_LAYERS,
    ROOT,
    sequence,
    write_sequences,
    write_verifier,
)
from tests.small_sequences import write_params as _write_params

Payload = dict[str, torch.Tensor]


def states_of(ids: list[int]) -> Payload:
    """What the server below says the states of these tokens are: [T, 4, H], all different."""
    value = torch.tensor(ids).float()[:, None, None] * 100
    hidden = value + 10 * torch.arange(4)[:, None] + torch.arange(HIDDEN_SIZE) / HIDDEN_SIZE
    return {"hidden_states": hidden, "token_ids": torch.tensor(ids)}


class StatesServer:
    """Speaks vLLM's completions API with hidden states in files; `spoil` changes an answer."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[list[int]] = []
        self.keys: list[str | None] = []
        self.spoil: Callable[[list[int], dict[str, Any], Payload], int | None] | None = None
        self.model, self.max_model_len = "models/verifier", 33
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                models = {"data": [{"id": server.model, "max_model_len": server.max_model_len}]}
                self.send(models if self.path == "/v1/models" else {"version": "0.32.0"})

            def do_POST(self) -> None:
                ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
                server.asked.append(ids)
                server.keys.append(self.headers["Authorization"])
                path = folder / f"{len(server.asked)}-{threading.get_ident()}.safetensors"
                choice = {
                    "index": 0,
                    "text": "",
                    "finish_reason": "length",
                    "prompt_token_ids": ids,
                }
                answer = {
                    "id": "x",
                    "object": "text_completion",
                    "created": 0,
                    "model": "m",
                    "choices": [choice],
                    "kv_transfer_params": {"hidden_states_path": str(path)},
                }
                payload = states_of(ids)
                code = server.spoil(ids, answer, payload) if server.spoil else None
                if code is None:
                    save_file(payload, path)
                self.send(answer, code or 200)

            def send(self, body: object, code: int = 200) -> None:
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesServer]:
    """The server, in a project folder with ten sequences: 0…3, 4…7 and 8, 9 make a shard each."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "staging").mkdir()
    write_params()
    write_verifier(tmp_path, weights=[])
    write_sequences(tmp_path, ROWS)
    fake = StatesServer(tmp_path / "staging")
    # Its states are no verifier's: tests/test_parity.py has the gate.
    monkeypatch.setattr(parity, "prove", lambda *_: None)
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", fake.base_url)
    yield fake
    fake.close()


ROWS = [sequence(i, num_tokens=8 + i) for i in range(10)]
FOLDER = Path("data/hidden_states")


def write_params(**changes: Any) -> None:
    Path("models/verifier").mkdir(parents=True, exist_ok=True)  # params ask for a folder
    _write_params(Path(), **changes)


def files() -> dict[str, tuple[bytes, int]]:
    """Contents and times of all that the stage wrote."""
    found = [*FOLDER.iterdir(), Path("reports/extract.json")]
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in found}


def report() -> Any:
    return json.loads(Path("reports/extract.json").read_text())


def status() -> Any:
    return json.loads(Path("logs/extract.status.json").read_text())


def test_states_are_those_of_the_server(server: StatesServer) -> None:
    extract.main()
    states = HiddenStates(FOLDER)
    for row in ROWS:
        expected = states_of(row["input_ids"])
        token_ids, aux, last = states.read(row["key"])
        assert token_ids.tolist() == row["input_ids"]
        assert torch.equal(aux, expected["hidden_states"][:, :3])
        # From the first generated token, number 4, on.
        assert torch.equal(last, expected["hidden_states"][4:, 3])
    assert sorted(server.asked) == sorted(row["input_ids"] for row in ROWS)
    assert not list(Path("staging").iterdir())
    found = report()
    assert (found["rows_in"], found["rows_stored"], found["shards"]) == (10, 10, 3)
    assert (found["tokens"], found["last_states"]) == (8 * 10 + 45, 4 * 10 + 45)
    assert sum(found["rejected"].values()) == 0


def test_nothing_to_do_asks_nothing_and_changes_nothing(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract.main()
    before = files()
    server.close()
    monkeypatch.setattr(states_server, "serve", None)
    write_params(extract={"concurrency": 7, "timeout_s": 3})
    extract.main()
    assert files() == before


def test_growth_asks_for_the_new_and_touches_the_last_shard(server: StatesServer) -> None:
    extract.main()
    before, server.asked[:] = files(), []
    more = [*ROWS, sequence(10), sequence(11), sequence(12)]
    shutil.rmtree("data/sequences")
    write_sequences(Path(), more)
    extract.main()
    assert sorted(server.asked) == sorted(row["input_ids"] for row in more[10:])
    after = files()
    changed = {name for name in after if before.get(name) != after[name]}
    assert changed == {
        "shard-00002.safetensors",
        "shard-00003.safetensors",
        "manifest.json",
        "extract.json",
    }


def test_a_grown_folder_is_that_of_a_single_run(server: StatesServer) -> None:
    write_sequences(Path(), ROWS[:6])
    extract.main()
    shutil.rmtree("data/sequences")
    write_sequences(Path(), ROWS)
    extract.main()
    grown = {name: data for name, (data, _) in files().items()}
    shutil.rmtree(FOLDER)
    extract.main()
    assert {name: data for name, (data, _) in files().items()} == grown


def test_fewer_sequences_remove_their_shards_and_nothing_else(server: StatesServer) -> None:
    extract.main()
    (FOLDER / "notes.txt").write_text("mine")
    for name in ("shard-00001.safetensors", "shard-00009.safetensors", "plan.json", "parity.json"):
        (FOLDER / f"{name}.tmp").write_text("half of it")
    server.asked.clear()
    shutil.rmtree("data/sequences")
    write_sequences(Path(), ROWS[:6])
    extract.main()
    assert server.asked == []
    assert {path.name for path in FOLDER.iterdir()} == {
        "notes.txt",
        "manifest.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    }


def test_the_turns_of_a_conversation_lie_in_one_shard_in_their_order(server: StatesServer) -> None:
    """Prompts 1 (held out) and 4 have twenty turns, 5 lost its first; four prompts a shard."""
    turns = {0: [0], 1: range(20), 2: [0], 3: [0], 4: range(20), 5: [1]}
    rows = [
        sequence(100 * index + turn) | {"prompt_index": index, "sample_id": f"q{index}_gen{turn}"}
        for index, numbers in turns.items()
        for turn in numbers
    ]
    shutil.rmtree("data/sequences")
    write_sequences(Path(), rows, num_held_out=21)
    extract.main()
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    assert [[row["sample_id"] for row in shard["sequences"]] for shard in manifest["shards"]] == [
        ["q0_gen0", *(f"q1_gen{turn}" for turn in range(20)), "q2_gen0", "q3_gen0"],
        [*(f"q4_gen{turn}" for turn in range(20)), "q5_gen1"],
    ]
    states = HiddenStates(FOLDER)
    assert [states.read(row["key"]).token_ids.tolist() for row in rows] == [
        row["input_ids"] for row in rows
    ]


def test_other_layers_are_asked_for_again(server: StatesServer) -> None:
    extract.main()
    server.asked.clear()
    write_params(extract={"layer_ids": [0, 1, 3]})
    extract.main()
    assert len(server.asked) == 10


@pytest.mark.parametrize(
    ("served", "asked"),
    [
        ({"dtype": "bfloat16"}, 10),
        ({"quantization": "fp8"}, 10),
        ({"config_sha256": "d" * 64}, 10),
        ({"server_args": ["--gpu-memory-utilization", "0.8"]}, 0),
    ],
)
def test_a_server_that_computes_something_else_is_asked_again(
    server: StatesServer, served: dict[str, Any], asked: int
) -> None:
    extract.main()
    server.asked.clear()
    if "config_sha256" in served:
        write_verifier(Path(), weights=[], **served)
    else:
        write_params(verifier=served)
    extract.main()
    assert len(server.asked) == asked


def test_the_servers_key_is_sent_and_no_proxy_is_asked(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    extract.main()
    assert server.keys == ["Bearer a key"] * 10


def test_a_damaged_shard_is_made_again(server: StatesServer) -> None:
    extract.main()
    before = {name: data for name, (data, _) in files().items()}
    server.asked.clear()
    shard = FOLDER / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    extract.main()
    assert len(server.asked) == 4
    assert {name: data for name, (data, _) in files().items()} == before


WITHOUT_THE_GATE = """
from pipeline import extract, parity

parity.prove = lambda *_: None
extract.main()
"""


def test_a_killed_run_goes_on_where_it_was(server: StatesServer) -> None:
    killed, first = threading.Event(), [row["input_ids"] for row in ROWS[:4]]

    def wait_for_the_kill(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        if ids not in first:
            killed.wait()

    server.spoil = wait_for_the_kill
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_THE_GATE],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (FOLDER / "shard-00000.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    written = (FOLDER / "shard-00000.safetensors").stat().st_mtime_ns
    server.asked.clear()
    killed.set()
    extract.main()
    # As sets: the server may read a last request of the killed run only now.
    assert set(map(tuple, server.asked)) == {tuple(row["input_ids"]) for row in ROWS[4:]}
    assert (FOLDER / "shard-00000.safetensors").stat().st_mtime_ns == written
    assert report()["rows_stored"] == 10


def test_a_second_writer_is_told(server: StatesServer) -> None:
    with one_writer(FOLDER), pytest.raises(UserError, match="is being written by process"):
        extract.main()


# In flight and in memory


def test_the_longest_of_a_shard_are_asked_first(server: StatesServer) -> None:
    write_params(extract={"concurrency": 1})
    extract.main()
    order = [ROWS.index(row) for ids in server.asked for row in ROWS if row["input_ids"] == ids]
    assert order == [3, 2, 1, 0, 7, 6, 5, 4, 9, 8]


def test_a_slow_disk_holds_the_model_up(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten shards of one sequence, room for two: the others are not even opened."""
    in_memory: list[int] = [0]

    class Slow(capture.ShardWriter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            in_memory.append(in_memory[-1] + 1)

        def write(self) -> Any:
            time.sleep(0.1)
            entry = super().write()
            in_memory.append(in_memory[-1] - 1)
            return entry

    monkeypatch.setattr(capture, "ShardWriter", Slow)
    write_params(extract={"samples_per_shard": 1, "concurrency": 8})
    extract.main()
    assert max(in_memory) == 2
    assert report()["shards"] == 10


def test_requests_go_on_while_a_shard_is_written(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a single worker too: the first shard is not written before the second is asked for."""
    second_asked = threading.Event()
    server.spoil = lambda ids, *_: second_asked.set() if ids == ROWS[4]["input_ids"] else None
    write = capture.ShardWriter.write

    def waits(shard: Any) -> Any:
        assert second_asked.wait(30)
        return write(shard)

    monkeypatch.setattr(capture.ShardWriter, "write", waits)
    write_params(extract={"concurrency": 1})
    extract.main()
    assert report()["rows_stored"] == 10


def test_what_is_said_of_a_run(server: StatesServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.spoil = bad_request
    extract.main()
    found = status()
    manifest = load_manifest(FOLDER)
    assert found["state"] == "done"
    assert (found["total"], found["done"], found["in_flight"]) == (10, 10, 0)
    assert found["tokens"] == 8 * 10 + 45 - len(BAD)
    assert (found["shards"], found["shards_written"]) == (3, 3)
    assert found["bytes_written"] == sum(shard.num_bytes for shard in manifest.shards)
    assert found["bytes_free"] > 0
    assert found["seconds_left"] == 0
    assert found["rejected"] == {"refused": 1}


# Room


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3"])
def test_what_a_shard_takes_is_known_before(server: StatesServer, dtype: str) -> None:
    write_params(extract={"dtype": dtype})
    extract.main()
    for shard in load_manifest(FOLDER).shards:
        foretold = room.num_bytes(shard.entry(), HIDDEN_SIZE)
        assert shard.num_bytes <= foretold <= shard.num_bytes + room.PAGE


def test_too_little_room_is_told_before_anything_is_asked(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(".")._replace(free=20_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        UserError, match=r"need 0.0\d\d MB, but 0.020 MB are free in .*extract.dtype"
    ):
        extract.main()
    assert server.asked == []


def test_what_is_replaced_makes_room_and_what_is_copied_from_does_not(
    server: StatesServer,
) -> None:
    extract.main()
    sizes = {shard.file: shard.num_bytes for shard in load_manifest(FOLDER).shards}
    todo = extract.plan(
        {
            name: entry.model_copy(update={"layer_ids": [0, 1, 3, 4]})
            for name, entry in wanted().items()
        },
        extract.survey(FOLDER),
    )
    each = [room.num_bytes(entry, HIDDEN_SIZE) for entry in todo.to_make.values()]
    old = list(sizes.values())
    most = max(sum(each[: n + 1]) - sum(old[:n]) for n in range(3))
    assert room.most_bytes(todo, HIDDEN_SIZE, FOLDER) == most
    copied = {f"{n}": (name, 0) for n, name in enumerate(sizes)}
    assert room.most_bytes(replace(todo, known=copied), HIDDEN_SIZE, FOLDER) == sum(each)


def wanted() -> Any:
    sequences = extract.load_sequences(extract.SEQUENCES)
    return extract.wanted_shards(sequences, extract.load_params(), extract.load_verifier())


@pytest.fixture
def small_disk(server: StatesServer) -> Iterator[Path]:
    """data/hidden_states on a file system of 128 kB, which has room for the shards."""
    FOLDER.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(FOLDER)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield FOLDER.resolve()
    subprocess.run(["umount", "-l", str(FOLDER.resolve())], check=True)


@pytest.mark.parametrize("looks_first", [True, False])
def test_a_disk_that_fills_up_stops_the_run_and_keeps_what_is_stored(
    server: StatesServer,
    small_disk: Path,
    looks_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else fills it after the first shard; found by a look at it, or by the write."""
    if not looks_first:
        monkeypatch.setattr(capture, "require", lambda *_: None)
    first, filler = small_disk / "shard-00000.safetensors", small_disk / "filler"

    def fill(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        if ids == ROWS[4]["input_ids"]:  # the last to be asked of its shard
            while not first.exists():
                time.sleep(0.01)
            filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))

    server.spoil = fill
    write_params(extract={"concurrency": 1})
    with pytest.raises(
        UserError,
        match="the next shard, need" if looks_first else "No space left on device .*stays",
    ):
        extract.main()
    kept = first.read_bytes()
    assert not list(small_disk.glob("*.tmp"))
    assert status()["state"] == "stopped"
    filler.unlink()
    server.spoil = None
    server.asked.clear()
    extract.main()
    assert report()["rows_stored"] == 10
    assert first.read_bytes() == kept
    assert len(server.asked) == 6


def test_a_limit_on_files_is_told_in_one_line(server: StatesServer) -> None:
    """As ENOSPC, but from the kernel's other refusal, without a mount."""
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, -1)){WITHOUT_THE_GATE}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code.replace("extract.main()", RUN_STAGE)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "over the limit for a file" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(FOLDER.glob("*.tmp"))


RUN_STAGE = """
from pipeline.stage import run_stage
run_stage("extract", extract.main)
"""


def test_the_staging_folder_of_a_killed_run_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(states_server, "SHARED_MEMORY", tmp_path / "shm")
    Path("shm").mkdir()
    with states_server._staging_folder(1000, "extract") as staging:
        assert staging.parent == tmp_path / "shm"
    for folder in (staging, Path("data/.staging/extract")):
        folder.mkdir(parents=True)
        (folder / "left.safetensors").write_bytes(b"half a")
    with states_server._staging_folder(1000, "extract") as again:
        assert again == staging
        assert list(staging.iterdir()) == []
        assert not Path("data/.staging/extract").exists()
    assert not staging.exists()


def test_without_room_in_memory_the_staging_folder_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(states_server, "SHARED_MEMORY", tmp_path / "shm")
    Path("shm").mkdir()
    usage = shutil.disk_usage(tmp_path)
    in_memory = {tmp_path / "shm": usage._replace(free=999)}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: in_memory.get(folder, usage))
    with states_server._staging_folder(1000, "extract") as staging:
        assert staging == tmp_path / "data/.staging/extract"
    usage = usage._replace(free=998)
    with (
        pytest.raises(UserError, match=r"requests in flight need .*smaller extract.concurrency"),
        states_server._staging_folder(1000, "extract"),
    ):
        pass
    assert not staging.exists()


# Several servers


@pytest.fixture
def second(server: StatesServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesServer]:
    """A second server beside the first, and 60 sequences."""
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [sequence(i) for i in range(60)])
    another = StatesServer(Path("staging").resolve())
    urls = f"{server.base_url},{another.base_url}"
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", urls)
    yield another
    another.close()


def test_servers_work_side_by_side(server: StatesServer, second: StatesServer) -> None:
    together = threading.Barrier(2)

    def waits(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        together.wait(30)

    server.spoil = second.spoil = waits
    extract.main()
    assert report()["rows_stored"] == 60
    assert len(server.asked) == len(second.asked) == 30


def test_a_server_that_dies_leaves_its_work_to_the_other(
    server: StatesServer, second: StatesServer
) -> None:
    write_params(extract={"concurrency": 8})

    def dies(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        if len(second.asked) > 5:
            second.close()
            raise ConnectionResetError

    second.spoil = dies
    extract.main()
    assert report()["rows_stored"] == 60
    assert 5 < len(second.asked) < 30


def test_all_servers_dead_end_the_run(server: StatesServer, second: StatesServer) -> None:
    first = [sequence(i)["input_ids"] for i in range(4)]
    server.spoil = second.spoil = lambda ids, *_: None if ids in first else 500
    with pytest.raises(ServerStopped, match="failed 30 times in a row"):
        extract.main()


def test_our_own_server_killed_ends_the_run_with_its_last_words(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill -9; what is stored stays, and the next run goes on."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    log = Path("vllm.log")
    log.write_text("INFO all well\nRuntimeError: engine core died\n")
    known = states_server.meet_all([server.base_url], extract.load_params().verifier)
    ours = [replace(known[0], process=process, log=log)]
    monkeypatch.setattr(states_server, "meet_all", lambda *_: ours)

    def killed(ids: list[int], answer: dict[str, Any], payload: Payload) -> int | None:
        if ids in [row["input_ids"] for row in ROWS[:4]]:
            return None
        while not (FOLDER / "shard-00000.safetensors").exists():
            time.sleep(0.01)
        process.kill()
        process.wait()
        return 500

    server.spoil = killed
    with pytest.raises(ServerStopped, match=r"ended with code -9: RuntimeError: engine core died"):
        extract.main()
    monkeypatch.setattr(states_server, "meet_all", lambda *_: known)
    server.spoil = None
    server.asked.clear()
    extract.main()
    assert len(server.asked) == 6
    assert report()["rows_stored"] == 10


# What a server can do wrong


BAD = ROWS[5]["input_ids"]


def states_of_another_request(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload.update(states_of(ROWS[6]["input_ids"]))


def other_ids_in_the_file(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["token_ids"] = payload["token_ids"] + 1


def fewer_rows(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["hidden_states"] = payload["hidden_states"][1:].contiguous()


def fewer_layers(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["hidden_states"] = payload["hidden_states"][:, :3].contiguous()


def not_a_number(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["hidden_states"][2, 1, 3] = float("nan")


def too_large_for_float16(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["hidden_states"][2, 1, 3] = 1e6


def no_states(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        payload["weight"] = payload.pop("hidden_states")


def no_token_ids(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
    if ids == BAD:
        del payload["token_ids"]


def bad_request(ids: list[int], answer: dict[str, Any], payload: Payload) -> int | None:
    return 400 if ids == BAD else None


def no_file(ids: list[int], answer: dict[str, Any], payload: Payload) -> int | None:
    return 200 if ids == BAD else None


def internal_error(ids: list[int], answer: dict[str, Any], payload: Payload) -> int | None:
    return 500 if ids == BAD else None


@pytest.mark.parametrize(
    ("spoil", "reason", "times_asked"),
    [
        (states_of_another_request, "token_ids", 2),
        (other_ids_in_the_file, "token_ids", 2),
        (fewer_rows, "shape", 2),
        (fewer_layers, "shape", 2),
        (no_states, "shape", 2),
        (no_token_ids, "shape", 2),
        (not_a_number, "not_finite", 2),
        (too_large_for_float16, "not_finite", 2),
        (bad_request, "refused", 1),
    ],
)
def test_a_bad_answer_costs_one_sequence(
    server: StatesServer, spoil: Any, reason: str, times_asked: int
) -> None:
    write_params(extract={"dtype": "float16"})
    server.spoil = spoil
    extract.main()
    found = report()
    assert (found["rows_in"], found["rows_stored"]) == (10, 9)
    assert {name for name, count in found["rejected"].items() if count} == {reason}
    assert server.asked.count(BAD) == times_asked
    server.asked.clear()
    extract.main()
    assert server.asked == []


@pytest.mark.parametrize("spoil", [internal_error, no_file])
def test_a_failure_fails_the_stage_and_is_asked_again(server: StatesServer, spoil: Any) -> None:
    server.spoil = spoil
    with pytest.raises(ServerError, match="1 of 10 sequences got no hidden states"):
        extract.main()
    server.spoil = None
    server.asked.clear()
    extract.main()
    assert server.asked == [BAD]
    assert report()["rows_stored"] == 10


@pytest.mark.parametrize("name", ["notes.txt", "damaged.safetensors", "model.safetensors"])
def test_a_file_that_holds_no_states_is_not_deleted(server: StatesServer, name: str) -> None:
    """Whatever a server may name."""
    path = Path(name).resolve()
    path.write_text("mine")
    if name == "model.safetensors":
        save_file({"weight": torch.ones(3)}, path)
    before = path.read_bytes()

    def another_file(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        if ids == BAD:
            answer["kv_transfer_params"]["hidden_states_path"] = str(path)

    server.spoil = another_file
    if name == "model.safetensors":
        extract.main()
        assert report()["rejected"]["shape"] == 1
    else:
        with pytest.raises(ServerError, match="1 of 10 sequences got no hidden states"):
            extract.main()
    assert path.read_bytes() == before


def test_a_time_out_is_a_failure_and_not_repeated_at_once(server: StatesServer) -> None:
    write_params(extract={"timeout_s": 5})  # plenty for the others
    over = threading.Event()

    def too_late(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        if ids == BAD:
            over.wait()

    server.spoil = too_late
    with pytest.raises(ServerError, match=r"1 of 10 sequences .*larger extract.timeout_s"):
        extract.main()
    over.set()
    assert server.asked.count(BAD) == 1


def test_a_dead_server_ends_the_run_at_once(server: StatesServer) -> None:
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [sequence(i) for i in range(60)])
    server.spoil = lambda ids, answer, payload: 500
    with pytest.raises(ServerError, match="20 sequences in a row got no hidden states"):
        extract.main()
    assert len(server.asked) < 2 * 25
    assert status()["state"] == "stopped"


def test_refusals_in_a_row_are_those_of_the_sequences(server: StatesServer) -> None:
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [sequence(i) for i in range(60)])
    write_params(extract={"concurrency": 1})
    first = sequence(0)["input_ids"]
    server.spoil = lambda ids, answer, payload: None if ids == first else 400
    extract.main()
    found = report()
    assert (found["rows_stored"], found["rejected"]["refused"]) == (1, 59)


def test_nothing_but_refusals_are_those_of_the_server(server: StatesServer) -> None:
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [sequence(i) for i in range(60)])
    server.spoil = lambda ids, answer, payload: 400
    with pytest.raises(ServerError, match=r"20 sequences in a row got .* refused, .*400"):
        extract.main()
    assert len(server.asked) < 25


def test_a_server_without_hidden_states_is_told_apart(server: StatesServer) -> None:
    server.spoil = lambda ids, answer, payload: answer.pop("kv_transfer_params") and None
    with pytest.raises(ServerError, match=r"extract.endpoints need vLLM's extract_hidden_states"):
        extract.main()


def test_another_model_is_refused(server: StatesServer) -> None:
    server.model = "another"
    with pytest.raises(VerifierError, match=r"serves another, but verifier.model is"):
        extract.main()


def test_a_context_without_room_for_one_token_more_is_refused(server: StatesServer) -> None:
    server.max_model_len = 32
    with pytest.raises(VerifierError, match=r"serves 32 tokens .*--max-model-len 33"):
        extract.main()
    assert server.asked == []


def test_a_server_that_shares_no_file_system_is_told_apart(server: StatesServer) -> None:
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [sequence(i) for i in range(60)])

    def elsewhere(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        answer["kv_transfer_params"]["hidden_states_path"] = "/another/machine.safetensors"

    server.spoil = elsewhere
    with pytest.raises(ServerError, match="must share a file system with this machine"):
        extract.main()


def test_a_layer_that_is_not_there_is_an_error(server: StatesServer) -> None:
    write_params(extract={"layer_ids": [1, 2, NUM_LAYERS + 1]})
    with pytest.raises(DataError, match=r"layer_ids is \[1, 2, 4\], but .* has 3 layers"):
        extract.main()


def test_states_say_what_was_taken_out_of_their_sequence() -> None:
    row = sequence(0) | {"input_ids": np.arange(10)}
    for ablation in ("none", "reasoning_dropped", "reasoning_empty"):
        assert extract.record_of(row | {"ablation": ablation}).ablation == ablation


def test_no_sequences_are_an_error(server: StatesServer) -> None:
    shutil.rmtree("data/sequences")
    with pytest.raises(DataError, match="holds no sequences; `dvc repro` makes them"):
        extract.main()


# vLLM itself


CHUNKED = ["--max-num-batched-tokens", "12", "--max-num-seqs", "4"]


@pytest.mark.server
@pytest.mark.parametrize("server_args", [[], CHUNKED], ids=["whole", "chunked"])
def test_vllm_gives_the_states_that_transformers_computes(
    server_args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a sequence that fills the context; vLLM's in a batch of different lengths, or in
    pieces of at most 12 tokens, the expected ones each alone and whole."""
    from transformers import Qwen3ForCausalLM

    shutil.copytree(ROOT / "models/verifier", tmp_path / "models/verifier")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_EXTRACT_ENDPOINTS", raising=False)
    model = Qwen3ForCausalLM.from_pretrained("models/verifier", dtype=torch.float32).eval()
    config = model.config
    rows = [sequence(i, num_tokens=n) for i, n in enumerate([5, 32, 9, 31, 17, 8, 24, 32])]
    layer_ids = [0, 1, config.num_hidden_layers - 1]
    served = {"server_args": [*extract.load_params(ROOT / "params.yaml").verifier.server_args]}
    served["server_args"] += server_args
    write_params(extract={"layer_ids": layer_ids, "concurrency": 8}, verifier=served)
    write_sequences(tmp_path, rows)
    write_verifier(
        tmp_path,
        weights=[],
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_position_embeddings,
    )
    extract.main()
    assert report()["rows_stored"] == len(rows)
    states = HiddenStates(FOLDER)
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    for row in rows:
        with torch.inference_mode():
            ids = torch.tensor([row["input_ids"]])
            hidden = model(ids, output_hidden_states=True).hidden_states
        _, aux, last = states.read(row["key"])
        for place, layer in enumerate(layer_ids):
            assert distance(aux[:, place], hidden[layer][0]) < 1e-5
        assert distance(last, before_norm[-1][4:]) < 1e-5


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference, in units of the largest value: float32 noise is some 1e-7 of it."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())
