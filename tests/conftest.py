"""Fixtures: a scratch project, in which each stage's main() runs, and a server that misbehaves."""

import copy
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpcore2
import pytest
import yaml

from tests.fake_server import END, MODEL, THINK, THINK_END, VOCAB_SIZE, FakeServer, written
from tests.fake_tokenizer import FAMILY, write_tokenizer

# A shell's background job ignores Ctrl-C, and so would all that is started here to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
ENDPOINTS = "PIPELINE_GENERATE_ENDPOINTS"
# The fake's world, and what tests count on. Its tokens are characters, so budgets are generous.
SMALL = {
    "verifier.dtype": "float32",
    "verifier.max_model_len": 1024,
    "verifier.reasoning_parser": "qwen3",
    "verifier.server_args": ["--enforce-eager"],
    "verifier.server_env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "think.start_id": THINK,
    "think.end_id": THINK_END,
    "prompts.num_held_out": 1,
    "prompts.sample_cap": 100,
    "prompts.turns": "first",
    "generate.concurrency": 4,
    "generate.timeout_s": 30,
    "generate.stall_s": 30,
    "generate.max_tokens": 512,
    "generate.on_truncated": "keep",
    "generate.retry_max_tokens": 768,
    "generate.temperature": 0.0,
    "generate.top_p": 1.0,
    "generate.top_k": 0,
    "generate.thinking": True,
    "generate.thinking_switch": "enable_thinking",
    "generate.gate.num_samples": 4,
    "generate.gate.min_reasoning_fraction": 0.9,
    "generate.gate.min_reasoning_tokens": 3,
    "generate.max_failed_fraction": 0.0,
    "family.name": "custom",
    "family.custom": FAMILY,
    "reassemble.source": "ids",
    "reassemble.truncated": "keep",
    "reassemble.max_tokens": 1024,
    "reassemble.on_too_long": "cut",
    "reassemble.on_control_text": "reject",
    "reassemble.reasoning": "keep",
    "reassemble.train_on": "all_generated",
    "reassemble.draft_vocab_size": 64,
    "benchmark.num_draft_tokens": 3,
    "benchmark.both_thinking_modes": False,
}
WEIGHTS = b"not really weights"


class Project:
    """A project folder: params.yaml, models/verifier, data/verifier.json and data/prompts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.values: dict[str, Any] = copy.deepcopy(shipped_params())
        weights = root / MODEL / "model.safetensors"
        weights.parent.mkdir(parents=True)
        weights.write_bytes(WEIGHTS)
        write_tokenizer(weights.parent)
        (root / "data/prompts").mkdir(parents=True)
        self.set(**SMALL)
        self.identity()
        self.ask("Q1", "Q2", "Q3", "Q4", "Q5", "Q6")

    def set(self, **overrides: Any) -> None:
        """Change params.yaml: `project.set(**{"generate.max_tokens": 20})`."""
        for key, value in overrides.items():
            *sections, name = key.split(".")
            section = self.values
            for part in sections:
                section = section[part]
            assert name in section, f"params.yaml has no {key}"
            section[name] = value
        (self.root / "params.yaml").write_text(yaml.safe_dump(self.values), encoding="utf-8")

    def identity(self, **changes: Any) -> None:
        """Write data/verifier.json as `identify` would for the model that the fake serves."""
        identity = verifier_json() | changes
        (self.root / "data/verifier.json").write_text(json.dumps(identity), encoding="utf-8")

    def ask(self, *questions: str) -> None:
        """Write data/prompts: these questions in this order, the first one held out."""
        rows = [
            {
                "index": index,
                "split": "held_out" if index == 0 else "train",
                "key": hashlib.sha256(question.encode()).hexdigest(),
                "sample_id": f"{question}_gen0",
                "source": "test",
                "messages": [{"role": "user", "content": question}],
                "later_turns": [],
            }
            for index, question in enumerate(questions)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.root / "data/prompts/prompts.jsonl").write_text(lines, encoding="utf-8")

    def rows(self, path: str = "data/traces/part-*.jsonl") -> list[dict[str, Any]]:
        """The rows of all files that match."""
        files = sorted(self.root.glob(path))
        return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]

    def report(self, stage: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.root / f"reports/{stage}.json").read_bytes())
        return report

    def bytes(self, *patterns: str) -> dict[str, bytes]:
        """What is in the files that match, by name."""
        files = sorted(path for pattern in patterns for path in self.root.glob(pattern))
        return {str(f.relative_to(self.root)): f.read_bytes() for f in files if f.is_file()}

    def start(
        self,
        stage: str,
        limits: Callable[[], None] | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Run a stage as DVC does, in a process of its own; `limits` is called in it first."""
        return subprocess.Popen(
            [sys.executable, "-m", f"pipeline.{stage}"],
            preexec_fn=limits,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@cache
def shipped_params() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text("utf-8"))
    return values


def verifier_json() -> dict[str, Any]:
    """data/verifier.json of the model that the fake serves."""
    sha256 = hashlib.sha256(WEIGHTS).hexdigest()
    return {
        "model": MODEL,
        "revision": None,
        "config_sha256": "c" * 64,
        "tokenizer_sha256": "a" * 64,
        "chat_template_sha256": "b" * 64,
        "small_files": [],
        "weights": [
            {"name": "model.safetensors", "size_bytes": len(WEIGHTS), "sha256": sha256},
        ],
        "weights_fingerprint": sha256,
        "think_start": "<think>",
        "think_end": "</think>",
        "think_start_id": THINK,
        "think_end_id": THINK_END,
        "end_ids": [END],
        "end_of_turn_id": END,
        "bos_id": None,
        "control_ids": [END, 203, 204, 205],
        "blank_ids": [9, 10, 13, 32],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 4096,
        "family": "custom",
        "family_verified": False,
    }


@pytest.fixture(scope="session", autouse=True)
def one_tls_context() -> Iterator[None]:
    """Each HTTP client reads the CA list anew (40 ms). No test here speaks TLS, so one will do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("PIPELINE_GENERATE_ENDPOINTS", raising=False)
    return Project(tmp_path)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """The fake, named to the stages as the server to ask; back-off between attempts is short."""
    monkeypatch.setattr("pipeline.client.BACKOFF_S", 0.01)
    with FakeServer() as fake:
        monkeypatch.setenv(ENDPOINTS, fake.base_url)
        yield fake


@pytest.fixture
def eventually() -> Callable[..., None]:
    """`eventually(lambda: …)` polls until it is true; fails the test after 60 s."""

    def wait(condition: Callable[[], object], what: str = "the condition") -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"{what} never came true"
            time.sleep(0.02)

    return wait


@pytest.fixture
def verifier() -> Any:
    """The identity of the model that the fake serves."""
    from pipeline.verifier import VerifierIdentity

    return VerifierIdentity.model_validate(verifier_json())


@pytest.fixture
def trace_of() -> Callable[..., dict[str, Any]]:
    """`trace_of("Q", [ids])`: a stored answer of the fake's model to a question."""
    from tests.fake_server import prompt_ids, text_of

    def make(
        question: str = "Q",
        token_ids: list[int] | None = None,
        finish: str | None = "stop",
        *,
        prompt: list[int] | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        messages = [{"role": "user", "content": question}]
        generated = written(question) if token_ids is None else token_ids
        asked = prompt_ids(messages) if prompt is None else prompt
        reasoning, _, content = text_of(generated).removeprefix("<think>").partition("</think>")
        trace = {
            "sample_id": f"{question}_gen0",
            "key": "k",
            "status": "ok",
            "source": "test",
            "messages": messages,
            "reasoning": reasoning,
            "content": content,
            "finish_reason": finish,
            "prompt_token_ids": asked,
            "token_ids": generated,
            "usage": {"prompt_tokens": len(asked), "completion_tokens": len(generated)},
            "sampling": {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 512},
            "max_model_len": 1024,
            "attempts": 1,
            "server_version": "0.32.0",
        }
        return trace | changes

    return make
