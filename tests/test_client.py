"""Many requests at once: what is on the wire, what is repeated, and what ends the run."""

import asyncio
import gc
import random
import resource
from dataclasses import replace

import pytest
from aiohttp import web

from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import BadRun, PipelineError, Refused, ServerStopped, UserError
from pipeline.exchange import request_body
from pipeline.params import load_params
from pipeline.server import Endpoint
from tests.fake_server import (
    MODEL,
    VERSION,
    FakeServer,
    cut_off,
    fail,
    in_two_chunks,
    prompt_ids,
    reset,
    silence,
    torn_json,
    written,
)


def endpoint_of(server: FakeServer, **own: object) -> Endpoint:
    """`process` and `log` make it a server of our own."""
    return replace(Endpoint(server.base_url, MODEL, VERSION, 1024), **own)


def request(question: str, **changes: object) -> Request:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 100,
        "return_token_ids": True,
    }
    return Request(question, body | changes)


def ask(
    servers: FakeServer | Endpoint | list[FakeServer | Endpoint],
    questions: list[str],
    concurrency: int = 4,
    timeout_s: float = 30,
    stall_s: float | None = None,
    answers: dict[str, Answer] | None = None,
) -> dict[str, Answer]:
    """The answers by question; those that came before an error are in `answers`."""
    answers = {} if answers is None else answers
    endpoints = [
        endpoint_of(server) if isinstance(server, FakeServer) else server
        for server in (servers if isinstance(servers, list) else [servers])
    ]

    def on_answer(answer: Answer) -> None:
        assert answer.key not in answers, "answered twice"
        answers[answer.key] = answer

    requests = [request(question) for question in questions]
    run(ask_all(requests, endpoints, concurrency, timeout_s, on_answer, stall_s=stall_s))
    return answers


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """Records how long the client wants to wait, and lets it go on at once; no jitter."""
    asked_for: list[float] = []
    sleep = asyncio.sleep

    async def at_once(delay: float, *rest: object) -> None:
        if delay:
            asked_for.append(delay)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)
    return asked_for


def test_the_wire_carries_every_sampling_value_and_nothing_else(project, server):
    project.set(
        **{
            "generate.temperature": 0.6,
            "generate.top_p": 0.95,
            "generate.top_k": 20,
            "generate.thinking_switch": "thinking",
        }
    )
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    body = request_body(messages, load_params().generate, 77)
    run(ask_all([Request("k", body)], [endpoint_of(server)], 1, 30, lambda answer: None))
    assert server.bodies == [
        {
            "model": "models/verifier",
            "messages": messages,
            "max_tokens": 77,
            "temperature": 0.6,
            "top_p": 0.95,
            "top_k": 20,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "chat_template_kwargs": {"thinking": True},
            "return_token_ids": True,
        }
    ]
    assert server.bodies[0]["chat_template_kwargs"]["thinking"] is True


def test_thinking_off_is_sent_as_false_and_no_switch_as_nothing(project):
    messages = [{"role": "user", "content": "Q"}]
    project.set(**{"generate.thinking": False})
    body = request_body(messages, load_params().generate, 77)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["chat_template_kwargs"]["enable_thinking"] is False
    project.set(**{"generate.thinking_switch": None})
    body = request_body(messages, load_params().generate, 77)
    assert not body.get("chat_template_kwargs")


def test_an_answer_is_the_servers_json_as_it_came(server):
    [answer] = ask(server, ["Q"]).values()
    assert (answer.outcome, answer.attempts, answer.error) == ("answered", 1, None)
    assert answer.body["choices"][0]["token_ids"] == written("Q")
    assert answer.endpoint.version == "0.32.0"
    assert answer.max_tokens == 100


def test_a_follow_up_is_sent_before_anything_new(server):
    """The next turn, or the same with a larger budget: one generation a question at a time."""
    follow_ups = {"Q1": "Q1 more", "Q1 more": "Q1 most", "Q3": "Q3 more"}
    answers: list[tuple[str, str]] = []

    def on_answer(answer: Answer) -> Request | None:
        answers.append((answer.key, answer.outcome))
        return request(follow_ups[answer.key]) if answer.key in follow_ups else None

    server.when("Q1 more", fail(400))
    requests = [request(question) for question in ("Q1", "Q2", "Q3", "Q4")]
    run(ask_all(requests, [endpoint_of(server)], 1, 30, on_answer))
    assert server.questions == ["Q1", "Q1 more", "Q1 most", "Q2", "Q3", "Q3 more", "Q4"]
    assert [key for key, _ in answers] == server.questions
    assert answers[1] == ("Q1 more", "refused")


def test_all_but_the_first_wait_until_they_may_go_on():
    """Nothing else is on its way while the first are open, whatever the concurrency."""
    with FakeServer(together=3) as server:
        go_on = asyncio.Event()
        asked_by_then: list[int] = []

        def on_answer(answer: Answer) -> None:
            asked_by_then.append(len(server.bodies))
            if len(asked_by_then) == 3:
                go_on.set()

        requests = [request(f"Q{n}") for n in range(20)]
        first = {"num_first": 3, "go_on": go_on}
        run(ask_all(requests, [endpoint_of(server)], 8, 30, on_answer, **first))
    assert asked_by_then[:3] == [3, 3, 3]
    assert sorted(server.questions) == sorted(f"Q{n}" for n in range(20))


def test_as_many_requests_as_asked_for_are_really_in_flight():
    questions = [f"Q{n}" for n in range(128)]
    with FakeServer(together=128) as server:
        assert len(ask(server, questions, concurrency=128)) == 128
        assert server.peak == 128


def test_a_login_shells_limit_of_open_files_is_no_bound():
    """1,024 on most systems, and each connection is an open file; here in small."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with FakeServer(together=128) as server:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        try:
            answers = ask(server, [f"Q{n}" for n in range(128)], concurrency=128)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {answer.attempts for answer in answers.values()} == {1}


def test_no_more_requests_than_asked_for_are_in_flight(server):
    ask(server, [f"Q{n}" for n in range(30)], concurrency=3)
    assert server.peak <= 3
    assert sorted(server.questions) == sorted(f"Q{n}" for n in range(30))


def test_an_answer_that_comes_in_pieces_is_whole(server):
    server.always(in_two_chunks)
    assert ask(server, ["Q"])["Q"].body["choices"][0]["token_ids"] == written("Q")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_question_is_asked_once_and_the_others_go_on(server, status):
    words = "The decoder prompt (length 10127) is longer than the maximum model length of 8192."
    server.when("Q2", fail(status, words))
    answers = ask(server, ["Q1", "Q2", "Q3"])
    assert [answers[q].outcome for q in ("Q1", "Q2", "Q3")] == ["answered", "refused", "answered"]
    assert words in answers["Q2"].error
    assert answers["Q2"].body is None
    assert server.questions.count("Q2") == 1


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(server, status):
    server.always(fail(status, "The model `kimi` does not exist."))
    with pytest.raises(BadRun, match=f"HTTP {status}: The model `kimi` does not exist"):
        ask(server, [f"Q{n}" for n in range(50)], concurrency=4)
    assert len(server.bodies) <= 4


def test_the_key_is_sent_and_stands_in_no_message(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.always(fail(401, "Incorrect API key", echo_key=True))
    with pytest.raises(BadRun, match="HTTP 401: Incorrect API key") as caught:
        ask(server, ["Q"])
    assert server.headers[0]["Authorization"] == "Bearer sk-very-secret"
    assert "sk-very-secret" not in str(caught.value)


def test_the_key_stands_in_no_stored_error(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    server.always(fail(400, "too long", echo_key=True))
    assert "sk-very-secret" not in ask(server, ["Q"])["Q"].error


@pytest.mark.parametrize(
    "act",
    [fail(408), fail(409), fail(500), fail(502), reset, torn_json, cut_off],
    ids=["408", "409", "500", "502", "reset", "torn_json", "cut_off"],
)
def test_a_passing_fault_is_survived(server, act):
    server.when("Q", act, act)
    answer = ask(server, ["Q"])["Q"]
    assert (answer.outcome, answer.attempts) == ("answered", 3)
    assert server.questions == ["Q", "Q", "Q"]


@pytest.mark.parametrize(
    ("act", "said"),
    [(fail(500, "harmony"), "HTTP 500: harmony"), (reset, ""), (torn_json, "JSON")],
    ids=["500", "reset", "torn_json"],
)
def test_a_lasting_fault_of_one_question_fails_after_three_attempts(server, act, said):
    server.when("Q2", *[act] * 10)
    answers = ask(server, ["Q1", "Q2", "Q3"])
    assert (answers["Q2"].outcome, answers["Q2"].attempts) == ("failed", 3)
    assert said in answers["Q2"].error
    assert answers["Q2"].error
    assert server.questions.count("Q2") == 3
    assert answers["Q3"].outcome == "answered"


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_up_to_eight_times(server, status):
    server.when("Q1", *[fail(status)] * 7)
    server.when("Q2", *[fail(status, "come back")] * 20)
    answers = ask(server, ["Q1", "Q2"])
    assert (answers["Q1"].outcome, answers["Q1"].attempts) == ("answered", 8)
    assert (answers["Q2"].outcome, answers["Q2"].attempts) == ("failed", 8)
    assert answers["Q2"].error == f"HTTP {status}: come back"
    assert server.questions.count("Q2") == 8


@pytest.mark.parametrize(
    ("statuses", "attempts"),
    [
        ([429, 500, 429, 500, 429, 500, 429], 6),  # the third fault ends it
        ([429, 500, 429, 429, 500, 429, 429, 429, 429], 8),
        ([500, 500, 429, 429, 429, 429, 429, 429, 429], 8),
    ],
)
def test_busy_answers_and_faults_have_their_own_count_and_one_in_common(server, statuses, attempts):
    server.when("Q", *[fail(status) for status in statuses])
    answer = ask(server, ["Q"])["Q"]
    assert (answer.outcome, answer.attempts) == ("failed", attempts)
    assert len(server.bodies) == attempts


def test_a_busy_server_is_given_twice_the_time_after_each_try_up_to_a_minute(pauses):
    with FakeServer() as server:
        server.always(fail(429))
        ask(server, ["Q"])
    assert pauses == [1, 2, 4, 8, 16, 32, 60]


def test_a_fault_is_followed_by_a_short_pause(pauses):
    with FakeServer() as server:
        server.always(fail(500))
        ask(server, ["Q"])
    assert pauses == [1, 2]


@pytest.mark.parametrize(
    ("retry_after", "pause"),
    [
        ("7", 7),
        ("0.5", 0.5),
        ("86400", 60),
        ("0", 1),
        ("-3", 1),
        ("nan", 1),
        ("soon", 1),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 1),
    ],
)
def test_a_busy_server_that_names_a_time_gets_it(pauses, retry_after, pause):
    with FakeServer() as server:
        server.next(fail(429, retry_after=retry_after))
        assert ask(server, ["Q"])["Q"].outcome == "answered"
    assert pauses == [pause]


@pytest.mark.parametrize("retry_after", [None, "5"])
def test_requests_refused_in_one_moment_do_not_come_back_in_one(monkeypatch, pauses, retry_after):
    draw = random.Random(0)
    monkeypatch.setattr(random, "uniform", lambda low, high: draw.uniform(low, high))
    with FakeServer() as server:
        server.next(*[fail(503, retry_after=retry_after)] * 20)
        ask(server, [f"Q{n}" for n in range(20)], concurrency=20)
    assert len(set(pauses)) == 20
    assert min(pauses) >= (5 if retry_after else 0.5)


# a budget that exceeds the context


BIG = 1000  # of 1,024, with a question of 33 tokens


def ask_big(server: FakeServer, question: str = "Q" * 30, **changes: object) -> Answer:
    answers: list[Answer] = []
    asked = request(question, **({"max_tokens": BIG} | changes))
    run(ask_all([asked], [endpoint_of(server)], 1, 30, answers.append))
    [answer] = answers
    return answer


@pytest.mark.parametrize("thinking", [True, False])
def test_a_budget_that_alone_is_too_large_is_cut_to_what_the_prompt_leaves(thinking):
    """C10. Thinking off is two more prompt tokens here, so the switch must be counted with."""
    messages = [{"role": "user", "content": "Q" * 30}]
    room = 1024 - len(prompt_ids(messages, thinking=thinking))
    switch = {"enable_thinking": thinking}
    with FakeServer(clamps=False) as server:
        answer = ask_big(server, chat_template_kwargs=switch)
        assert [body["max_tokens"] for body in server.bodies] == [BIG, room]
        assert server.tokenize_bodies == [
            {
                "model": MODEL,
                "messages": messages,
                "add_generation_prompt": True,
                "chat_template_kwargs": switch,
            }
        ]
    assert (answer.outcome, answer.max_tokens, answer.attempts) == ("answered", room, 2)
    assert answer.body["choices"][0]["token_ids"] == written("Q" * 30, thinking=thinking)


def test_a_server_that_cuts_the_budget_by_itself_is_asked_once():
    with FakeServer() as server:
        answer = ask_big(server)
        assert (answer.outcome, answer.max_tokens, answer.attempts) == ("answered", BIG, 1)
        assert server.tokenize_bodies == []


@pytest.mark.parametrize(
    ("kind", "question", "max_tokens", "act"),
    [
        ({"clamps": False, "tokenizes": False}, "Q" * 30, BIG, None),
        ({"clamps": False}, "Q" * 1022, BIG, None),
        ({"clamps": False}, "Q" * 2000, BIG, None),
        ({}, "Q" * 30, 10, fail(400, "no such role")),
    ],
    ids=["no_tokenize", "prompt_fills_it", "prompt_too_long", "other_reason"],
)
def test_what_a_smaller_budget_cannot_save_is_refused_once(kind, question, max_tokens, act):
    with FakeServer(**kind) as server:
        server.always(act)
        answer = ask_big(server, question, max_tokens=max_tokens)
        assert (answer.outcome, answer.attempts, len(server.bodies)) == ("refused", 1, 1)
        assert answer.max_tokens == max_tokens
        assert "HTTP 400" in answer.error


def test_a_cut_budget_that_is_refused_too_is_refused(server):
    server.max_model_len = 100  # the page says so, the refusal has another reason
    server.always(fail(400, "no such role"))
    answer = ask_big(server)
    assert (answer.outcome, answer.attempts, len(server.bodies)) == ("refused", 2, 2)


def test_a_request_without_a_budget_has_none_to_cut(server):
    server.always(fail(400))
    body = {"messages": [{"role": "user", "content": "Q"}]}
    answers: list[Answer] = []
    run(ask_all([Request("Q", body)], [endpoint_of(server)], 1, 30, answers.append))
    assert [(answer.outcome, answer.max_tokens) for answer in answers] == [("refused", None)]
    assert len(server.bodies) == 1


# time-outs, and what ends a run


def test_a_timed_out_question_is_asked_exactly_once(server):
    server.when("Q2", silence)
    answers = ask(server, ["Q1", "Q2", "Q3"], timeout_s=0.5)
    assert (answers["Q2"].outcome, answers["Q2"].attempts) == ("timed_out", 1)
    assert server.questions.count("Q2") == 1
    assert answers["Q3"].outcome == "answered"


def test_a_busy_server_that_refuses_all_at_once_is_not_a_dead_one():
    """D4: 429 means back off. At high concurrency one moment of it hits every request."""
    questions = [f"Q{n}" for n in range(64)]
    with pytest.MonkeyPatch.context() as patch, FakeServer(together=64) as server:
        patch.setattr("pipeline.client.BACKOFF_S", 0.01)
        server.next(*[fail(429)] * 64)
        answers = ask(server, questions, concurrency=64)
    assert {answer.outcome for answer in answers.values()} == {"answered"}


def test_many_bad_questions_among_good_ones_are_no_dead_server(server):
    questions = [f"Q{n}" for n in range(80)]
    for question in questions[1::2]:
        server.when(question, *[fail(500, "harmony")] * 3)
    answers = ask(server, questions, concurrency=1)
    assert [answers[q].outcome for q in questions] == ["answered", "failed"] * 40


def test_a_server_that_dies_ends_the_run_and_keeps_what_was_answered(server):
    server.from_request(11, reset)
    answers: dict[str, Answer] = {}
    with pytest.raises(ServerStopped, match=r"in a row.*the next run goes on"):
        ask(server, [f"Q{n}" for n in range(500)], concurrency=4, answers=answers)
    assert sum(answer.outcome == "answered" for answer in answers.values()) == 10
    assert len(answers) < 100, "the remaining questions must not be burnt"


def test_a_server_that_is_gone_ends_the_run():
    with pytest.MonkeyPatch.context() as patch, FakeServer() as server:
        patch.setattr("pipeline.client.BACKOFF_S", 0.01)
        server.stop()
        with pytest.raises(ServerStopped, match=server.base_url):
            ask(server, [f"Q{n}" for n in range(500)])


def test_an_error_of_the_callback_ends_the_run_as_itself(server):
    class Stop(PipelineError):
        pass

    def on_answer(answer: Answer) -> None:
        raise Stop("enough")

    requests = [request(f"Q{n}") for n in range(50)]
    with pytest.raises(Stop, match="enough"):
        run(ask_all(requests, [endpoint_of(server)], 4, 30, on_answer))
    assert len(server.bodies) <= 8


# refusals that the length does not explain

TOO_LONG = "Q" * 1100  # of 1,024


@pytest.mark.parametrize("tokenizes", [True, False])
def test_refusals_in_a_row_that_no_length_explains_end_the_run(tokenizes):
    """A server that takes nothing any more must not use up all questions."""
    answers: dict[str, Answer] = {}
    with FakeServer(tokenizes=tokenizes) as server:
        server.always(fail(400, "no such role"))
        with pytest.raises(Refused, match=r"refused 30 questions in a row.*HTTP 400: no such role"):
            ask(server, [f"Q{n}" for n in range(200)], answers=answers)
    assert [answer.outcome for answer in answers.values()] == ["refused"] * 29


def test_questions_that_are_too_long_end_no_run_however_many_they_are(server):
    answers = ask(server, [f"{TOO_LONG}{n}" for n in range(60)])
    assert [answer.outcome for answer in answers.values()] == ["refused"] * 60
    assert len(server.bodies) == 60


def test_they_do_not_count_among_refusals_that_do(server):
    for n in range(29):
        server.when(f"Q{n}", fail(400))
    questions = [q for n in range(29) for q in (f"Q{n}", f"{TOO_LONG}{n}")]
    answers = ask(server, questions, concurrency=1)
    assert {answer.outcome for answer in answers.values()} == {"refused"}


def test_an_answer_between_refusals_ends_the_doubt(server):
    questions = [f"Q{n}" for n in range(59)]
    for question in [*questions[:29], *questions[30:]]:
        server.when(question, fail(400))
    answers = ask(server, questions, concurrency=1)
    outcomes = [answers[question].outcome for question in questions]
    assert outcomes == ["refused"] * 29 + ["answered"] + ["refused"] * 29


def test_as_many_refusals_as_are_open_at_once_are_no_row_yet():
    """At a concurrency of 64 the first 63 say nothing of those that are still being answered."""
    questions = [f"Q{n}" for n in range(64)]
    with FakeServer(together=64) as server:
        for question in questions[:20]:
            server.when(question, fail(422))
        answers = ask(server, questions, concurrency=64)
    assert sum(answer.outcome == "refused" for answer in answers.values()) == 20
    assert sum(answer.outcome == "answered" for answer in answers.values()) == 44


# what gateways say


@pytest.mark.parametrize(
    "said",
    [{"error": {"message": "no more credit"}}, {"error": "no more credit", "choices": []}],
    ids=["object", "text"],
)
def test_an_error_that_comes_as_200_is_a_fault_in_the_servers_words(server, monkeypatch, said):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")

    async def act(http: web.Request, answer: dict) -> web.StreamResponse:
        return web.json_response({**said, "sent": http.headers["Authorization"]})

    server.when("Q2", *[act] * 3)
    answers = ask(server, ["Q1", "Q2", "Q3"])
    assert (answers["Q2"].outcome, answers["Q2"].attempts) == ("failed", 3)
    assert answers["Q2"].error.startswith("HTTP 200: ")
    assert "no more credit" in answers["Q2"].error
    assert answers["Q2"].body is None
    assert answers["Q3"].outcome == "answered"


@pytest.mark.parametrize("status", [504, 524])
def test_a_gateways_time_out_is_one_and_is_not_repeated(server, status):
    """The server behind it goes on generating: to ask again would cost as much again."""
    server.when("Q2", *[fail(status, "upstream timed out")] * 3)
    answers = ask(server, ["Q1", "Q2", "Q3"])
    assert (answers["Q2"].outcome, answers["Q2"].attempts) == ("timed_out", 1)
    assert answers["Q2"].error == f"HTTP {status}: upstream timed out"
    assert server.questions.count("Q2") == 1


# the key


def test_a_key_that_was_read_from_a_file_works(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret\n")
    with FakeServer(api_key="sk-very-secret") as server:
        assert ask(server, ["Q"])["Q"].outcome == "answered"


@pytest.mark.parametrize("key", ["sk-sch\u00fcssel", "sk-very\nsecret", "sk-\u2026"])
def test_a_key_that_no_header_can_hold_is_one_clear_line_without_it(server, monkeypatch, key):
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match="OPENAI_API_KEY") as caught:
        ask(server, ["Q"])
    assert "sk-" not in str(caught.value)
    assert server.bodies == []


def test_an_exit_within_a_task_leaves_no_traceback(caplog):
    """As the handler of SIGTERM does it, whatever runs at that moment."""

    async def end():
        raise SystemExit(143)

    async def main():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(60))
            await asyncio.wait([tasks.create_task(end())])

    with pytest.raises(SystemExit, match="143"):
        run(main())
    gc.collect()
    assert "Traceback" not in caplog.text
    assert "never retrieved" not in caplog.text
