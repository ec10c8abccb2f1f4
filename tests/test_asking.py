"""A server of our own that dies: what is asked again, what is not, and when the stage gives up."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from pipeline import generate
from pipeline.errors import BadRun, ServerStopped
from pipeline.server import Endpoint
from tests.conftest import ENDPOINTS
from tests.fake_server import (
    MODEL,
    THINK,
    THINK_END,
    VERSION,
    Act,
    FakeServer,
    chat_answer,
    edited,
    fail,
    ids,
    is_question,
    silence,
)

LONG = [THINK, *ids("a long thought, " * 2), THINK_END, *ids("42")]
TWICE = "in flight when the server died, twice"


class Own:
    """The fake as servers of our own: one process after the other, of which each can die."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.names: list[str] = []  # of the starts, as the logs are called
        self.num_asked: list[int] = []  # questions that were asked before each start
        self.processes: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def serve(self, verifier: object, name: str, *rest: object) -> Iterator[Endpoint]:
        self.names.append(name)
        self.num_asked.append(len(self.server.asked))
        log = Path(f"logs/vllm-{name}.log")
        log.parent.mkdir(exist_ok=True)
        log.write_text(f"RuntimeError: the log of start {len(self.names)}\n", encoding="utf-8")
        process = subprocess.Popen(["sleep", "300"])
        self.processes.append(process)
        url = self.server.base_url
        try:
            yield Endpoint(url, MODEL, VERSION, 1024, process=process, log=log)
        finally:
            self.kill()

    def kill(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()

    @property
    def is_dead(self) -> bool:
        return self.processes[-1].poll() is not None

    async def die(self, http: web.Request, answer: dict) -> web.StreamResponse:
        """The process is gone, and every connection with it."""
        self.kill()
        return await self.drop(http)

    async def drop(self, http: web.Request) -> web.StreamResponse:
        assert http.transport is not None
        http.transport.abort()
        return web.Response()

    def die_with(self, number: int) -> Act:
        """Die as soon as so many requests are in flight, and take them all along."""

        async def act(http: web.Request, answer: dict) -> web.StreamResponse:
            while self.server.in_flight < number and not self.is_dead:
                await asyncio.sleep(0.005)
            return await self.die(http, answer)

        return act

    def asked_since(self, start: int) -> list[str]:
        """The questions that were asked between a start (1 is the first) and the next one."""
        return self.server.asked[slice(*[*self.num_asked, None][start - 1 : start + 1])]


@pytest.fixture
def own(project, monkeypatch) -> Iterator[Own]:
    monkeypatch.setattr("pipeline.client.BACKOFF_S", 0.01)
    monkeypatch.setattr("pipeline.pool.LAST_BREATH_S", 0.2)
    monkeypatch.delenv(ENDPOINTS, raising=False)
    with FakeServer(spares_probes=True) as server:
        own = Own(server)
        monkeypatch.setattr("pipeline.generate.serve", own.serve)
        yield own


def ask(project, number: int, **settings: object) -> list[str]:
    questions = [f"Q{n}" for n in range(number)]
    project.ask(*questions)
    project.set(**{f"generate.{name}": value for name, value in settings.items()})
    return questions


def statuses(project, *kinds: str) -> dict[str, str]:
    """By question; with kinds, only those that are of none of them."""
    rows = {row["messages"][-1]["content"]: row["status"] for row in project.rows()}
    return {question: status for question, status in rows.items() if status not in kinds}


def restarts(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "starting it again" in line]


# a server that dies


def test_a_server_that_dies_is_started_again_and_every_question_answered_once(project, own, capsys):
    questions = ask(project, 40)
    own.server.when("Q20", own.die)
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok")
    assert own.names == ["generate", "generate-2"]
    asked = own.server.asked
    assert {question for question in questions if asked.count(question) > 2} == set()
    assert 1 <= len(asked) - 40 <= 4, "again is only what was in flight"
    [line] = restarts(capsys)
    assert "code -9: RuntimeError: the log of start 1" in line
    assert line.endswith("; starting it again (1 of 3)")
    assert "the next run goes on" not in line


def test_the_log_of_a_server_that_died_is_kept(project, own):
    ask(project, 8)
    own.server.when("Q6", own.die)
    generate.main()
    logs = sorted(path.name for path in Path("logs").glob("vllm-*"))
    assert logs == ["vllm-generate-2.log", "vllm-generate.log"]
    assert "start 1" in Path("logs/vllm-generate.log").read_text("utf-8")


def test_only_the_first_start_is_probed(project, own):
    ask(project, 8)
    own.server.when("Q6", own.die)
    generate.main()
    bodies = own.server.bodies
    first_question = next(n for n, body in enumerate(bodies) if is_question(body))
    assert first_question > 0
    assert all(is_question(body) for body in bodies[first_question:])


# a question that kills it


def test_a_question_that_kills_the_server_each_time_fails_alone(project, own):
    questions = ask(project, 40, concurrency=8, max_failed_fraction=0.5)
    own.server.when("Q20", *[own.die] * 10)
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok") | {"Q20": "failed"}
    [row] = [row for row in project.rows() if row["status"] == "failed"]
    assert (row["error"], row["attempts"]) == (TWICE, 2)
    assert own.server.asked.count("Q20") == 2
    assert own.names == ["generate", "generate-2", "generate-3"]


def test_it_is_asked_again_by_the_next_run_and_no_other_is(project, own):
    ask(project, 40, concurrency=8, max_failed_fraction=0.5)
    own.server.when("Q20", *[own.die] * 2)
    generate.main()
    own.server.bodies.clear()
    generate.main()
    assert own.server.asked == ["Q20"]
    assert statuses(project, "ok") == {}


def test_one_that_alone_is_more_than_may_fail_fails_the_stage(project, own):
    ask(project, 40, concurrency=8, max_failed_fraction=0.0)
    own.server.when("Q20", *[own.die] * 2)
    with pytest.raises(BadRun, match=rf"^1 of 40 questions have no answer \(last: {TWICE}\)"):
        generate.main()
    assert statuses(project, "ok") == {"Q20": "failed"}


@pytest.mark.parametrize(("concurrency", "few"), [(16, 2), (8, 1), (4, 1)])
def test_what_was_in_flight_comes_last_and_in_small_numbers(project, own, concurrency, few):
    questions = ask(project, 64, concurrency=concurrency)
    at_once: list[int] = []

    async def after_it(http: web.Request, answer: dict) -> web.StreamResponse:
        if not own.is_dead and len(own.names) == 1:
            return await own.die_with(concurrency)(http, answer)
        if len(own.server.asked) > 64:  # the others are done
            while not at_once and own.server.in_flight < few:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)  # for more than these to come, if they would
            at_once.append(own.server.in_flight)
        return web.json_response(answer)

    own.server.from_request(21, after_it)
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok")
    suspects = own.asked_since(1)[20:]
    assert len(suspects) == concurrency
    assert set(own.asked_since(2)[-concurrency:]) == set(suspects)
    assert len(own.asked_since(2)) == 64 - 20
    assert max(at_once) == few


def test_one_among_the_very_first_that_kills_it_fails_alone_too(project, own):
    """Nothing is answered before it: the second start tells it from the others."""
    questions = ask(project, 40, max_failed_fraction=0.5)
    own.server.when("Q1", *[own.die] * 10)
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok") | {"Q1": "failed"}
    assert own.server.asked.count("Q1") == 2


# when starting it again is pointless


def test_a_server_that_dies_twice_before_any_answer_is_not_started_again(project, own):
    """The first death may be one question's fault, the second of other ones is not."""
    ask(project, 40)
    own.server.always(own.die)
    with pytest.raises(ServerStopped, match=r"the log of start 2.*the next run goes on"):
        generate.main()
    assert own.names == ["generate", "generate-2"]
    assert project.rows("data/traces/journal.jsonl") == []


def test_a_server_that_dies_before_it_is_asked_is_not_started_again(project, own, monkeypatch):
    def dies(*rest: object) -> None:
        raise ServerStopped("it died over the probe")

    ask(project, 40)
    monkeypatch.setattr("pipeline.generate.probe", dies)
    with pytest.raises(ServerStopped, match="over the probe"):
        generate.main()
    assert own.names == ["generate"]


def test_one_that_answers_nothing_after_its_second_start_is_not_started_a_third_time(project, own):
    ask(project, 40)
    own.server.from_request(11, own.die)
    with pytest.raises(ServerStopped, match="the log of start 2"):
        generate.main()
    assert own.names == ["generate", "generate-2"]
    assert len(project.rows("data/traces/journal.jsonl")) == 10


def test_four_deaths_end_the_run_however_much_is_answered_between_them(project, own, capsys):
    questions = ask(project, 60, concurrency=1)
    for number in (10, 20, 30, 40):
        own.server.when(f"Q{number}", own.die)
    with pytest.raises(ServerStopped, match=r"the log of start 4.*the next run goes on"):
        generate.main()
    assert own.names == ["generate", "generate-2", "generate-3", "generate-4"]
    assert [line[-8:] for line in restarts(capsys)] == ["(1 of 3)", "(2 of 3)", "(3 of 3)"]
    own.server.bodies.clear()
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok")
    assert {"Q10", "Q20", "Q30", "Q40"} <= set(own.server.asked)
    assert len(own.server.asked) == 23  # 37 were answered: ten, and three times nine


# what is not asked again


def test_what_timed_out_is_not_asked_again_by_a_run_that_starts_its_server_again(project, own):
    questions = ask(project, 12, concurrency=2, timeout_s=1, max_failed_fraction=0.5)
    own.server.when("Q1", silence)
    timed_out = []

    async def die_after_it(http: web.Request, answer: dict) -> web.StreamResponse:
        while not timed_out:
            await asyncio.sleep(0.01)
            timed_out[:] = [r for r in project.rows("data/traces/journal.jsonl") if "error" in r]
        return await own.die(http, answer)

    own.server.when("Q9", die_after_it)
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok") | {"Q1": "timed_out"}
    assert own.names == ["generate", "generate-2"]
    assert own.server.asked.count("Q1") == 1
    own.server.bodies.clear()
    generate.main()
    assert own.server.asked == ["Q1"]
    assert statuses(project, "ok") == {}


def test_questions_that_had_no_answer_before_say_nothing_about_the_server(project, own):
    """Eight hopeless ones are asked again, the first four of them before all others."""
    ask(project, 40, max_failed_fraction=0.5)
    hopeless = [f"Q{5 * n}" for n in range(1, 8)] + ["Q39"]
    for question in hopeless:
        own.server.when(question, *[fail(500)] * 3)
    generate.main()
    assert statuses(project, "ok") == dict.fromkeys(hopeless, "failed")
    for question in hopeless:
        own.server.when(question, *[fail(500)] * 3)
    own.server.bodies.clear()
    generate.main()
    assert set(own.server.asked) == set(hopeless)
    assert statuses(project, "ok") == dict.fromkeys(hopeless, "failed")


# a server that gives less than is asked for


def test_a_server_that_gives_less_than_is_asked_for_is_not_asked_for_ever(project, own):
    """Its own bound (max_new_tokens) is 20, whatever a request wants."""
    ask(
        project,
        8,
        **{"max_tokens": 400, "retry_max_tokens": 600, "on_truncated": "retry"},
        **{"gate.min_reasoning_fraction": 0.5},
    )

    async def capped(http: web.Request, answer: dict) -> web.StreamResponse:
        assert len(own.server.bodies) < 60, "asked for ever"
        body, prompt = await http.json(), answer["prompt_token_ids"]
        return web.json_response(chat_answer(body, prompt, LONG, 20, thinking=True))

    own.server.when("Q6", *[capped] * 50)
    generate.main()
    asked = [b["max_tokens"] for b in own.server.bodies if b["messages"][-1]["content"] == "Q6"]
    assert asked == [400, 600]
    assert statuses(project, "ok") == {"Q6": "truncated_in_reasoning"}
    own.server.bodies.clear()
    generate.main()
    assert own.server.bodies == []


def test_one_whose_prompt_leaves_less_room_than_max_tokens_neither(project, own):
    """The room of 1,024 - 403 is what is asked for, and never more than that."""
    long_one = "x" * 400  # a token each, and three of the template
    project.ask("Q1", "Q2", "Q3", "Q4", "Q5", long_one)
    project.set(
        **{"generate.max_tokens": 700, "generate.retry_max_tokens": 900},
        **{"generate.on_truncated": "retry", "generate.gate.min_reasoning_fraction": 0.5},
    )

    async def capped(http: web.Request, answer: dict) -> web.StreamResponse:
        assert len(own.server.bodies) < 60, "asked for ever"
        body, prompt = await http.json(), answer["prompt_token_ids"]
        return web.json_response(chat_answer(body, prompt, LONG, 20, thinking=True))

    own.server.when(long_one, *[capped] * 50)
    generate.main()
    assert own.server.asked.count(long_one) <= 2
    assert statuses(project, "ok") == {long_one: "truncated_in_reasoning"}


def test_one_that_says_nothing_of_the_prompts_length_neither(project, own):
    """An older server: it refuses 700 tokens, takes 621, and bills no prompt that explains it."""
    own.server.clamps = False
    long_one = "x" * 400
    project.ask("Q1", "Q2", "Q3", "Q4", "Q5", long_one)
    project.set(
        **{"generate.max_tokens": 700, "generate.retry_max_tokens": 900},
        **{"generate.on_truncated": "retry", "generate.gate.min_reasoning_fraction": 0.5},
    )

    async def capped(http: web.Request, answer: dict) -> web.StreamResponse:
        assert len(own.server.bodies) < 60, "asked for ever"
        body, prompt = await http.json(), answer["prompt_token_ids"]
        said = chat_answer(body, prompt, LONG, 20, thinking=True)
        return web.json_response(said | {"prompt_token_ids": None, "usage": None})

    own.server.always(capped)
    for question in ("Q1", "Q2", "Q3", "Q4", "Q5"):
        own.server.when(question, edited(lambda answer: None))
    generate.main()
    bodies = [b for b in own.server.bodies if b["messages"][-1]["content"] == long_one]
    assert [body["max_tokens"] for body in bodies if is_question(body)] == [700, 621]
    assert statuses(project, "ok") == {long_one: "truncated_in_reasoning"}
