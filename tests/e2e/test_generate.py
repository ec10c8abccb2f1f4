"""generate on a real vLLM: engines that die, servers that hang, stages killed at any moment.

Where only the way in which a server dies matters, a scripted `vllm` stands in for the real one.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from transformers import AutoTokenizer

from pipeline.params import load_params
from pipeline.server import serve
from tests.conftest import ENDPOINTS, ROOT
from tests.conftest import Project as ScratchProject
from tests.e2e.conftest import Project

pytestmark = pytest.mark.timeout(900)
real = pytest.mark.server
full = [pytest.mark.server, pytest.mark.full]

NUM_PROMPTS = 108
# docs/decisions.md: the watcher of a stage that was killed ends its server after 30 s.
SECONDS_TO_BE_GONE = 30
NUM_KILLS, NUM_KILLS_OF_THE_FOLD = 50, 10
# Cut by the small budget of the storm: asked again with the larger one.
CUT = {"truncated_in_reasoning", "truncated_in_answer", "looping", "garbage"}
SMALL_BUDGET, LARGE_BUDGET = 100, 512
SMALL_CAP, LARGE_CAP = 100, 400


class Stage:
    """A run of `generate` in the background; what it says goes to a file."""

    def __init__(self, project: Project, **environment: str) -> None:
        self.journal = project.root / "data/traces/journal.jsonl"
        self.said_in = project.root / "said.txt"
        with self.said_in.open("wb") as output:
            self.process = subprocess.Popen(
                ["python", "-m", "pipeline.generate"],
                cwd=project.root,
                env={**project.env, "PYTHONUNBUFFERED": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.said_in.read_text()

    @property
    def answers(self) -> bytes:
        """The lines that came since the last fold."""
        return self.journal.read_bytes() if self.journal.exists() else b""

    @property
    def server(self) -> psutil.Process:
        """The vLLM that it started."""
        [server] = [child for child in self.children() if "serve" in child.cmdline()]
        return server

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def wait_for(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 300
        while not condition():
            assert self.process.poll() is None, f"it ended too early:\n{self.said}"
            assert time.monotonic() < deadline, f"it never came so far:\n{self.said}"
            time.sleep(0.01)

    def wait_a_while(self, seconds: float, num_answers: int) -> None:
        """For so long, or until so many answers more have come."""
        end, enough = time.monotonic() + seconds, self.answers.count(b"\n") + num_answers
        self.wait_for(lambda: time.monotonic() > end or self.answers.count(b"\n") >= enough)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start() -> Iterator[Callable[..., Stage]]:
    """`start(project)` runs the stage; a test that fails leaves none behind."""
    yield from _stages()


@pytest.fixture(scope="module")
def start_once() -> Iterator[Callable[..., Stage]]:
    yield from _stages()


def _stages() -> Iterator[Callable[..., Stage]]:
    started: list[Stage] = []

    def start(project: Project, **environment: str) -> Stage:
        started.append(Stage(project, **environment))
        return started[-1]

    yield start
    for stage in started:
        stage.kill()


def of_conversations(identified: Project, target: Path, **params: object) -> Project:
    """A copy in which the shipped conversations of two turns are asked, with both turns."""
    shutil.copytree(identified.root, target, symlinks=True)
    project = Project(target)
    questions = target / "data/raw/questions.jsonl"
    lines = questions.read_text().splitlines(keepends=True)
    questions.write_text("".join(line for line in lines if line.count('"human"') == 2))
    project.set_params(prompts__turns="all", prompts__num_held_out=8, **params)
    project.run("python", "-m", "pipeline.prompts")
    return project


@pytest.fixture
def conversations(identified: Project, tmp_path: Path) -> Project:
    return of_conversations(
        identified, tmp_path / "run", prompts__sample_cap=NUM_PROMPTS - 8, generate__concurrency=8
    )


def prompts(project: Project) -> list[dict[str, Any]]:
    path = project.root / "data/prompts/prompts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_complete(project: Project) -> None:
    """Each conversation was asked to its end or to its first turn without a good answer, in the
    order of the prompts, each turn once, and nothing but the answers is left."""
    rows = project.traces()
    answered = iter(rows)
    for prompt in prompts(project):
        name = prompt["sample_id"].removesuffix("_gen0")
        for turn in range(1 + len(prompt["later_turns"])):
            row = next(answered)
            assert row["sample_id"] == f"{name}_gen{turn}"
            assert row["token_ids"], row
            if row["status"] != "ok":
                break
    assert next(answered, None) is None
    assert len({row["key"] for row in rows}) == len(rows) > NUM_PROMPTS
    assert {path.name for path in (project.root / "data/traces").iterdir()} == {
        "part-00000.jsonl",
        "probe.json",
    }
    assert list(project.root.rglob("*.tmp")) == []


# a server of the stage's own that dies or hangs


def kill_its_engine(server: psutil.Process) -> None:
    """A prompt that is read in several steps, with a `seed` of its own, is more than the CPU engine
    survives; so many, each beginning in another way, do not fit into one step."""
    port = server.cmdline()[server.cmdline().index("--port") + 1]
    with (
        httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client,
        ThreadPoolExecutor(64) as threads,
    ):

        def ask(seed: int) -> None:
            question = f"{seed} " + "What day is 3 days after Monday? " * 80
            body = {
                "model": "models/verifier",
                "messages": [{"role": "user", "content": question}],
                "max_tokens": 20,
                "temperature": 0.8,
                "seed": seed,
            }
            with suppress(httpx2.HTTPError):  # the server is gone
                client.post("/v1/chat/completions", json=body)

        list(threads.map(ask, range(64)))


def kill_its_group(server: psutil.Process) -> None:
    os.killpg(server.pid, signal.SIGKILL)


def stop_its_group(server: psutil.Process) -> None:
    os.killpg(server.pid, signal.SIGSTOP)


def run_and(
    harm: Callable[[psutil.Process], None], project: Project, start: Callable[..., Stage]
) -> str:
    """Runs `generate`, harms its server while answers come; returns what the stage said."""
    stage = start(project)
    stage.wait_for(lambda: stage.answers)
    harmed = stage.server
    harm(harmed)
    assert stage.process.wait(600) == 0, stage.said
    assert not harmed.is_running()
    return stage.said


@pytest.fixture(scope="module")
def revived(
    identified: Project,
    tmp_path_factory: pytest.TempPathFactory,
    start_once: Callable[..., Stage],
) -> tuple[Project, str]:
    """A run whose server's engine died in the middle of it, and what the stage said."""
    project = of_conversations(
        identified,
        tmp_path_factory.mktemp("revived") / "run",
        prompts__sample_cap=NUM_PROMPTS - 8,
        generate__concurrency=8,
    )
    return project, run_and(kill_its_engine, project, start_once)


@real
def test_a_server_whose_engine_dies_is_started_again_and_the_run_ends_complete(
    revived: tuple[Project, str],
) -> None:
    project, said = revived
    assert "vLLM ended with code 0: RuntimeError: CPU Generator does not use offset" in said
    assert "starting it again (1 of 3)" in said
    assert "(2 of 3)" not in said
    check_complete(project)
    assert project.processes() == []


@real
def test_a_later_turn_is_asked_with_the_answer_before_it_and_none_of_its_reasoning(
    revived: tuple[Project, str],
) -> None:
    """Proved on the ids that the server says it saw (cases.md, A19)."""
    project, _ = revived
    tokenizer = AutoTokenizer.from_pretrained(project.root / "models/verifier")
    think_tokens = set(tokenizer.convert_tokens_to_ids(["<think>", "</think>"]))
    rows = {row["sample_id"]: row for row in project.traces()}
    later = [row for name, row in rows.items() if name.endswith("_gen1")]
    assert len(later) > NUM_PROMPTS / 2
    for row in later:
        before = rows[row["sample_id"].removesuffix("1") + "0"]
        assert think_tokens <= set(before["token_ids"])
        assert not think_tokens & set(row["prompt_token_ids"])
        seen = tokenizer.decode(row["prompt_token_ids"])
        assert f"<|im_start|>assistant\n{before['content'].strip()}<|im_end|>" in seen
        assert before["reasoning"].strip() not in seen


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        pytest.param(kill_its_group, "vLLM ended with code -9", marks=full),
        pytest.param(stop_its_group, "generated nothing for 10 s", marks=full),
    ],
)
def test_a_server_that_is_killed_or_hangs_is_started_again_and_the_run_ends_complete(
    conversations: Project,
    start: Callable[..., Stage],
    harm: Callable[[psutil.Process], None],
    said: str,
) -> None:
    conversations.set_params(generate__stall_s=10)
    heard = run_and(harm, conversations, start)
    assert said in heard
    assert "starting it again (1 of 3)" in heard
    check_complete(conversations)
    assert conversations.processes() == []


# a `vllm` that behaves, and then dies in a way of its own

VLLM = f"""#!{sys.executable}
import os, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from tests.fake_server import FakeServer

def die():
    print("RuntimeError: out of luck", flush=True)
    os._exit(7)

async def die_at_a_question(request, answer):
    die()

with open("starts", "a") as file:
    file.write("started\\n")
LIVES = {{lives}}
if not LIVES:
    die()
with FakeServer(spares_probes=True) as fake:
    fake.from_request(LIVES, die_at_a_question)
    fake.down()
    fake.port = int(sys.argv[sys.argv.index("--port") + 1])
    fake.up()
    threading.Event().wait()
"""
STAGE = """
import sys
sys.executable = sys.argv[1]
from pipeline.generate import main
from pipeline.stage import run_stage
run_stage("generate", main)
"""


@pytest.mark.parametrize(
    ("lives", "num_starts", "num_answers"),
    [
        pytest.param(0, 1, 0, id="before_it_is_ready"),
        pytest.param(1, 2, 0, id="at_the_first_question"),
        pytest.param(3, 4, 8, id="at_every_third_question"),
    ],
)
def test_a_server_that_keeps_dying_ends_the_run_with_its_last_words_and_keeps_the_answers(
    project: ScratchProject, lives: int, num_starts: int, num_answers: int
) -> None:
    """Started again is one that has answered something, or whose first questions may be to blame,
    and at most three times."""
    project.ask(*(f"Q{number}" for number in range(20)))
    project.set(**{"generate.concurrency": 1})
    vllm = project.root / "bin/vllm"
    vllm.parent.mkdir()
    vllm.write_text(VLLM.format(lives=lives))
    vllm.chmod(0o755)
    stage = subprocess.run(
        [sys.executable, "-c", STAGE, str(vllm.with_name("python"))],
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert stage.returncode == 1
    assert "vLLM ended with code 7: RuntimeError: out of luck" in stage.stderr
    assert Path("starts").read_text().count("started") == num_starts
    assert len(project.rows("data/traces/journal.jsonl")) == num_answers


# a stage that is killed


def its_server_starts(stage: Stage) -> bool:
    return "starting vLLM" in stage.said and any(
        "serve" in child.cmdline() for child in stage.children()
    )


def answers_come(stage: Stage) -> bool:
    return bool(stage.answers)


@pytest.mark.parametrize(
    "moment",
    [pytest.param(its_server_starts, marks=full), pytest.param(answers_come, marks=full)],
)
def test_a_killed_stage_leaves_no_process_and_the_next_run_ends_complete(
    conversations: Project, start: Callable[..., Stage], moment: Callable[[Stage], bool]
) -> None:
    stage = start(conversations)
    stage.wait_for(lambda: moment(stage))
    stage.kill()
    deadline = time.monotonic() + SECONDS_TO_BE_GONE + 5
    while conversations.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert conversations.processes() == []
    assert start(conversations).process.wait(600) == 0
    check_complete(conversations)


# a stage that is killed again and again


def phase_of(stage: Stage) -> str:
    """How far it had come when it was killed, by what it said and what lies on disk."""
    if "answers are there" not in stage.said:
        return "starting"
    if "asking the rest" in stage.said:
        return "asking" if "probe:" in stage.said else "probing"
    return "folding" if stage.journal.exists() else "before or after folding"


def stored_lines(project: Project) -> dict[str, bytes]:
    """By key, the newest whole line of each answer that is on disk."""
    traces = project.root / "data/traces"
    paths = [project.root / "data/.stash/traces.jsonl", *sorted(traces.glob("part-*.jsonl"))]
    lines: dict[str, bytes] = {}
    for path in (*paths, traces / "journal.jsonl"):
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
            if line.endswith(b"\n"):
                lines[json.loads(line)["key"]] = line
    return lines


def was_cut(line: bytes) -> bool:
    """Whether this answer is one to ask again with the larger budget."""
    row = json.loads(line)
    return row["status"] in CUT and row["sampling"]["max_tokens"] == SMALL_BUDGET


class Storm:
    """Kills of one project's stage, each with a look at whether it lost something."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.phases: Counter[str] = Counter()
        self.num_torn = 0  # kills in the middle of a line
        self._seen: dict[str, bytes] = {}

    def kill(self, stage: Stage) -> None:
        stage.kill()
        self.phases[phase_of(stage)] += 1
        self.num_torn += stage.answers[-1:] not in (b"", b"\n")
        self.look()

    def look(self) -> None:
        """What was on disk is on disk, to the byte, or was cut and has been asked again."""
        there = stored_lines(self.project)
        for key, line in self._seen.items():
            assert there.get(key) == line or was_cut(line), (key, line, there.get(key))
        assert self._seen.keys() <= there.keys()
        self._seen = there


@pytest.mark.server
@pytest.mark.full
def test_fifty_kills_of_the_stage_change_nothing_in_what_it_ends_with(
    identified: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., Stage],
) -> None:
    """Half of the answers are cut and asked again with more, and each conversation has a second
    turn, so that each question is in one of several states when a kill comes.

    Folding takes milliseconds, which no kill at random hits. So it is killed some times more, while
    a cap that goes to and fro moves answers from the parts to the stash and back.
    """
    params = {
        "prompts__sample_cap": LARGE_CAP,
        "generate__concurrency": 4,
        "generate__on_truncated": "retry",
        "generate__max_tokens": SMALL_BUDGET,
        "generate__retry_max_tokens": LARGE_BUDGET,
    }
    calm = of_conversations(identified, tmp_path / "calm", **params)
    stormy = of_conversations(identified, tmp_path / "stormy", **params)
    storm = Storm(stormy)
    seed = random.randrange(1000)
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.chdir(calm.root)
    with serve(load_params().verifier, "storm") as endpoint:
        here = {ENDPOINTS: endpoint.base_url}
        for _ in range(NUM_KILLS):
            stage = start(stormy, **here)
            # Also by answers, so that the fastest run does not end before the last kill.
            stage.wait_a_while(seconds=rng.uniform(0, 3), num_answers=rng.randrange(1, 12))
            storm.kill(stage)
        for project in (stormy, calm):
            undisturbed = start(project, **here)
            assert undisturbed.process.wait(600) == 0, undisturbed.said
    storm.look()
    for cap in cycle([SMALL_CAP, LARGE_CAP]):
        if storm.phases["folding"] == NUM_KILLS_OF_THE_FOLD:
            break
        ask_up_to(cap, stormy)
        stage = start(stormy)
        while stage.process.poll() is None and "nothing to ask" not in stage.said:
            time.sleep(0.0005)  # the fold comes next
        time.sleep(rng.uniform(0, 0.01))
        storm.kill(stage)
    ask_up_to(LARGE_CAP, stormy)
    last = start(stormy)
    assert last.process.wait(600) == 0, last.said
    storm.look()
    print(f"killed when {dict(storm.phases)}, in {storm.num_torn} cases a torn line")

    assert "nothing to ask" in last.said
    assert {"starting", "asking"} <= storm.phases.keys()
    check_complete(stormy)
    assert stormy.traces() == calm.traces()


def ask_up_to(cap: int, project: Project) -> None:
    project.set_params(prompts__sample_cap=cap)
    project.run("python", "-m", "pipeline.prompts")
