"""Several servers, and what happens when one fails, hangs, dies or comes back."""

import asyncio
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from aiohttp import web

from pipeline.client import MAX_BUSY_ATTEMPTS, Answer, Request, ask_all, run
from pipeline.errors import Refused, ServerStopped
from pipeline.server import Endpoint
from tests.fake_server import FakeServer, counters, fail, reset, silence, torn_json
from tests.test_client import ask, endpoint_of, request

STALL_S = 0.4  # polled every 0.1 s


@pytest.fixture(autouse=True)
def short_waits(server, monkeypatch) -> None:
    monkeypatch.setattr("pipeline.client.BACKOFF_S", 0.002)
    monkeypatch.setattr("pipeline.pool.LAST_BREATH_S", 0.3)


@pytest.fixture
def two():
    with FakeServer() as one, FakeServer() as other:
        yield one, other


def questions(number: int) -> list[str]:
    return [f"Q{n}" for n in range(number)]


def chain(servers: list[FakeServer], is_over: Callable[[], bool]) -> list[Answer]:
    """Ask one question after the other, each as the follow-up of the last, until `is_over()`."""
    answers: list[Answer] = []

    def on_answer(answer: Answer) -> Request | None:
        answers.append(answer)
        assert len(answers) < 20_000, "never over"
        return None if is_over() else request(f"Q{len(answers)}")

    endpoints = [endpoint_of(server) for server in servers]
    run(ask_all([request("Q")], endpoints, 1, 30, on_answer))
    return answers


# balance, and servers that fail


def test_several_servers_share_the_work():
    with FakeServer(together=4) as one, FakeServer(together=4) as other:
        ask([one, other], questions(40), concurrency=8)
        assert len(one.bodies) + len(other.bodies) == 40
        assert (one.peak, other.peak) == (4, 4)


@pytest.mark.parametrize(
    "act", [fail(500), fail(502), reset, torn_json], ids=["500", "502", "reset", "torn_json"]
)
def test_a_failing_server_is_set_aside_and_the_others_get_everything(two, act, capsys):
    broken, sound = two
    broken.always(act)
    answers = ask([broken, sound], questions(200), concurrency=8)
    assert {answer.outcome for answer in answers.values()} == {"answered"}
    assert 5 <= len(broken.bodies) <= 5 + 8, "five in a row, and what was in flight"
    assert f"{broken.base_url} failed 5 times in a row" in capsys.readouterr().out


def test_all_that_a_server_drops_in_one_moment_is_one_reason_to_rest(server, capsys):
    """Else 64 connections lost at once would make it five minutes."""
    with FakeServer(together=8) as broken:
        broken.always(fail(500))
        ask([broken, server], questions(60), concurrency=16)
    assert capsys.readouterr().out.count("it rests for") == 1


def test_a_request_goes_on_at_another_server():
    """One attempt a server: two dead ones and a sound one are within the three attempts."""
    with ExitStack() as stack:
        servers = [stack.enter_context(FakeServer()) for _ in range(3)]
        servers[0].always(fail(500))
        servers[1].down()
        [answer] = ask(servers, ["Q"]).values()
    assert (answer.outcome, answer.attempts) == ("answered", 3)
    assert answer.endpoint.base_url == servers[2].base_url
    assert len(servers[0].bodies) == 1


def test_a_server_that_takes_no_connection_is_a_lost_one_and_not_a_time_out(monkeypatch, server):
    """Nothing was generated there, so nothing speaks against asking elsewhere."""
    monkeypatch.setattr("pipeline.client.CONNECT_S", 0.2)
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):  # fill its queue; the kernel drops what comes after
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(deaf.getsockname())
        endpoint = endpoint_of(server)
        gone = Endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1", "m", "0", 1024)
        [answer] = ask([gone, endpoint], ["Q"]).values()
    assert (answer.outcome, answer.attempts) == ("answered", 2)
    assert answer.endpoint == endpoint


def test_one_bad_question_sets_no_server_aside(two):
    """Its three attempts are fewer than the five failures that a server is allowed."""
    for server in two:
        server.when("bad", *[fail(500)] * 3)
    answers = ask(list(two), ["bad", *questions(40)], concurrency=1)
    assert answers.pop("bad").outcome == "failed"
    assert {answer.attempts for answer in answers.values()} == {1}


def test_failures_with_answers_between_them_set_no_server_aside(capsys, two):
    for n in range(0, 40, 2):
        two[0].when(f"Q{n}", fail(500))
    ask(list(two), questions(40), concurrency=1)
    assert "rests" not in capsys.readouterr().out


def test_a_server_that_comes_back_gets_work_again(monkeypatch, two):
    monkeypatch.setattr("pipeline.pool.REST_S", 0.05)
    gone, sound = two
    gone.down()
    back = []

    def is_over() -> bool:
        if len(sound.bodies) >= 20 and not back:
            gone.up()
            back.append(True)
        return len(gone.bodies) >= 5

    answers = chain([gone, sound], is_over)
    assert {answer.outcome for answer in answers} == {"answered"}
    assert len(sound.bodies) >= 20


def test_after_its_rest_a_server_is_tried_with_one_request(monkeypatch, two):
    monkeypatch.setattr("pipeline.pool.REST_S", 0.01)
    broken, sound = two
    broken.next(*[fail(500)] * 5)
    broken.from_request(6, broken.hold)
    answers: list[Answer] = []

    def on_answer(answer: Answer) -> None:
        answers.append(answer)
        if len(answers) == 299:  # all others were answered while it waited for this one
            assert (broken.in_flight, len(broken.bodies)) == (1, 6)
            broken.release()

    requests = [request(question) for question in questions(300)]
    run(ask_all(requests, [endpoint_of(broken), endpoint_of(sound)], 4, 30, on_answer))
    assert {answer.outcome for answer in answers} == {"answered"}


def test_its_rests_double_up_to_a_bound(monkeypatch, two, capsys):
    monkeypatch.setattr("pipeline.pool.REST_S", 0.01)
    monkeypatch.setattr("pipeline.pool.MAX_REST_S", 0.05)
    broken, sound = two
    broken.always(fail(500))
    chain([broken, sound], lambda: len(broken.bodies) >= 10)
    lines = [line for line in capsys.readouterr().out.splitlines() if "rests" in line]
    rests = [line.rsplit(" for ", 1)[1] for line in lines]
    assert rests[:5] == ["0.01 s", "0.02 s", "0.04 s", "0.05 s", "0.05 s"]


def test_an_answer_ends_all_doubt(monkeypatch, two, capsys):
    monkeypatch.setattr("pipeline.pool.REST_S", 0.01)
    broken, sound = two
    broken.next(*[fail(500)] * 6)
    chain([broken, sound], lambda: len(broken.bodies) >= 20)
    broken.next(*[fail(500)] * 5)
    chain([broken, sound], lambda: len(broken.bodies) >= 40)
    lines = [line for line in capsys.readouterr().out.splitlines() if "rests" in line]
    assert [line.rsplit(" for ", 1)[1] for line in lines] == ["0.01 s", "0.02 s", "0.01 s"]


def test_the_run_ends_when_no_server_is_sound(two):
    answers: dict[str, Answer] = {}
    for server in two:
        server.down()
    with pytest.raises(ServerStopped, match=r"failed 30 times in a row.*the next run goes on") as e:
        ask(list(two), questions(500), answers=answers)
    assert all(server.base_url in str(e.value) for server in two)
    assert len(answers) == 29


def test_many_bad_questions_at_once_are_no_dead_server(server):
    """40 given up in a row, while 64 are open and the others take their time."""
    for question in questions(40):
        server.when(question, *[fail(500)] * 3)
    server.always(server.hold)
    outcomes: list[str] = []

    def on_answer(answer: Answer) -> None:
        outcomes.append(answer.outcome)
        if outcomes == ["failed"] * 40:
            server.release()

    requests = [request(question) for question in questions(104)]
    run(ask_all(requests, [endpoint_of(server)], 64, 30, on_answer))
    assert outcomes == ["failed"] * 40 + ["answered"] * 64


# busy servers


def test_a_server_with_few_places_answers_all_in_its_time(server, monkeypatch):
    """A gateway that takes four requests at once and refuses the others: each comes to its turn."""
    monkeypatch.setattr("pipeline.client.MAX_BACKOFF_S", 0.05)
    monkeypatch.setattr("pipeline.pool.LONG_S", 0.0)

    async def four_at_once(http: web.Request, answer: dict) -> web.StreamResponse:
        if server.in_flight > 4:
            return await fail(429)(http, answer)
        await asyncio.sleep(0.02)
        return web.json_response(answer)

    server.always(four_at_once)
    answers = ask(server, questions(64), concurrency=16)
    assert [answer.outcome for answer in answers.values()] == ["answered"] * 64
    assert max(answer.attempts for answer in answers.values()) > MAX_BUSY_ATTEMPTS


def test_a_server_full_of_long_generations_is_waited_for(server, monkeypatch):
    """Nothing is answered for long: what it works at shows that it is alive."""
    monkeypatch.setattr("pipeline.client.MAX_BACKOFF_S", 0.01)
    monkeypatch.setattr("pipeline.pool.LONG_S", 0.0)
    server.next(*[server.hold] * 4)
    num_refused = 0

    async def full(http: web.Request, answer: dict) -> web.StreamResponse:
        nonlocal num_refused
        if server.in_flight <= 4:
            return web.json_response(answer)
        num_refused += 1
        if num_refused == 200:
            server.release()
        return await fail(429)(http, answer)

    server.always(full)
    answers = ask(server, questions(64), concurrency=8)
    assert [answer.outcome for answer in answers.values()] == ["answered"] * 64


def test_a_server_that_is_always_busy_ends_the_run_in_the_end(server):
    server.always(fail(503))
    answers: dict[str, Answer] = {}
    with pytest.raises(ServerStopped, match="HTTP 503"):
        ask(server, questions(500), answers=answers)
    assert 29 <= len(answers) < 250


def test_a_busy_server_is_spared_while_another_is_free(two):
    """And what it refused does not wait until that one is free again."""
    busy, free = two
    busy.always(fail(429, retry_after="60"))
    answers = ask([busy, free], questions(100), concurrency=1)
    assert {answer.outcome for answer in answers.values()} == {"answered"}
    assert len(busy.bodies) == 1


def test_the_only_servers_are_asked_when_all_are_busy(two):
    """A rest is a preference: with everybody at rest the least tried one is next."""
    for server in two:
        server.next(*[fail(503)] * 2)
    assert ask(list(two), ["Q"])["Q"].attempts == 5


# a server of our own


@pytest.fixture
def own(server, tmp_path):
    """`own("exit 3")`: the fake as if it were that shell script, with a log."""
    started = []

    def make(script: str) -> tuple[subprocess.Popen, Endpoint]:
        log = tmp_path / "vllm-generate.log"
        log.write_text("(EngineCore pid=7) ERROR 11-29 [core.py:1] RuntimeError: out of bounds\n")
        process = subprocess.Popen(["sh", "-c", script])
        started.append(process)
        return process, endpoint_of(server, process=process, log=log)

    yield make
    for process in started:
        process.kill()
        process.wait()


LAST_WORDS = r"code -?\d+: RuntimeError: out of bounds .*vllm-generate\.log.*the next run goes on"


@pytest.mark.parametrize("act", [reset, fail(500), fail(503)], ids=["reset", "500", "503"])
def test_a_server_of_ours_that_died_ends_the_run_at_once_and_burns_no_question(server, own, act):
    process, endpoint = own("exec sleep 300")
    answers: dict[str, Answer] = {}

    async def die(http: web.Request, answer: dict) -> web.StreamResponse:
        process.kill()
        process.wait()
        return await act(http, answer)

    server.from_request(11, die)
    with pytest.raises(ServerStopped, match=LAST_WORDS):
        ask(endpoint, questions(500), concurrency=4, answers=answers)
    assert [answer.outcome for answer in answers.values()] == ["answered"] * 10
    assert len(server.bodies) <= 10 + 4


def test_its_end_shows_after_its_connections_are_gone(server, own, monkeypatch):
    monkeypatch.setattr("pipeline.pool.LAST_BREATH_S", 20)
    _, endpoint = own("sleep 1; exit 3")
    server.always(reset)
    answers: dict[str, Answer] = {}
    with pytest.raises(ServerStopped, match="code 3"):
        ask(endpoint, questions(100), answers=answers)
    assert answers == {}


def test_a_question_that_a_living_server_of_ours_cannot_answer_fails_alone(server, own):
    _, endpoint = own("exec sleep 300")
    server.when("Q2", *[fail(500)] * 3)
    answers = ask(endpoint, ["Q1", "Q2", "Q3"])
    assert [answers[q].outcome for q in ("Q1", "Q2", "Q3")] == ["answered", "failed", "answered"]


# hung servers


@pytest.fixture
def counting():
    with FakeServer(counting=True) as server:
        yield server


def test_a_hung_server_ends_the_run(counting):
    counting.from_request(5, silence)
    answers: dict[str, Answer] = {}
    with pytest.raises(
        ServerStopped, match=r"nothing for 0\.4 s while 4 requests waited; what was"
    ):
        ask(counting, questions(100), concurrency=4, stall_s=STALL_S, answers=answers)
    assert [answer.outcome for answer in answers.values()] == ["answered"] * 4


def test_what_a_hung_server_holds_is_asked_elsewhere(counting, server, capsys):
    counting.from_request(5, silence)
    answers = ask([counting, server], questions(60), concurrency=4, stall_s=STALL_S)
    assert {answer.outcome for answer in answers.values()} == {"answered"}
    assert {answer.attempts for answer in answers.values()} == {1, 2}
    assert counting.in_flight == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{counting.base_url} generated nothing for 0.4 s while ")
    assert line.endswith("requests waited; it rests for 30 s")


@pytest.mark.parametrize("kind", ["generation", "prompt"])
def test_a_server_that_is_slow_but_moves_is_not_hung(server, kind):
    """Long prompts are read before anything is generated."""

    async def moving(http: web.Request, answer: dict) -> web.StreamResponse:
        return web.Response(text=counters({kind: server.num_polls // 2}))

    assert_survives(server, moving)


@pytest.mark.parametrize(
    "metrics",
    [
        fail(404),
        fail(500),
        silence,
        lambda http, answer: says("vllm:num_requests_running 3.0\n"),
        lambda http, answer: says("<html>not { metrics"),
    ],
    ids=["404", "500", "silence", "other_names", "no_metrics"],
)
def test_a_server_without_such_counters_is_not_watched(monkeypatch, server, metrics):
    """It is looked at once, and then no silence of its counters can count against it."""
    monkeypatch.setattr("pipeline.pool.METRICS_TIMEOUT_S", 0.1)
    server.metrics_act = metrics
    server.always(server.hold)
    threading.Timer(4 * STALL_S, server.release).start()
    answers = ask(server, ["Q"], stall_s=STALL_S)
    assert (answers["Q"].outcome, answers["Q"].attempts) == ("answered", 1)
    assert server.num_polls == 1


def test_a_server_that_hangs_before_it_is_first_looked_at_again_is_hung(counting):
    """It hangs on the very first question, and its counters with it."""

    async def only_before(http: web.Request, answer: dict) -> web.StreamResponse:
        if counting.bodies:
            return await silence(http, answer)
        return await says(counters({"prompt": 0}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.pool.METRICS_TIMEOUT_S", 0.1)
        counting.metrics_act = only_before
        counting.always(silence)
        with pytest.raises(ServerStopped, match=r"generated nothing for 0\.4 s while 1 requests"):
            ask(counting, ["Q"], stall_s=STALL_S)


async def says(text: str) -> web.Response:
    return web.Response(text=text)


def assert_survives(server: FakeServer, metrics) -> None:
    """A request that waits for 15 polls, nearly four times `STALL_S`, is answered."""

    async def act(http: web.Request, answer: dict) -> web.StreamResponse:
        if server.num_polls >= 15:
            server.release()
        return await metrics(http, answer)

    server.metrics_act = act
    server.always(server.hold)
    answers = ask(server, ["Q"], stall_s=STALL_S)
    assert (answers["Q"].outcome, answers["Q"].attempts) == ("answered", 1)


def test_a_server_whose_metrics_fall_silent_is_hung(monkeypatch, counting):
    monkeypatch.setattr("pipeline.pool.METRICS_TIMEOUT_S", 0.1)

    async def falls_silent(http: web.Request, answer: dict) -> web.StreamResponse:
        if counting.num_polls > 3:
            return await silence(http, answer)
        return await says(counters({"prompt": counting.num_polls}))

    counting.metrics_act = falls_silent
    counting.always(silence)
    with pytest.raises(ServerStopped, match="generated nothing"):
        ask(counting, ["Q"], stall_s=STALL_S)


def test_a_pause_between_attempts_is_no_stall(monkeypatch, counting):
    """Nothing is in flight then, so nothing has to move."""
    monkeypatch.setattr("pipeline.client.BACKOFF_S", 2.0)
    monkeypatch.setattr("random.uniform", lambda low, high: 1.0)
    counting.next(fail(429))
    assert ask(counting, ["Q"], stall_s=STALL_S)["Q"].attempts == 2
    assert counting.num_polls >= 10


def test_nobody_polls_when_nobody_watches(counting):
    ask(counting, questions(20))
    assert counting.num_polls == 0


def test_a_hung_server_of_ours_that_died_says_its_last_words(counting, own):
    process, endpoint = own("exit 3")
    process.wait()
    counting.always(silence)
    hung = endpoint_of(counting, process=process, log=endpoint.log)
    with pytest.raises(ServerStopped, match="RuntimeError: out of bounds"):
        ask(hung, ["Q"], stall_s=STALL_S)


# servers that refuse


@pytest.mark.parametrize("tokenizes", [True, False])
def test_a_refusal_that_no_length_explains_is_tried_at_the_other_server(tokenizes):
    with FakeServer(tokenizes=tokenizes) as odd, FakeServer() as sound:
        odd.always(fail(400, "no such role"))
        answers = ask([odd, sound], questions(40), concurrency=1)
        assert {answer.outcome for answer in answers.values()} == {"answered"}
        assert {answer.endpoint.base_url for answer in answers.values()} == {sound.base_url}
        assert len(odd.bodies) == sum(answer.attempts == 2 for answer in answers.values())


def test_what_both_servers_refuse_was_asked_once_of_each(two):
    for server in two:
        server.when("Q1", *[fail(400, "no such role")] * 9)
    answers = ask(list(two), ["Q0", "Q1", "Q2"], concurrency=1)
    assert (answers["Q1"].outcome, answers["Q1"].attempts) == ("refused", 2)
    assert [server.questions.count("Q1") for server in two] == [1, 1]
    assert answers["Q2"].outcome == "answered"


def test_a_question_that_is_too_long_is_not_tried_elsewhere(two):
    answers = ask(list(two), ["Q" * 1100], concurrency=1)
    [answer] = answers.values()
    assert (answer.outcome, answer.attempts) == ("refused", 1)
    assert [len(server.bodies) for server in two] == [1, 0]


def test_two_servers_that_refuse_everything_end_the_run(two):
    answers: dict[str, Answer] = {}
    for server in two:
        server.always(fail(400, "no such role"))
    with pytest.raises(Refused, match=r"refused 30 questions in a row.*no such role") as caught:
        ask(list(two), questions(200), answers=answers)
    assert all(server.base_url in str(caught.value) for server in two)
    assert len(answers) == 29


def test_a_pause_that_was_asked_for_is_kept_although_answers_come(two):
    """Of the two requests at one server one is refused for a minute, then the other is answered."""
    busy, free = two
    refused: list[str] = []

    async def refuse(http: web.Request, answer: dict) -> web.StreamResponse:
        body = await http.json()
        refused.append(body["messages"][-1]["content"])
        return await fail(429, retry_after="60")(http, answer)

    async def slow(http: web.Request, answer: dict) -> web.StreamResponse:
        while not set(refused) & set(free.questions):
            await asyncio.sleep(0.005)
        return web.json_response(answer)

    busy.next(slow, refuse)
    answers = ask([busy, free], questions(200), concurrency=4)
    assert {answer.outcome for answer in answers.values()} == {"answered"}
    assert (len(busy.bodies), len(free.bodies)) == (2, 199)
