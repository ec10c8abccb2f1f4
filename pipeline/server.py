"""Start vLLM, wait until it answers, and leave no process behind.

    with serve(params.verifier, "generate") as endpoint:
        ... endpoint.base_url ...

The server runs in its own session, so Ctrl-C reaches the stage alone, which then ends the server
and all that it started. Should the stage die without a word, the kernel tells the server
(PR_SET_PDEATHSIG), and a watcher, a shell that waits for the stage's end of a pipe to close,
ends what is left of the session. Output goes to logs/vllm-<name>.log.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from pipeline.errors import ServerError, UserError, VerifierError
from pipeline.params import Verifier
from pipeline.progress import waiting
from pipeline.records import DRAFT
from pipeline.stage import LOGS, end_with_parent

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
START_TIMEOUT_S = 3600  # a trillion parameters take a while to load
STOP_TIMEOUT_S = 30
# While its engine is being built vLLM does not listen to SIGTERM, and there is nothing to save.
STOP_TIMEOUT_UNREADY_S = 2
# $1 is the server's process group. `read` returns when nobody holds the pipe any more.
WATCHER = """
read -r _
kill -TERM -"$1" 2>/dev/null || exit 0
for _ in $(seq 30); do sleep 1; kill -0 -"$1" 2>/dev/null || exit 0; done
kill -KILL -"$1"
"""
# What vLLM must not do on its own: phone home, or fetch what is not pinned.
QUIET_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Endpoint:
    """A server that speaks the OpenAI API; one of our own knows its process and its log."""

    base_url: str  # ends in /v1
    model: str  # the name it serves under
    version: str
    max_model_len: int
    process: subprocess.Popen[bytes] | None = field(default=None, compare=False, repr=False)
    log: Path | None = field(default=None, compare=False, repr=False)

    @property
    def metrics_url(self) -> str:
        return self.base_url.removesuffix("/v1") + "/metrics"

    @property
    def tokenize_url(self) -> str:
        return self.base_url.removesuffix("/v1") + "/tokenize"

    @property
    def died(self) -> bool:
        """Whether this is a server of our own whose process has ended."""
        return self.process is not None and self.process.poll() is not None

    @property
    def last_words(self) -> str:
        """How a server of our own ended: its code and vLLM's own last error."""
        assert self.process is not None
        assert self.log is not None
        return _last_words(self.process, self.log)


def serve_command(verifier: Verifier, extra_args: Sequence[str] = ()) -> list[str]:
    """The `vllm serve …` line for this verifier, without host and port."""
    optional = {
        "--revision": verifier.revision,
        "--quantization": verifier.quantization,
        "--reasoning-parser": verifier.reasoning_parser,
    }
    command = ["vllm", "serve", verifier.model, "--dtype", verifier.dtype]
    command += ["--max-model-len", str(verifier.max_model_len)]
    for flag, value in optional.items():
        if value is not None:
            command += [flag, value]
    if verifier.trust_remote_code:
        command += ["--trust-remote-code"]
    return [*command, *verifier.server_args, *extra_args]


def speculative_args(config: Mapping[str, Any]) -> list[str]:
    """vLLM's --speculative-config for `config`."""
    return ["--speculative-config", json.dumps(config, separators=(",", ":"))]


def draft_config(num_draft_tokens: int) -> dict[str, Any]:
    """The --speculative-config that puts the trained draft to use."""
    return {"method": "eagle3", "model": str(DRAFT), "num_speculative_tokens": num_draft_tokens}


@contextmanager
def serve(verifier: Verifier, name: str, extra_args: Sequence[str] = ()) -> Iterator[Endpoint]:
    """A vLLM server for as long as the block runs.

    Raises:
        ServerError: it ended before it was ready; the message holds vLLM's own last error.
    """
    with serve_all(verifier, {name: extra_args}) as endpoints:
        yield endpoints[name]


@contextmanager
def serve_all(
    verifier: Verifier, extra_args: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, Endpoint]]:
    """Several servers of one verifier, started side by side: {name: further arguments}."""
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(_process(verifier, name, args))
            for name, args in extra_args.items()
        }
        with waiting(f"starting vLLM ({', '.join(started)})"):
            endpoints = {name: _wait_until_ready(server) for name, server in started.items()}
        yield endpoints


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    log: Path
    base_url: str
    ready: bool = False


@contextmanager
def _process(verifier: Verifier, name: str, extra_args: Sequence[str]) -> Iterator[_Server]:
    port = free_port()
    log_path = LOGS / f"vllm-{name}.log"
    LOGS.mkdir(exist_ok=True)
    script, *arguments = serve_command(verifier, extra_args)
    command = [str(Path(sys.executable).with_name(script)), *arguments]
    if not Path(command[0]).is_file():
        raise ServerError(f"{command[0]} is missing; `make setup` installs it")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_server_environment(verifier),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
    server = _Server(process, log_path, f"http://{HOST}:{port}/v1")
    with _watcher(process.pid):
        try:
            yield server
        finally:
            _end(process, STOP_TIMEOUT_S if server.ready else STOP_TIMEOUT_UNREADY_S)


@contextmanager
def _watcher(process_group: int) -> Iterator[None]:
    """Have the group ended when this process goes away before the block does."""
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCHER, "watcher", str(process_group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.kill()
        watcher.communicate()


def _server_environment(verifier: Verifier) -> dict[str, str]:
    env = {**os.environ, **QUIET_ENV, "VLLM_CACHE_ROOT": str(Path(".cache/vllm").resolve())}
    env.pop("VLLM_API_KEY", None)  # our own server on loopback asks for no key
    env.pop("GOMP_SPINCOUNT", None)  # of our own threads (pipeline/__init__.py)
    if Path(verifier.model).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    env |= verifier.server_env
    # For what vLLM loads of ours by name: the `vllm` command does not look into the present folder.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    """SIGTERM to the server, which ends its engine; SIGKILL to what is left of its session."""
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
    finally:  # also when a second Ctrl-C interrupts the wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_ready(server: _Server) -> Endpoint:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerError(f"{_last_words(server.process, server.log)}, before it was ready")
        try:
            endpoint = meet(server.base_url)
        except ServerError:
            time.sleep(0.25)
        else:
            server.ready = True
            return replace(endpoint, process=server.process, log=server.log)
    raise ServerError(f"vLLM was not ready after {START_TIMEOUT_S} s (see {server.log})")


def api_key() -> str:
    """The key that the servers want; the client insists on one where they want none."""
    key = os.environ.get("OPENAI_API_KEY", "").strip()  # read from a file it ends in a newline
    if not (key.isascii() and key.isprintable()):  # an error of the client would quote it
        raise UserError("OPENAI_API_KEY holds characters that no HTTP header can")
    return key or "no-key"


def authorization() -> dict[str, str]:
    """The header that carries the key, where no openai client sends it."""
    return {"Authorization": f"Bearer {api_key()}"}


def meet(base_url: str) -> Endpoint:
    """Ask a server what it serves. Raises ServerError when nobody answers there."""
    root = base_url.removesuffix("/v1")
    try:
        with httpx2.Client(timeout=10, trust_env=False, headers=authorization()) as client:
            models = client.get(f"{base_url}/models").raise_for_status().json()["data"]
            version = client.get(f"{root}/version").raise_for_status().json()["version"]
        if not models:
            raise ServerError(f"the server at {base_url} serves no model")
        model = models[0]
        return Endpoint(base_url, model["id"], version, int(model.get("max_model_len") or 0))
    except (
        *(httpx2.HTTPError, httpx2.InvalidURL),
        *(KeyError, ValueError, TypeError, AttributeError),  # JSON of another shape
    ) as error:
        reason = str(error).partition("\n")[0]  # httpx adds a line of advice
        raise ServerError(f"no vLLM server at {base_url} ({reason})") from error


def meet_all(base_urls: Sequence[str], verifier: Verifier) -> list[Endpoint]:
    """The given servers, each checked to serve the verifier of params.yaml with its context.

    Raises:
        VerifierError: another model, or a shorter context.
    """
    endpoints = [meet(url if url.endswith("/v1") else f"{url}/v1") for url in base_urls]
    for endpoint in endpoints:
        if endpoint.model != verifier.model:
            raise VerifierError(
                f"{endpoint.base_url} serves {endpoint.model}, but verifier.model is "
                f"{verifier.model}"
            )
        if endpoint.max_model_len < verifier.max_model_len:
            raise VerifierError(
                f"{endpoint.base_url} serves {endpoint.max_model_len} tokens of context, but "
                f"verifier.max_model_len is {verifier.max_model_len}"
            )
    return endpoints


def _last_words(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"vLLM ended with code {process.returncode}: {_last_error(log)} (all of it in {log})"


def _last_error(log: Path) -> str:
    """vLLM's own reason: the last line that names an error, without the log prefix.

    `… 500 Internal Server Error` in the access log names none, and some only say that the reason
    stands above them.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    named = [line for line in lines if re.search(r"(Error|Exception|error):", line)]
    telling = [
        line for line in named if not re.search("EngineDeadError|See root cause above", line)
    ]
    return (telling or named or lines or ["no output"])[-1].split("] ", 1)[-1].strip()[:300]
