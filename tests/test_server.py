"""Starting a server and leaving nothing behind, with a scripted `vllm` in place of the real one."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from pipeline.errors import ServerError, VerifierError
from pipeline.params import load_params
from pipeline.server import (
    Endpoint,
    draft_config,
    meet,
    meet_all,
    serve,
    serve_all,
    serve_command,
    speculative_args,
)
from tests.conftest import ROOT
from tests.fake_server import FakeServer

INTERPRETER = sys.executable  # `install_vllm` changes it

# A `vllm serve` of the standard library: two generations of children, then the two health pages.
VLLM = """#!{python}
import http.server, json, os, subprocess, sys
arguments = sys.argv[1:]
with open("vllm-" + arguments[-1] + ".json", "w") as file:
    json.dump([arguments, dict(os.environ)], file)
{start}
child = subprocess.Popen(["sh", "-c", "sleep 300 & echo $! >> pids; wait"])
with open("pids", "a") as file:
    file.write(f"{{os.getpid()}}\\n{{child.pid}}\\n")

class Pages(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        model = {{"id": arguments[1], "max_model_len": 1024}}
        pages = {{"/version": {{"version": "0.32.0"}}, "/v1/models": {{"data": [model]}}}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(pages[self.path]).encode())
    def log_message(self, *_):
        pass

port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Pages).serve_forever()
"""


@pytest.fixture
def install_vllm(project, monkeypatch):
    """`install_vllm("lines to run at start")` puts a `vllm` beside what Python takes itself for."""

    def install(start: str = "") -> None:
        folder = project.root / "bin"
        folder.mkdir()
        script = folder / "vllm"
        script.write_text(VLLM.format(python=sys.executable, start=start))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(folder / "python"))

    return install


def pids() -> list[int]:
    path = Path("pids")
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def is_alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is not alive."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def nobody_is_left() -> bool:
    return not any(is_alive(pid) for pid in pids())


# the command


def test_the_command_says_what_params_say(project):
    project.set(
        **{
            "verifier.model": "moonshotai/Kimi-K2.5",
            "verifier.revision": "a" * 40,
            "verifier.dtype": "bfloat16",
            "verifier.quantization": "fp8",
            "verifier.max_model_len": 32768,
            "verifier.reasoning_parser": "kimi_k2",
            "verifier.trust_remote_code": True,
            "verifier.server_args": ["--tensor-parallel-size", "8"],
        }
    )
    command = serve_command(load_params().verifier, ["--seed", "1"])
    assert command[:3] == ["vllm", "serve", "moonshotai/Kimi-K2.5"]
    pairs = dict(pairwise(command))
    assert pairs["--revision"] == "a" * 40
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--quantization"] == "fp8"
    assert pairs["--max-model-len"] == "32768"
    assert pairs["--reasoning-parser"] == "kimi_k2"
    assert pairs["--tensor-parallel-size"] == "8"
    assert "--trust-remote-code" in command
    assert command[-2:] == ["--seed", "1"]


def test_what_is_null_or_false_is_not_in_the_command(project):
    project.set(**{"verifier.reasoning_parser": None, "verifier.server_args": []})
    assert serve_command(load_params().verifier) == [
        "vllm", "serve", "models/verifier", "--dtype", "float32", "--max-model-len", "1024",
    ]  # fmt: skip


def test_speculation_is_one_json_argument():
    flag, value = speculative_args(draft_config(3))
    assert flag == "--speculative-config"
    assert json.loads(value) == {
        "method": "eagle3",
        "model": "models/draft",
        "num_speculative_tokens": 3,
    }


# meeting


def test_a_server_says_its_model_version_and_context(server):
    assert meet(server.base_url) == Endpoint(server.base_url, "models/verifier", "0.32.0", 1024)


def test_the_metrics_page_lies_beside_v1():
    endpoint = Endpoint("http://127.0.0.1:8000/v1", "m", "0.32.0", 1024)
    assert endpoint.metrics_url == "http://127.0.0.1:8000/metrics"


def test_a_url_without_v1_is_completed(project, server):
    [endpoint] = meet_all([server.base_url.removesuffix("/v1")], load_params().verifier)
    assert endpoint.base_url == server.base_url


@pytest.mark.parametrize(
    ("model", "context", "said"),
    [("other", 1024, "serves other"), ("models/verifier", 1023, "1023 tokens of context")],
)
def test_every_endpoint_is_checked_not_only_the_first(project, server, model, context, said):
    with (
        FakeServer(model=model, max_model_len=context) as wrong,
        pytest.raises(VerifierError, match=said),
    ):
        meet_all([server.base_url, wrong.base_url], load_params().verifier)


def test_a_longer_context_is_fine(project):
    with FakeServer(max_model_len=4096) as longer:
        assert len(meet_all([longer.base_url], load_params().verifier)) == 1


def test_a_url_where_nobody_answers_is_named():
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1"):
        meet("http://127.0.0.1:9/v1")


def test_a_server_that_refuses_the_key_is_one_clear_line_without_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong")
    with FakeServer(api_key="sk-right") as guarded, pytest.raises(ServerError) as caught:
        meet(guarded.base_url)
    message = str(caught.value)
    assert guarded.base_url in message
    assert "401" in message
    assert "\n" not in message
    assert "sk-" not in message


# a server of our own


def test_a_server_of_others_never_died(server):
    assert not meet(server.base_url).died


def test_a_server_of_ours_knows_that_it_died_and_why(project, install_vllm, eventually):
    install_vllm("print('ValueError: No room for the KV cache', flush=True)")
    with serve(load_params().verifier, "generate") as endpoint:
        assert endpoint == meet(endpoint.base_url), "the process is no part of what it is"
        assert not endpoint.died
        os.kill(endpoint.process.pid, signal.SIGKILL)
        eventually(lambda: endpoint.died, "its end")
        assert "code -9" in endpoint.last_words
        assert "ValueError: No room for the KV cache" in endpoint.last_words
        assert "logs/vllm-generate.log" in endpoint.last_words


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "(EngineCore pid=7) ERROR 11-29 [core.py:1] RuntimeError: index 5 is out of bounds\n"
            "(APIServer pid=1) ERROR 11-29 [async_llm.py:9] vllm.v1.engine.exceptions."
            "EngineDeadError: EngineCore encountered an issue. See stack trace (above).\n"
            '(APIServer pid=1) INFO: 127.0.0.1:5 - "POST /v1/chat/completions HTTP/1.1" 500 '
            "Internal Server Error\n",
            "RuntimeError: index 5 is out of bounds",
        ),
        (
            "(EngineCore pid=7) ValueError: No common block size for 16\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: No common block size for 16",
        ),
        ("INFO ready\nx.EngineDeadError: gone\nbye\n", "x.EngineDeadError: gone"),
        ("vllm serve: error: unrecognized arguments: --x\n", "unrecognized arguments: --x"),
        ("INFO loading\nKilled\n", "Killed"),
        ("", "no output"),
    ],
    ids=["engine_died", "engine_never_lived", "only_that", "arguments", "no_error_named", "silent"],
)
def test_the_last_words_name_the_reason(tmp_path, log, reason):
    path = tmp_path / "vllm.log"
    path.write_text(log)
    process = subprocess.Popen(["false"])
    process.wait()
    endpoint = Endpoint("http://127.0.0.1:1/v1", "m", "0", 1024, process, path)
    assert reason in endpoint.last_words
    assert "EngineCore encountered" not in endpoint.last_words


# serving


def test_a_server_is_up_for_the_block_and_all_its_processes_are_gone_after_it(
    project, install_vllm, eventually
):
    install_vllm()
    with serve(load_params().verifier, "generate", ["--seed", "1"]) as endpoint:
        assert meet(endpoint.base_url).model == "models/verifier"
        eventually(lambda: len(pids()) == 3, "all three processes")
        assert all(is_alive(pid) for pid in pids())
    eventually(nobody_is_left, "the end of all processes")
    assert Path("logs/vllm-generate.log").is_file()


def test_all_its_processes_are_gone_when_the_block_raises(project, install_vllm, eventually):
    install_vllm()

    def fails_while_serving() -> None:
        with serve(load_params().verifier, "generate"):
            eventually(lambda: len(pids()) == 3, "all three processes")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails_while_serving()
    eventually(nobody_is_left, "the end of all processes")


def test_children_of_a_server_that_died_are_ended_too(project, install_vllm, eventually):
    install_vllm()
    with serve(load_params().verifier, "generate"):
        eventually(lambda: len(pids()) == 3, "all three processes")
        [parent] = [pid for pid in pids() if os.getpgid(pid) == pid]
        os.kill(parent, signal.SIGKILL)
    eventually(nobody_is_left, "the end of all processes")


def test_all_its_processes_are_gone_when_the_stage_is_killed(project, install_vllm, eventually):
    """`kill -9` runs no `finally`; and the kernel tells the server alone, not its children."""
    install_vllm()
    stage = subprocess.Popen(
        [
            *(INTERPRETER, "-c"),
            "import sys, time; sys.executable = sys.argv[1]\n"
            "from pipeline.params import load_params; from pipeline.server import serve\n"
            "with serve(load_params().verifier, 'generate'): time.sleep(300)",
            sys.executable,
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    eventually(lambda: len(pids()) == 3, "all three processes")
    stage.kill()
    stage.wait()
    eventually(nobody_is_left, "the end of all processes")


def test_a_server_that_ignores_sigterm_is_killed(project, install_vllm, eventually, monkeypatch):
    monkeypatch.setattr("pipeline.server.STOP_TIMEOUT_S", 0.2)
    install_vllm("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with serve(load_params().verifier, "generate"):
        eventually(lambda: len(pids()) == 3, "all three processes")
    eventually(nobody_is_left, "the end of all processes")


def test_a_server_that_dies_at_start_is_an_error_with_its_own_last_words(project, install_vllm):
    install_vllm(
        "print('(APIServer pid=1) ERROR 11-29 [core.py:1] ValueError: No room for the KV cache')\n"
        "print('bye'); sys.exit(3)"
    )
    with (
        pytest.raises(ServerError, match=r"code 3.*No room for the KV cache.*vllm-generate\.log"),
        serve(load_params().verifier, "generate"),
    ):
        pytest.fail("it never was ready")
    assert nobody_is_left()


def test_a_server_that_dies_without_a_word_is_an_error_too(project, install_vllm):
    install_vllm("sys.exit(1)")
    with (
        pytest.raises(ServerError, match="no output"),
        serve(load_params().verifier, "generate"),
    ):
        pytest.fail("it never was ready")


def test_a_missing_vllm_is_an_error_that_names_it(project, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(project.root / "python"))
    with (
        pytest.raises(ServerError, match="vllm"),
        serve(load_params().verifier, "generate"),
    ):
        pytest.fail("there is no server")


def test_when_one_of_several_dies_the_others_are_ended(project, install_vllm, eventually):
    install_vllm("if '--broken' in arguments: print('RuntimeError: broken'); sys.exit(1)")
    with (
        pytest.raises(ServerError, match="RuntimeError: broken"),
        serve_all(load_params().verifier, {"plain": [], "draft": ["--broken"]}),
    ):
        pytest.fail("one never was ready")
    eventually(nobody_is_left, "the end of all processes")


def test_several_servers_have_their_own_port_and_arguments(project, install_vllm, eventually):
    install_vllm()
    arguments = {"plain": [], "draft": ["--x", "1"]}
    with serve_all(load_params().verifier, arguments) as endpoints:
        assert list(endpoints) == ["plain", "draft"]
        assert endpoints["plain"].base_url != endpoints["draft"].base_url
        seen = [json.loads(path.read_bytes())[0] for path in Path().glob("vllm-*.json")]
        assert sorted("--x" in command for command in seen) == [False, True]
        assert all(command[command.index("--host") + 1] == "127.0.0.1" for command in seen)
    eventually(nobody_is_left, "the end of all processes")


def test_the_servers_environment_is_quiet_and_has_what_params_say(project, install_vllm):
    project.set(**{"verifier.server_env": {"VLLM_CPU_KVCACHE_SPACE": "7"}})
    install_vllm()
    with serve(load_params().verifier, "generate"):
        [seen] = [json.loads(path.read_bytes())[1] for path in Path().glob("vllm-*.json")]
    assert seen["VLLM_CPU_KVCACHE_SPACE"] == "7"
    assert seen["VLLM_NO_USAGE_STATS"] == "1"
    assert seen["HF_HUB_OFFLINE"] == "1"  # a local model needs no hub
