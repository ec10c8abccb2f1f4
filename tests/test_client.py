"""Many requests at once: what is on the wire, what is repeated, and what ends the run."""

import pytest

from pipeline.client import Answer, Request, ask_all, run
from pipeline.errors import BadRun, PipelineError, ServerError
from pipeline.generate import request_body
from pipeline.params import load_params
from pipeline.server import Endpoint
from tests.fake_server import (
    MODEL,
    VERSION,
    FakeServer,
    cut_off,
    fail,
    in_two_chunks,
    reset,
    silence,
    torn_json,
    written,
)


def endpoint_of(server: FakeServer) -> Endpoint:
    return Endpoint(server.base_url, MODEL, VERSION, 1024)


def request(question: str) -> Request:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 100,
        "return_token_ids": True,
    }
    return Request(question, body)


def ask(
    servers: FakeServer | list[FakeServer],
    questions: list[str],
    concurrency: int = 4,
    timeout_s: float = 30,
    answers: dict[str, Answer] | None = None,
) -> dict[str, Answer]:
    """The answers by question; those that came before an error are in `answers`."""
    answers = {} if answers is None else answers
    endpoints = [endpoint_of(s) for s in (servers if isinstance(servers, list) else [servers])]

    def on_answer(answer: Answer) -> None:
        assert answer.key not in answers, "answered twice"
        answers[answer.key] = answer

    requests = [request(question) for question in questions]
    run(ask_all(requests, endpoints, concurrency, timeout_s, on_answer))
    return answers


def test_the_wire_carries_every_sampling_value_and_nothing_else(project, server):
    project.set(
        **{
            "generate.temperature": 0.6,
            "generate.top_p": 0.95,
            "generate.top_k": 20,
            "generate.max_tokens": 77,
            "generate.thinking_switch": "thinking",
        }
    )
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    body = request_body({"messages": messages}, load_params().generate)
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
    body = request_body({"messages": messages}, load_params().generate)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert body["chat_template_kwargs"]["enable_thinking"] is False
    project.set(**{"generate.thinking_switch": None})
    body = request_body({"messages": messages}, load_params().generate)
    assert not body.get("chat_template_kwargs")


def test_an_answer_is_the_servers_json_as_it_came(server):
    [answer] = ask(server, ["Q"]).values()
    assert (answer.outcome, answer.attempts, answer.error) == ("answered", 1, None)
    assert answer.body["choices"][0]["token_ids"] == written("Q")
    assert answer.endpoint.version == "0.32.0"


def test_as_many_requests_as_asked_for_are_really_in_flight():
    questions = [f"Q{n}" for n in range(128)]
    with FakeServer(together=128) as server:
        assert len(ask(server, questions, concurrency=128)) == 128
        assert server.peak == 128


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
    [fail(408), fail(409), fail(429), fail(500), fail(503), reset, torn_json, cut_off],
    ids=["408", "409", "429", "500", "503", "reset", "torn_json", "cut_off"],
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
    with pytest.raises(ServerError, match=r"in a row.*the next run goes on"):
        ask(server, [f"Q{n}" for n in range(500)], concurrency=4, answers=answers)
    assert sum(answer.outcome == "answered" for answer in answers.values()) == 10
    assert len(answers) < 100, "the remaining questions must not be burnt"


def test_a_server_that_is_gone_ends_the_run():
    with pytest.MonkeyPatch.context() as patch, FakeServer() as server:
        patch.setattr("pipeline.client.BACKOFF_S", 0.01)
        server.stop()
        with pytest.raises(ServerError, match=server.base_url):
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


def test_several_servers_share_the_work():
    with FakeServer(together=4) as one, FakeServer(together=4) as other:
        ask([one, other], [f"Q{n}" for n in range(40)], concurrency=8)
        assert len(one.bodies) + len(other.bodies) == 40
        assert (one.peak, other.peak) == (4, 4)
        assert min(len(one.bodies), len(other.bodies)) >= 10
