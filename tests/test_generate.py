"""generate against a server that misbehaves: what is stored, what is asked again, what is not."""

import json
import os
import resource
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from pipeline import generate
from pipeline.errors import (
    BadRun,
    GateFailed,
    PipelineError,
    Refused,
    ServerError,
    ServerStopped,
    UserError,
    VerifierError,
)
from pipeline.params import line_of, load_params
from pipeline.reasoning import Verdict
from pipeline.records import Status
from pipeline.traces import Place, Stored
from tests.conftest import ENDPOINTS
from tests.fake_server import (
    END,
    THINK,
    THINK_END,
    Act,
    FakeServer,
    drop_token_ids,
    edited,
    fail,
    ids,
    is_probe,
    prompt_ids,
    reset,
    says,
    silence,
    torn_json,
    written,
)

QUESTIONS = ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
EMPTY = [THINK, *ids("\n\n"), THINK_END, *ids("42"), END]
LONG = [THINK, *ids("a long thought, " * 2), THINK_END, *ids("42"), END]  # 37 tokens
ASKED_BY = {"role": "user", "content": "Q1"}
JOURNAL = Path("data/traces/journal.jsonl")
LENIENT = {"generate.gate.min_reasoning_fraction": 0.5}


@pytest.fixture
def server(server):
    """The probe finds it sound: what a test scripts begins with the first question."""
    server.spares_probes = True
    return server


def asked(server: FakeServer) -> list[str]:
    """The questions asked since the last call, sorted (requests run side by side)."""
    questions = sorted(server.asked)
    server.bodies.clear()
    return questions


def budgets(server: FakeServer, question: str) -> list[int]:
    """With which max_tokens a question was asked."""
    return [
        body["max_tokens"]
        for body in server.bodies
        if body["messages"][-1]["content"] == question and not is_probe(body)
    ]


def statuses(project) -> dict[str, str]:
    return {row["messages"][-1]["content"]: row["status"] for row in project.rows()}


def message_of(answer: dict) -> dict:
    return answer["choices"][0]["message"]


def counted(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def once_then(question: str, act: Act) -> Act:
    """The first time a question is asked all is well, and from then on `act`."""
    times = 0

    async def scripted(request: web.Request, answer: dict) -> web.StreamResponse:
        nonlocal times
        body = await request.json()
        times += body["messages"][-1]["content"] == question
        is_it = body["messages"][-1]["content"] == question and times > 1
        return await act(request, answer) if is_it else web.json_response(answer)

    return scripted


def change_prompts(**changes: dict[str, object]) -> None:
    """Fields of some rows of data/prompts, by question: `change_prompts(Q1={"source": "x"})`."""
    path = Path("data/prompts/prompts.jsonl")
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    for row in rows:
        row |= changes.get(row["messages"][0]["content"], {})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def run_and_kill(project, eventually, num_answers: int) -> list[bytes]:
    """Kill the stage with -9 when so many answers are in; returns the journal's whole lines."""
    process = project.start("generate")
    try:
        eventually(
            lambda: JOURNAL.exists() and JOURNAL.read_bytes().count(b"\n") == num_answers,
            f"{num_answers} answers",
        )
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    return JOURNAL.read_bytes().splitlines()


# rows


def test_each_prompt_has_one_row_in_the_order_of_the_prompts(project, server):
    generate.main()
    rows = project.rows()
    assert [row["sample_id"] for row in rows] == [f"{question}_gen0" for question in QUESTIONS]
    assert [row["token_ids"] for row in rows] == [written(question) for question in QUESTIONS]
    assert rows[0]["prompt_token_ids"] == prompt_ids([ASKED_BY])
    assert rows[0]["reasoning"] == "\nI recall Q1\n"
    assert rows[0]["content"] == "\n\nIt is 1Q"
    assert rows[0]["status"] == "ok"
    assert rows[0]["finish_reason"] == "stop"
    assert rows[0]["messages"] == [ASKED_BY]
    assert rows[0]["usage"]["completion_tokens"] == len(written("Q1"))
    assert rows[0]["sampling"] == {
        **{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_tokens": 512, "min_p": 0.0},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    }
    assert rows[0]["server_version"] == "0.32.0"
    files = sorted(path.name for path in Path("data/traces").iterdir())
    assert files == ["part-00000.jsonl", "probe.json"]


def test_the_report_counts_rows_and_tokens(project, server):
    server.writes["Q2"] = EMPTY
    project.set(**LENIENT)
    generate.main()
    report = project.report("generate")
    assert report["rows_in"] == 6
    assert report["turns_not_asked"] == 0
    assert counted(report["status"]) == {"ok": 5, "empty_reasoning": 1}
    # "\nI recall Q1\n" is 13 characters, the empty block two
    assert report["reasoning_tokens"] == 5 * 13 + 2
    assert report["generated_tokens"] == 5 * len(written("Q1")) + len(EMPTY)
    assert report["prompt_tokens"] == 6 * len(prompt_ids([ASKED_BY]))


def test_rows_are_split_into_parts_of_a_fixed_size(project, server, monkeypatch):
    monkeypatch.setattr(generate, "TRACES_PER_PART", 4)
    generate.main()
    counts = {name: data.count(b"\n") for name, data in project.bytes("data/traces/part-*").items()}
    assert counts == {"data/traces/part-00000.jsonl": 4, "data/traces/part-00001.jsonl": 2}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(reasoning=""), {"reasoning": ""}),
        (lambda m: m.update(reasoning=None), {"reasoning": None}),
        (lambda m: m.pop("reasoning"), {}),
        (
            lambda m: m.update(reasoning_content=m.pop("reasoning")),
            {"reasoning": "\nI recall Q1\n"},
        ),
        (lambda m: m.update(reasoning="\n\n"), {"reasoning": "\n\n"}),
    ],
    ids=["empty", "null", "absent", "renamed", "newlines"],
)
def test_empty_null_and_absent_reasoning_are_kept_apart(project, server, change, expected):
    project.set(**LENIENT)
    server.when("Q1", edited(lambda answer: change(message_of(answer))))
    generate.main()
    row = project.rows()[0]
    assert {k: v for k, v in row.items() if k == "reasoning"} == expected
    assert row["status"] == "ok"  # its ids hold the reasoning


def test_null_and_absent_content_are_kept_apart(project, server):
    project.set(**LENIENT)
    server.when("Q1", edited(lambda answer: message_of(answer).update(content=None)))
    server.when("Q2", edited(lambda answer: message_of(answer).pop("content")))
    generate.main()
    first, second = project.rows()[:2]
    assert first["content"] is None
    assert "content" not in second


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (says(*EMPTY), "empty_reasoning"),
        (says(*ids("42"), END), "empty_reasoning"),
        (says(THINK, *ids("half"), finish="length"), "truncated_in_reasoning"),
        (says(THINK, *ids("half"), finish="abort"), "aborted"),
        (says(THINK, *ids("xxxx"), finish="repetition"), "aborted"),
        (says(*written("Q1"), finish=None), "aborted"),
        (says(*written("Q1"), finish="tool_calls"), "tool_call"),
        (says(THINK, *ids("so " * 40), finish="length"), "looping"),
        (says(THINK, *ids("!" * 99), finish="length"), "garbage"),
        (says(THINK, *ids("never"), END), "unclosed_reasoning"),
        (says(*written("Q1"), finish="length"), "parser_conflict"),
        (fail(400, "too long"), "rejected_by_server"),
        # an engine that aborts a request before its first token (D6)
        (says(finish="abort"), "aborted"),
    ],
    ids=[
        "white_space",
        "no_block",
        "cut",
        "abort",
        "repetition",
        "null",
        "tool_calls",
        "looping",
        "garbage",
        "unclosed",
        "conflict",
        "400",
        "abort_without_a_token",
    ],
)
def test_a_bad_answer_is_a_row_with_its_status_and_no_reason_to_stop(project, server, act, status):
    project.set(**LENIENT)
    server.when("Q1", act)
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q1": status}
    asked(server)
    generate.main()
    assert asked(server) == []


NONSENSE = {
    "nothing": lambda answer: answer.clear(),
    "no_choice": lambda answer: answer.update(choices=[]),
    "choices_null": lambda answer: answer.update(choices=None),
    "message_a_list": lambda answer: answer["choices"][0].update(message=["hi"]),
    "no_message": lambda answer: answer["choices"][0].pop("message"),
    "content_a_number": lambda answer: message_of(answer).update(content=42),
    "ids_as_text": lambda answer: answer["choices"][0].update(token_ids=["200", "65"]),
    "ids_one_number": lambda answer: answer["choices"][0].update(token_ids=7),
    "ids_of_another_vocabulary": lambda answer: answer["choices"][0].update(token_ids=[256]),
    "negative_ids": lambda answer: answer.update(prompt_token_ids=[-1]),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE.keys())
def test_an_answer_that_makes_no_sense_is_a_failed_row_and_ends_no_run(project, server, change):
    project.set(**{"generate.max_failed_fraction": 0.2})
    server.when("Q2", edited(change))
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q2": "failed"}
    assert "makes no sense" in project.rows()[1]["error"]
    asked(server)
    generate.main()
    assert asked(server) == ["Q2"]
    assert set(statuses(project).values()) == {"ok"}


async def bare_nan(request: web.Request, answer: dict) -> web.Response:
    """What Python's json writes for a probability that is not a number, and no JSON."""
    answer["choices"][0]["logprobs"] = {"content": [{"token": "A", "logprob": float("nan")}]}
    return web.Response(text=json.dumps(answer), content_type="application/json")


@pytest.mark.parametrize("act", [torn_json, bare_nan], ids=["torn", "nan"])
def test_what_is_no_json_is_a_failed_row_and_ends_no_run(project, server, act):
    project.set(**{"generate.max_failed_fraction": 0.2})
    server.when("Q2", act, act, act)
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q2": "failed"}
    assert project.rows()[1]["attempts"] == 3


def test_each_finish_reason_is_counted(project, server):
    project.ask(*QUESTIONS, "Q7", "Q8")
    project.set(**{"generate.gate.min_reasoning_fraction": 0.0})
    server.when("Q2", says(THINK, *ids("half"), finish="length"))
    server.when("Q4", says(THINK, *ids("R half"), finish="abort"))
    server.when("Q5", says(THINK, *ids("x x x x"), finish="repetition"))
    server.when("Q6", says(*written("Q6"), finish=None))
    server.when("Q7", says(*written("Q7"), finish="tool_calls"))
    server.when("Q8", fail(400, "too long"))
    generate.main()
    report = project.report("generate")
    assert report["finish_reason"] == {
        **{"None": 2, "abort": 1, "length": 1, "repetition": 1, "stop": 2, "tool_calls": 1}
    }
    assert counted(report["status"]) == {
        **{"ok": 2, "truncated_in_reasoning": 1, "aborted": 3, "tool_call": 1},
        "rejected_by_server": 1,
    }


def test_every_sampling_value_is_on_the_wire_and_in_the_row(project, server):
    """A server's generation_config.json decides only what is left out."""
    chosen = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "max_tokens": 300}
    neutral = {
        **{"min_p": 0.0, "repetition_penalty": 1.0},
        **{"presence_penalty": 0.0, "frequency_penalty": 0.0},
    }
    project.set(**{f"generate.{name}": value for name, value in chosen.items()})
    generate.main()
    questions = [body for body in server.bodies if not is_probe(body)]
    assert len(questions) == 6
    for body in questions:
        sampling = {name: body.get(name) for name in (*chosen, *neutral)}
        assert sampling == chosen | neutral
    assert [row["sampling"] for row in project.rows()] == [chosen | neutral] * 6


TOOL_CALL = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}


def test_a_placeholder_beside_a_tool_call_is_no_answer(project, server):
    """Kimi-K2.5 writes "(no content)" there, and vLLM leaves it."""
    project.set(**LENIENT)

    def call(answer: dict) -> None:
        message_of(answer).update(content="(no content)", tool_calls=[TOOL_CALL])

    server.when("Q1", edited(call))
    server.writes["Q2"] = [THINK, *ids("because"), THINK_END, *ids("(no content)"), END]
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q1": "tool_call"}
    first, second = project.rows()[:2]
    assert first["tool_calls"] == [TOOL_CALL]
    assert second["content"] == "(no content)"  # the verifier's own words: not filtered here


def test_a_question_that_switches_thinking_off_itself_is_counted_apart(project, server):
    off = [f"Say {n} /no_think" for n in range(5)]
    project.ask(*off, *QUESTIONS)
    for question in off:
        server.writes[question] = EMPTY
    project.set(**{"generate.gate.min_reasoning_fraction": 1.0})
    generate.main()
    report = project.report("generate")
    assert counted(report["status"]) == {"ok": 6, "thinking_off_by_user": 5}
    asked(server)
    generate.main()
    assert asked(server) == []


def test_missing_output_folders_are_made(project, server):
    for folder in ("data/traces", "reports", "logs"):
        assert not Path(folder).exists()
    generate.main()
    for file in ("data/traces/part-00000.jsonl", "reports/generate.json"):
        assert Path(file).is_file()
    assert Path("logs/generate.status.json").is_file()


# what is too long for the server


@pytest.mark.parametrize(
    "words",
    [
        "The decoder prompt (length 10127) is longer than the maximum model length of 8192.",
        "This model's maximum context length is 8192 tokens. However, you requested 10127 tokens",
    ],
    ids=["prompt", "requested"],
)
def test_a_question_that_is_too_long_is_a_row_and_not_asked_twice(project, server, words):
    server.when("Q2", fail(400, words))
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q2": "rejected_by_server"}
    row = project.rows()[1]
    assert words in row["error"]
    assert row["token_ids"] == []
    assert row["attempts"] == 1
    assert sorted(server.asked) == QUESTIONS
    asked(server)
    generate.main()
    assert asked(server) == []


@pytest.mark.parametrize("clamps", [True, False])
def test_a_prompt_that_fills_the_context_is_refused_and_the_others_go_on(
    project, monkeypatch, clamps
):
    question = "x" * 1021  # with its two role tokens and its end: 1024, and no room to answer
    project.ask(*QUESTIONS, question)
    with FakeServer(clamps=clamps) as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        generate.main()
        assert server.asked.count(question) == 1
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {question: "rejected_by_server"}


def test_a_budget_that_does_not_fit_is_cut_to_what_does_and_recorded(project, monkeypatch):
    """A server that does not cut it itself, as vLLM did not for long."""
    question = " ".join(map(str, range(300)))[:700]  # 703 tokens of prompt: 321 are left
    project.ask(*QUESTIONS, question)
    project.set(**LENIENT)
    with FakeServer(clamps=False) as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        generate.main()
        assert budgets(server, question) == [512, 321]
        row = project.rows()[6]
        assert row["status"] == "truncated_in_reasoning"
        assert len(row["token_ids"]) == 321
        assert row["sampling"]["max_tokens"] == 321
        assert {row["sampling"]["max_tokens"] for row in project.rows()[:6]} == {512}
        server.bodies.clear()
        generate.main()
        assert server.bodies == []
        project.set(**{"generate.max_tokens": 600})  # which gives it no more room
        generate.main()
        assert server.bodies == []


# nothing is asked twice


def test_a_second_run_asks_nothing_starts_nothing_and_writes_the_same_bytes(
    project, server, monkeypatch
):
    generate.main()
    before = project.bytes("data/traces/*", "reports/*", "data/.stash/*")
    asked(server)
    server.stop()
    monkeypatch.delenv(ENDPOINTS)
    generate.main()
    assert project.bytes("data/traces/*", "reports/*", "data/.stash/*") == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generate.concurrency", 32),
        ("generate.timeout_s", 5),
        ("generate.stall_s", 5),
        ("generate.on_truncated", "retry"),
        ("generate.gate.num_samples", 2),
        ("generate.max_tokens", 500),
        ("generate.max_tokens", 600),
        ("generate.endpoints", ["http://127.0.0.1:9/v1"]),
        ("generate.max_failed_fraction", 0.5),
        ("verifier.server_args", []),
        ("reassemble.source", "text"),
        ("reassemble.source", "ids_else_text"),
    ],
)
def test_a_change_that_cannot_change_answers_asks_nothing(project, server, key, value):
    generate.main()
    before = project.bytes("data/traces/part-*")
    asked(server)
    project.set(**{key: value})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/part-*") == before


def test_a_raised_cap_asks_only_the_new_questions(project, server):
    project.ask(*QUESTIONS[:3])
    generate.main()
    before = project.rows()
    asked(server)
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == ["Q4", "Q5", "Q6"]
    assert project.rows()[:3] == before


def test_a_lowered_cap_sets_rows_aside_and_raising_it_again_asks_nothing(project, server):
    generate.main()
    before = project.bytes("data/traces/part-*")
    asked(server)
    project.ask(*QUESTIONS[:2])
    generate.main()
    assert [row["sample_id"] for row in project.rows()] == ["Q1_gen0", "Q2_gen0"]
    assert len(project.rows("data/.stash/traces.jsonl")) == 4
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/part-*") == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generate.temperature", 0.5),
        ("generate.top_p", 0.9),
        ("generate.top_k", 20),
        ("generate.thinking", False),
    ],
)
def test_a_changed_question_to_the_model_asks_all_and_back_costs_nothing(
    project, server, key, value
):
    section, name = key.split(".")
    old = project.values[section][name]
    generate.main()
    before = project.bytes("data/traces/part-*")
    asked(server)
    project.set(**{key: value})
    generate.main()
    assert asked(server) == QUESTIONS
    assert len(project.rows()) == 6
    project.set(**{key: old})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/part-*") == before


@pytest.mark.parametrize(
    "change",
    [
        {"weights_fingerprint": "0" * 64},
        {"chat_template_sha256": "0" * 64},
        {"tokenizer_sha256": "0" * 64},
    ],
)
def test_another_model_template_or_tokenizer_asks_all(project, server, change):
    generate.main()
    asked(server)
    project.identity(**change)
    generate.main()
    assert asked(server) == QUESTIONS
    assert len(project.rows()) == 6


def test_corrected_think_ids_judge_again_and_ask_nothing(project, server):
    generate.main()
    asked(server)
    project.identity(think_end_id=ord("I"))  # "\nI recall": closes after one blank token
    project.set(**{"think.end_id": ord("I"), "generate.gate.min_reasoning_fraction": 0.0})
    generate.main()
    assert set(statuses(project).values()) == {"empty_reasoning"}
    project.identity()
    generate.main()
    assert set(statuses(project).values()) == {"ok"}
    assert asked(server) == []


# cut answers


@pytest.fixture
def cut(project, server):
    """A finished run in which Q2 was cut inside its reasoning."""
    server.writes["Q2"] = LONG
    project.set(**LENIENT | {"generate.max_tokens": 30})
    generate.main()
    assert budgets(server, "Q2") == [30]  # on_truncated: keep
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q2": "truncated_in_reasoning"}
    asked(server)


@pytest.mark.usefixtures("cut")
def test_a_cut_answer_is_asked_again_when_max_tokens_grows(project, server):
    others = [row for row in project.rows() if row["sample_id"] != "Q2_gen0"]
    project.set(**{"generate.max_tokens": 100})
    generate.main()
    assert asked(server) == ["Q2"]
    assert statuses(project)["Q2"] == "ok"
    assert [row for row in project.rows() if row["sample_id"] != "Q2_gen0"] == others


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("max_tokens", [30, 29])
def test_a_cut_answer_is_kept_when_max_tokens_does_not_grow(project, server, max_tokens):
    before = project.bytes("data/traces/part-*")
    project.set(**{"generate.max_tokens": max_tokens})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/part-*") == before


@pytest.mark.usefixtures("cut")
@pytest.mark.parametrize("act", [fail(500), reset, silence], ids=["500", "reset", "silence"])
def test_a_cut_answer_is_not_lost_when_asking_it_again_fails(project, server, act):
    """It was paid for; a failure is no better answer."""
    before = project.rows()[1]
    project.set(**{"generate.max_tokens": 100, "generate.timeout_s": 1})
    server.always(act)
    with suppress(BadRun):
        generate.main()
    stored = project.rows("data/**/*.jsonl")
    assert before["token_ids"] in [row.get("token_ids") for row in stored]
    asked(server)
    server.behave()
    project.set(**{"generate.max_tokens": 30})
    generate.main()
    assert asked(server) == []
    assert project.rows()[1] == before


# cut answers that are asked again at once (generate.on_truncated: retry)

RETRY = {"generate.max_tokens": 30, "generate.on_truncated": "retry"}


def test_a_cut_answer_is_asked_again_at_once_with_more(project, server):
    server.writes["Q2"] = LONG
    project.set(**RETRY | {"generate.retry_max_tokens": 100})
    generate.main()
    assert budgets(server, "Q2") == [30, 100]
    assert budgets(server, "Q1") == [30]
    rows = project.rows()
    assert [row["sample_id"] for row in rows] == [f"{question}_gen0" for question in QUESTIONS]
    assert rows[1]["token_ids"] == LONG
    assert rows[1]["status"] == "ok"
    assert [row["sampling"]["max_tokens"] for row in rows] == [30, 100, 30, 30, 30, 30]
    truncated = project.report("generate")["truncated"]
    assert (truncated["asked_with_more"], truncated["reasoning"]) == (1, 0)
    asked(server)
    generate.main()
    assert asked(server) == []


def test_an_answer_that_stays_cut_is_kept_as_the_second_try_made_it(project, server):
    server.writes["Q2"] = LONG
    project.set(**LENIENT | RETRY | {"generate.retry_max_tokens": 33})
    generate.main()
    assert budgets(server, "Q2") == [30, 33]
    row = project.rows()[1]
    assert row["status"] == "truncated_in_reasoning"
    assert row["token_ids"] == LONG[:33]
    assert row["sampling"]["max_tokens"] == 33
    asked(server)
    generate.main()
    assert asked(server) == []
    project.set(**{"generate.retry_max_tokens": 60})
    generate.main()
    assert budgets(server, "Q2") == [60]  # the only one, and straight with the larger budget
    assert asked(server) == ["Q2"]
    assert statuses(project)["Q2"] == "ok"


@pytest.mark.usefixtures("cut")
def test_retrying_what_was_kept_asks_only_the_cut_rows(project, server):
    project.set(**{"generate.on_truncated": "retry", "generate.retry_max_tokens": 60})
    generate.main()
    assert budgets(server, "Q2") == [60]
    assert asked(server) == ["Q2"]
    assert set(statuses(project).values()) == {"ok"}


def test_the_gate_judges_the_second_try_and_not_the_first(project, server):
    questions = [f"Q{n}" for n in range(40)]
    project.ask(*questions)
    for question in questions:
        server.writes[question] = LONG
    project.set(**RETRY | {"generate.gate.min_reasoning_fraction": 1.0, "generate.concurrency": 8})
    generate.main()
    assert asked(server) == sorted(2 * questions)
    assert [row["sample_id"] for row in project.rows()] == [f"{q}_gen0" for q in questions]
    assert set(statuses(project).values()) == {"ok"}
    assert project.report("generate")["truncated"]["asked_with_more"] == 40


def test_many_hard_questions_asked_again_in_a_row_do_not_trip_the_gate(project, server):
    """Of 20 answers 8 stay cut, which the run as a whole may: the re-asked ones are all cut."""
    questions = [f"Q{n}" for n in range(20)]
    project.ask(*questions)
    hard = questions[1::2][:8]
    for question in hard:
        server.writes[question] = [THINK, *ids(" ".join(map(str, range(99))))]
    project.set(**LENIENT | {"generate.max_tokens": 30, "generate.concurrency": 1})
    generate.main()
    assert asked(server) == sorted(questions)
    project.set(**{"generate.max_tokens": 60})
    generate.main()
    assert asked(server) == sorted(hard)
    assert {statuses(project)[question] for question in hard} == {"truncated_in_reasoning"}
    assert [len(project.rows()[index]["token_ids"]) for index in range(3)] == [26, 60, 26]


@pytest.mark.parametrize("tokenizes", [True, False])
def test_a_second_budget_beyond_the_context_loses_nothing_and_is_not_asked_for_ever(
    project, monkeypatch, tokenizes
):
    """On a server that does not cut the budget itself."""
    question = "What, then?" + " " * 40  # 54 tokens of prompt
    project.ask(*QUESTIONS, question)
    project.set(**LENIENT | RETRY | {"generate.retry_max_tokens": 1000})
    with FakeServer(clamps=False, tokenizes=tokenizes) as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        server.writes[question] = LONG
        generate.main()
        assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {question: "ok"}
        assert project.rows()[6]["sampling"]["max_tokens"] == 970
        server.bodies.clear()
        generate.main()
        assert server.bodies == []


def test_a_second_try_that_fails_leaves_the_first_answer(project, server):
    server.writes["Q2"] = LONG
    project.set(**LENIENT | RETRY)
    server.from_request(1, once_then("Q2", fail(400, "no")))
    generate.main()
    row = project.rows()[1]
    assert row["status"] == "truncated_in_reasoning"
    assert row["token_ids"] == LONG[:30]
    assert row["sampling"]["max_tokens"] == 30


def test_truncation_is_counted_by_phase_source_and_length(project, server):
    project.ask(*QUESTIONS)
    change_prompts(**{question: {"source": "hard"} for question in ("Q2", "Q3", "Q4")})
    server.writes["Q2"] = [THINK, *ids(" ".join(map(str, range(99))))]  # cut in its reasoning
    server.writes["Q3"] = [THINK, *ids("because"), THINK_END, *ids(" ".join(map(str, range(99))))]
    server.writes["Q4"] = [THINK, *ids("why"), THINK_END, *ids("42"), END]  # 8 tokens
    project.set(**LENIENT | {"generate.max_tokens": 30})
    generate.main()
    report = project.report("generate")
    assert report["truncated"] == {
        "reasoning": 1,
        "answer": 1,
        "asked_with_more": 0,
        "by_source": {
            "hard": {"rows": 3, "truncated": 2},
            "test": {"rows": 3, "truncated": 0},
        },
        "by_length": {
            "up_to_000008": {"rows": 1, "truncated": 0},
            "up_to_000032": {"rows": 5, "truncated": 2},  # 26 and, cut, 30 tokens
        },
    }
    assert counted(report["status"]) == {
        **{"ok": 4, "truncated_in_reasoning": 1, "truncated_in_answer": 1}
    }


# several turns (prompts.turns: all)

TURNS = {"Q1": {"later_turns": ["Why?", "So?"]}, "Q3": {"later_turns": ["Really?"]}}
ALL_TURNS = ["Q1_gen0", "Q1_gen1", "Q1_gen2", "Q2_gen0", "Q3_gen0", "Q3_gen1"]


@pytest.fixture
def turns(project, server):
    """Three conversations of three, one and two turns."""
    project.ask("Q1", "Q2", "Q3")
    change_prompts(**TURNS)


def holds(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[at : at + len(part)] == part for at in range(len(tokens)))


@pytest.mark.usefixtures("turns")
def test_a_later_turn_is_asked_with_the_earlier_answers_and_without_their_reasoning(
    project, server
):
    generate.main()
    assert sorted(server.asked) == sorted(["Q1", "Why?", "So?", "Q2", "Q3", "Really?"])
    [body] = [body for body in server.bodies if body["messages"][-1]["content"] == "So?"]
    assert body["messages"] == [
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "\n\nIt is 1Q"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "\n\nIt is ?yhW"},
        {"role": "user", "content": "So?"},
    ]
    rows = {row["sample_id"]: row for row in project.rows()}
    assert list(rows) == ALL_TURNS
    assert rows["Q1_gen2"]["messages"] == body["messages"]
    # and the server saw none of it either, nor a think token (A19)
    prompt = rows["Q1_gen2"]["prompt_token_ids"]
    assert holds(rows["Q1_gen0"]["token_ids"], ids("I recall"))
    assert holds(prompt, ids("It is 1Q"))
    assert not holds(prompt, ids("I recall"))
    assert not {THINK, THINK_END} & set(prompt)
    assert rows["Q1_gen2"]["reasoning"] == "\nI recall So?\n"
    assert {row["status"] for row in rows.values()} == {"ok"}
    report = project.report("generate")
    assert (report["rows_in"], report["turns_not_asked"]) == (6, 0)


@pytest.mark.parametrize(
    ("writing", "status"),
    [
        (EMPTY, "empty_reasoning"),
        ([THINK, *ids("because"), THINK_END, *ids(" \n"), END], "empty_answer"),
        ([THINK, *ids(" ".join(map(str, range(300))))], "truncated_in_reasoning"),
        ([THINK, *ids("never"), END], "unclosed_reasoning"),
    ],
    ids=["empty_reasoning", "empty_answer", "cut", "unclosed"],
)
@pytest.mark.usefixtures("turns")
def test_a_conversation_stops_at_an_answer_that_is_not_good(project, server, writing, status):
    server.writes["Why?"] = writing
    project.set(**LENIENT)
    generate.main()
    assert "So?" not in server.questions
    assert [row["sample_id"] for row in project.rows()] == [
        *("Q1_gen0", "Q1_gen1", "Q2_gen0", "Q3_gen0", "Q3_gen1")
    ]
    report = project.report("generate")
    assert (report["rows_in"], report["turns_not_asked"]) == (6, 1)
    assert counted(report["status"]) == {"ok": 4, status: 1}
    asked(server)
    generate.main()
    assert asked(server) == []


@pytest.mark.usefixtures("turns")
def test_a_failed_turn_is_asked_again_and_the_conversation_goes_on(project, server):
    project.set(**{"generate.max_failed_fraction": 0.5})
    server.when("Why?", *[fail(500)] * 3)
    generate.main()
    assert project.report("generate")["turns_not_asked"] == 1
    asked(server)
    generate.main()
    assert asked(server) == ["So?", "Why?"]
    assert [row["sample_id"] for row in project.rows()] == ALL_TURNS


@pytest.mark.usefixtures("turns")
def test_a_second_run_over_all_turns_asks_nothing_and_writes_the_same_bytes(project, server):
    generate.main()
    before = project.bytes("data/traces/*", "reports/*", "data/.stash/*")
    server.bodies.clear()
    generate.main()
    assert server.bodies == []
    assert project.bytes("data/traces/*", "reports/*", "data/.stash/*") == before


@pytest.mark.usefixtures("turns")
def test_a_run_killed_between_two_turns_goes_on(project, server, eventually):
    server.when("So?", server.hold)
    finished = run_and_kill(project, eventually, 5)
    server.release()
    asked(server)
    generate.main()
    assert asked(server) == ["So?"]
    assert [row["sample_id"] for row in project.rows()] == ALL_TURNS
    rows = Path("data/traces/part-00000.jsonl").read_bytes().splitlines()
    assert set(finished) <= set(rows)


def test_from_first_to_all_turns_asks_only_the_later_ones_and_back_nothing(project, server):
    project.ask("Q1", "Q2", "Q3")
    generate.main()
    first = project.bytes("data/traces/part-*")
    asked(server)
    change_prompts(**TURNS)
    generate.main()
    assert asked(server) == ["Really?", "So?", "Why?"]
    assert [row["sample_id"] for row in project.rows()] == ALL_TURNS
    everything = project.bytes("data/traces/part-*")
    project.ask("Q1", "Q2", "Q3")
    generate.main()
    assert project.bytes("data/traces/part-*") == first
    change_prompts(**TURNS)
    generate.main()
    assert project.bytes("data/traces/part-*") == everything
    assert asked(server) == []


@pytest.mark.usefixtures("turns")
def test_a_cut_turn_is_asked_with_more_and_then_the_next_one(project, server):
    server.writes["Why?"] = [THINK, *ids("a long thought, " * 5), THINK_END, *ids("42"), END]
    project.set(**{"generate.max_tokens": 60, "generate.on_truncated": "retry"})
    generate.main()
    assert budgets(server, "Why?") == [60, 768]
    assert budgets(server, "So?") == [60]
    assert [row["sample_id"] for row in project.rows()] == ALL_TURNS
    assert set(statuses(project).values()) == {"ok"}


# failures


def test_failed_and_timed_out_questions_are_asked_again_by_the_next_run(project, server):
    project.set(**{"generate.max_failed_fraction": 0.5, "generate.timeout_s": 1})
    server.when("Q2", *[fail(500)] * 3)
    server.when("Q5", silence)
    generate.main()
    assert statuses(project)["Q2"] == "failed"
    assert statuses(project)["Q5"] == "timed_out"
    asked(server)
    generate.main()
    assert asked(server) == ["Q2", "Q5"]
    assert set(statuses(project).values()) == {"ok"}
    assert len(project.rows()) == 6


def test_too_many_failures_fail_the_stage_and_keep_the_rest(project, server):
    project.set(**{"generate.max_failed_fraction": 0.1})
    server.when("Q2", *[fail(500, "harmony")] * 3)
    with pytest.raises(BadRun, match=r"1 of 6 .*harmony.*generate\.max_failed_fraction 0\.1"):
        generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q2": "failed"}


@pytest.mark.parametrize(
    ("num_failed", "num", "fraction", "fails"),
    [(29, 100, 0.29, False), (30, 100, 0.29, True), (0, 10, 0.0, False), (1, 10, 0.0, True)],
)
def test_the_failed_fraction_passes_at_its_limit(
    project, trace_of, num_failed, num, fraction, fails
):
    project.set(**{"generate.max_failed_fraction": fraction})
    nowhere = Place(JOURNAL, 0, 0)
    failed = trace_of("Q", [], None, status="failed", error="no luck")
    answers = [Stored.of(failed, Verdict(Status.FAILED, None, 0, 0, 0), nowhere)] * num_failed
    answers += [Stored.of(trace_of(), Verdict(Status.OK, None, 4, 9, 5), nowhere)] * (
        num - num_failed
    )
    if fails:
        with pytest.raises(BadRun, match=f"{num_failed} of {num} .*no luck"):
            generate.check_failures(answers, load_params().generate)
    else:
        generate.check_failures(answers, load_params().generate)


def test_a_dead_server_keeps_what_was_answered(project, server):
    project.ask(*[f"Q{n}" for n in range(60)])
    server.from_request(11, reset)
    with pytest.raises(ServerStopped, match="failed 30 times in a row"):
        generate.main()
    asked(server)
    server.behave()
    generate.main()
    again = asked(server)
    assert len(again) == 50
    assert len(project.rows()) == 60


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_key_or_model_half_way_keeps_what_was_answered(
    project, server, status
):
    project.set(**{"generate.concurrency": 1})
    server.from_request(4, fail(status, "no"))
    with pytest.raises(PipelineError, match=f"HTTP {status}"):
        generate.main()
    asked(server)
    server.behave()
    generate.main()
    assert asked(server) == ["Q4", "Q5", "Q6"]


@pytest.mark.parametrize("act", [fail(500), fail(400, "no")], ids=["failed", "refused"])
def test_a_question_that_never_gets_an_answer_does_not_stop_the_next_run(project, server, act):
    """The probe must not ask the one question of which it is known."""
    project.set(**{"generate.max_failed_fraction": 0.5})
    server.when("Q1", act, act, act)
    generate.main()
    assert statuses(project)["Q1"] != "ok"
    server.spares_probes = False
    server.when("Q1", *[act] * 99)
    project.set(**{"verifier.max_model_len": 1025})
    server.max_model_len = 2048
    generate.main()
    assert statuses(project)["Q1"] != "ok"
    assert len(project.rows()) == 6


def test_two_servers_of_which_one_dies_half_way_answer_each_question_once(
    project, server, monkeypatch
):
    questions = [f"Q{n}" for n in range(60)]
    project.ask(*questions)
    with FakeServer(spares_probes=True) as other:
        other.from_request(11, reset)
        monkeypatch.setenv(ENDPOINTS, f"{server.base_url},{other.base_url}")
        generate.main()
        assert len(other.asked) >= 11
    rows = project.rows()
    assert [row["sample_id"] for row in rows] == [f"{question}_gen0" for question in questions]
    assert len({row["key"] for row in rows}) == 60
    assert set(statuses(project).values()) == {"ok"}
    asked(server)
    monkeypatch.setenv(ENDPOINTS, server.base_url)
    generate.main()
    assert asked(server) == []


# what other views see


def status_file() -> dict:
    return json.loads(Path("logs/generate.status.json").read_bytes())


def test_the_status_file_holds_the_facts_of_a_finished_run(project, server):
    project.ask(*QUESTIONS, "Q7", "Q8")
    project.set(**LENIENT | RETRY | {"generate.retry_max_tokens": 33})
    server.writes["Q6"] = LONG  # cut at 30, and again at 33
    server.when("Q7", says(*EMPTY))
    server.when("Q8", fail(400, "too long"))
    generate.main()
    facts = status_file()
    assert facts["state"] == "done"
    assert (facts["total"], facts["done"], facts["in_flight"]) == (9, 9, 0)
    assert facts["failures"] == {"rejected_by_server": 1}
    assert facts["empty_reasoning_fraction"] == 0.125  # of the eight answers
    assert facts["truncated_fraction"] == 0.25
    # five times 13, the two cut ones without their think-start, and the empty block
    assert facts["mean_reasoning_tokens"] == round((5 * 13 + 29 + 32 + 2) / 8, 1)


def test_the_status_file_says_when_a_run_was_stopped(project, server):
    server.always(says(*EMPTY))
    with pytest.raises(GateFailed):
        generate.main()
    facts = status_file()
    assert facts["state"] == "stopped"
    assert facts["total"] == 6
    assert facts["done"] == 4
    assert facts["empty_reasoning_fraction"] == 1.0


def test_the_status_file_can_be_read_while_the_run_goes_on(project, server, eventually):
    server.from_request(5, server.hold)
    process = project.start("generate")
    try:
        eventually(lambda: JOURNAL.exists() and JOURNAL.read_bytes().count(b"\n") == 4)
        facts = status_file()
    finally:
        process.kill()
        process.communicate()
    assert facts["state"] == "asking"
    assert facts["total"] == 6
    assert 1 <= facts["done"] <= 4


# answers without token ids (reassemble.source)

BY_TEXT = pytest.mark.parametrize("source", ["text", "ids_else_text"])


@pytest.fixture
def without_ids(server):
    """A server that returns none, from its probe on."""
    server.spares_probes = False
    server.always(edited(drop_token_ids))
    return server


@BY_TEXT
def test_answers_without_ids_are_good_where_text_does(project, without_ids, source):
    project.set(**{"reassemble.source": source})
    generate.main()
    rows = project.rows()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok")
    assert [row["prompt_token_ids"] + row["token_ids"] for row in rows] == [[]] * 6
    assert (rows[0]["reasoning"], rows[0]["content"]) == ("\nI recall Q1\n", "\n\nIt is 1Q")
    # as billed, which reasoning was not
    report = project.report("generate")
    assert report["generated_tokens"] == 6 * len(written("Q1"))
    assert report["prompt_tokens"] == 6 * len(prompt_ids([ASKED_BY]))
    assert report["reasoning_tokens"] == 0
    before = project.bytes("data/traces/*", "reports/*")
    asked(without_ids)
    generate.main()
    assert asked(without_ids) == []
    assert project.bytes("data/traces/*", "reports/*") == before


@BY_TEXT
def test_an_answer_has_the_same_key_with_ids_and_without(project, server, source):
    generate.main()
    keys = [row["key"] for row in project.rows()]
    for path in Path("data/traces").iterdir():
        path.unlink()
    project.set(**{"reassemble.source": source})
    server.always(edited(drop_token_ids))
    generate.main()
    assert [row["key"] for row in project.rows()] == keys


@BY_TEXT
@pytest.mark.parametrize("spares_probes", [True, False])
def test_neither_ids_nor_reasoning_stops_the_run(project, server, source, spares_probes):
    project.set(**{"reassemble.source": source})
    server.spares_probes = spares_probes

    def drop_both(answer: dict) -> None:
        drop_token_ids(answer)
        message_of(answer)["reasoning"] = None

    server.always(edited(drop_both))
    with pytest.raises(GateFailed if spares_probes else BadRun, match="the verifier did not think"):
        generate.main()
    assert len(server.asked) == (4 if spares_probes else 0)
    assert project.rows() == []


@pytest.mark.parametrize("spares_probes", [True, False])
def test_where_ids_are_needed_a_run_without_stops_and_names_the_way_out(
    project, server, spares_probes
):
    server.spares_probes = spares_probes
    server.always(edited(drop_token_ids))
    with pytest.raises(GateFailed if spares_probes else BadRun) as error:
        generate.main()
    assert f"{place_of_source()}: ids to text or ids_else_text" in str(error.value)
    assert len(server.asked) == (4 if spares_probes else 0)
    assert project.rows() == []


def place_of_source() -> str:
    return f"params.yaml:{line_of('reassemble.source')} reassemble.source"


@BY_TEXT
def test_back_to_ids_answers_without_stop_the_run_and_are_not_lost(
    project, without_ids, monkeypatch, source
):
    project.set(**{"reassemble.source": source})
    generate.main()
    before = project.bytes("data/traces/*")
    without_ids.stop()
    monkeypatch.delenv(ENDPOINTS)
    project.set(**{"reassemble.source": "ids"})
    with pytest.raises(GateFailed, match=r"6 of 6 answers .* no token ids") as error:
        generate.main()
    assert f"{place_of_source()}: ids to text or ids_else_text" in str(error.value)
    assert r'"content": "\n\nIt is ' in str(error.value)
    assert project.bytes("data/traces/*") == before
    project.set(**{"reassemble.source": source})
    generate.main()
    assert project.bytes("data/traces/*") == before


def test_back_to_ids_new_answers_with_ids_do_not_make_up_for_old_ones_without(project, server):
    project.ask(*QUESTIONS[:3])
    project.set(**{"reassemble.source": "text"})
    server.always(edited(drop_token_ids))
    generate.main()
    server.behave()
    asked(server)
    project.ask(*QUESTIONS)
    project.set(**{"reassemble.source": "ids"})
    with pytest.raises(GateFailed, match=r"3 of 6 answers .* no token ids"):
        generate.main()
    assert asked(server) == QUESTIONS[3:]
    project.set(**{"reassemble.source": "ids_else_text"})
    generate.main()
    assert asked(server) == []
    assert [bool(row["token_ids"]) for row in project.rows()] == [False] * 3 + [True] * 3
    assert set(statuses(project).values()) == {"ok"}


# the gate


def test_a_run_without_reasoning_stops_itself_with_a_diagnosis(project, server):
    project.ask(*[f"Q{n}" for n in range(50)])
    server.always(says(*EMPTY))
    with pytest.raises(GateFailed, match=r"4 of 4 answers fail .*the verifier did not think"):
        generate.main()
    assert len(server.asked) == 4  # generate.gate.num_samples
    assert len(project.rows("data/.stash/failed_gate.jsonl")) == 4
    asked(server)
    server.behave()
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == QUESTIONS  # the bad answers were not kept as good ones
    assert set(statuses(project).values()) == {"ok"}


def test_a_run_that_goes_bad_late_stops_too(project, server):
    project.ask(*[f"Q{n}" for n in range(60)])
    server.from_request(21, says(*EMPTY))
    with pytest.raises(GateFailed, match="fail the reasoning gate"):
        generate.main()
    assert len(server.asked) < 35


def test_a_run_shorter_than_the_window_is_judged_as_well(project, server):
    project.set(**{"generate.gate.num_samples": 32})
    server.always(says(*EMPTY))
    with pytest.raises(GateFailed, match="6 of 6 answers"):
        generate.main()


def test_answers_of_an_earlier_run_survive_a_gate_that_fails(project, server):
    project.ask(*QUESTIONS[:3])
    generate.main()
    earlier = project.bytes("data/traces/part-*")
    asked(server)
    project.ask(*QUESTIONS)
    server.always(says(*EMPTY))
    with pytest.raises(GateFailed):
        generate.main()
    kept = project.bytes("data/traces/part-*")
    assert kept == earlier
    server.behave()
    asked(server)
    generate.main()
    assert asked(server) == ["Q4", "Q5", "Q6"]


def test_good_answers_of_a_run_that_goes_bad_are_kept(project, server):
    """They were paid for: only what lacks reasoning is asked again."""
    project.ask(*[f"Q{n}" for n in range(60)])
    project.set(**{"generate.concurrency": 1})  # in order, so that the first 20 are the good ones
    server.from_request(21, says(*EMPTY))
    with pytest.raises(GateFailed):
        generate.main()
    asked(server)
    server.behave()
    generate.main()
    assert set(asked(server)) == {f"Q{n}" for n in range(20, 60)}
    assert set(statuses(project).values()) == {"ok"}


def test_a_finished_run_passes_again_whatever_the_order_of_its_bad_answers(project, server):
    questions = [f"Q{n}" for n in range(40)]
    project.ask(*questions)
    project.set(**{"generate.gate.min_reasoning_fraction": 0.85})
    for question in questions[20:24]:  # side by side in the order of the prompts
        server.when(question, says(*EMPTY))
    project.set(**{"generate.gate.num_samples": 10})
    generate.main()
    before = project.bytes("data/traces/part-*")
    asked(server)
    project.set(**{"generate.concurrency": 3})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/part-*") == before


def test_a_refusal_does_not_replace_an_answer_that_was_cut(project, server):
    server.when("Q2", says(*ids("too long to e"), finish="length"))
    project.set(**LENIENT | {"generate.max_tokens": 30})
    generate.main()
    cut = project.rows()[1]
    server.behave()
    server.when("Q2", fail(400, "no"))
    project.set(**{"generate.max_tokens": 60})
    generate.main()
    assert project.rows()[1] == cut


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (fail(400, "unknown field"), "HTTP 400: unknown field"),
        (fail(500, "EngineCore died"), "HTTP 500: EngineCore died"),
        (silence, "timed out"),
        (edited(lambda answer: answer.update(choices=[])), "the answer makes no sense"),
    ],
    ids=["refused", "failed", "timed_out", "nonsense"],
)
def test_a_server_that_answers_none_of_the_first_ends_the_run_in_its_own_words(
    project, server, act, words
):
    project.ask(*[f"Q{n}" for n in range(50)])
    project.set(**{"generate.timeout_s": 1, "generate.max_failed_fraction": 1.0})
    server.always(act)
    with pytest.raises(BadRun, match=f"answers none of the first 4 questions: {words}"):
        generate.main()
    assert set(server.asked) == {"Q0", "Q1", "Q2", "Q3"}
    asked(server)
    server.behave()
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == QUESTIONS  # nothing of it was kept


def test_a_question_that_was_too_long_is_asked_again_in_a_longer_context(project, server):
    server.when("Q2", fail(400, "too long"))
    generate.main()
    assert statuses(project)["Q2"] == "rejected_by_server"
    asked(server)
    generate.main()
    assert asked(server) == []
    server.behave()
    project.set(**{"verifier.max_model_len": 1025})
    server.max_model_len = 2048
    generate.main()
    assert asked(server) == ["Q2"]
    assert statuses(project)["Q2"] == "ok"


# the wrong server


def test_another_model_at_the_endpoint_is_refused(project, monkeypatch):
    with FakeServer(model="other/model") as other:
        monkeypatch.setenv(ENDPOINTS, other.base_url)
        with pytest.raises(VerifierError, match=r"serves other/model.*models/verifier"):
            generate.main()
        assert other.questions == []


def test_a_shorter_context_at_the_endpoint_is_refused(project, monkeypatch):
    with FakeServer(max_model_len=512) as short:
        monkeypatch.setenv(ENDPOINTS, short.base_url)
        with pytest.raises(VerifierError, match=r"512.*verifier\.max_model_len is 1024"):
            generate.main()


def test_an_endpoint_where_nobody_listens_is_named(project, monkeypatch):
    monkeypatch.setenv(ENDPOINTS, "http://127.0.0.1:9/v1")
    with pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9/v1"):
        generate.main()


def test_an_endpoint_that_wants_a_key_gets_it(project, monkeypatch):
    with FakeServer(api_key="sk-test") as guarded:
        monkeypatch.setenv(ENDPOINTS, guarded.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        generate.main()
        assert len(project.rows()) == 6


def test_changed_weights_are_noticed_before_anything_is_asked(project, server):
    Path("models/verifier/model.safetensors").write_bytes(b"others")
    with pytest.raises(VerifierError, match="verifier changed"):
        generate.main()
    assert server.questions == []


def test_missing_prompts_are_one_clear_line(project, server):
    Path("data/prompts/prompts.jsonl").unlink()
    with pytest.raises(PipelineError, match=r"data/prompts/prompts\.jsonl"):
        generate.main()


# killed


def test_a_torn_last_line_of_the_journal_is_asked_again(project, server):
    generate.main()
    part = Path("data/traces/part-00000.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    part.unlink()
    JOURNAL.write_bytes(b"".join(lines[:3]) + lines[3][:50])
    asked(server)
    generate.main()
    assert asked(server) == ["Q4", "Q5", "Q6"]
    assert part.read_bytes() == b"".join(lines)


def test_a_killed_run_goes_on_where_it_was(project, server, eventually):
    project.ask(*[f"Q{n}" for n in range(12)])
    server.from_request(8, server.hold)
    finished = run_and_kill(project, eventually, 7)
    answered = {json.loads(line)["messages"][0]["content"] for line in finished}
    server.release()
    server.behave()
    asked(server)
    generate.main()
    assert asked(server) == sorted({f"Q{n}" for n in range(12)} - answered)
    rows = Path("data/traces/part-00000.jsonl").read_bytes().splitlines()
    assert set(finished) <= set(rows)
    assert [json.loads(row)["sample_id"] for row in rows] == [f"Q{n}_gen0" for n in range(12)]
    assert not JOURNAL.exists()


def test_a_terminated_run_says_so_by_its_exit_code_and_goes_on(project, server, eventually):
    server.from_request(4, server.hold)
    process = project.start("generate")
    try:
        eventually(lambda: JOURNAL.exists() and JOURNAL.read_bytes().count(b"\n") == 3, "3 answers")
        process.terminate()
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 143
    assert "Traceback" not in errors
    server.release()
    server.behave()
    asked(server)
    generate.main()
    assert len(asked(server)) == 3


def test_two_runs_at_once_the_second_gets_a_clear_error(project, server, eventually):
    server.always(server.hold)
    process = project.start("generate")
    try:
        eventually(lambda: server.asked, "a first request")
        with pytest.raises(
            UserError, match=f"data/traces is being written by process {process.pid}"
        ):
            generate.main()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (QUESTIONS, QUESTIONS[::-1]),  # another seed
        (QUESTIONS, QUESTIONS[:2]),  # a lower cap
        (QUESTIONS[:2], QUESTIONS),  # and a raised one: rows come back from the stash
    ],
    ids=["reordered", "lowered", "raised"],
)
def test_no_answer_is_lost_whenever_the_folding_is_interrupted(
    project, server, monkeypatch, before, after
):
    """Disk full (or a kill) at the n-th file that is put in place, for every n; then a new run."""
    monkeypatch.setattr(generate, "TRACES_PER_PART", 2)
    generate.main()
    project.ask(*before)
    generate.main()
    shutil.copytree("data", "stored")
    asked(server)
    replace = os.replace
    for step in range(1, 20):
        shutil.rmtree("data")
        shutil.copytree("stored", "data")
        project.ask(*after)
        calls = 0

        def fails_at_step(source: object, target: object, step: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls == step:
                raise OSError(28, "No space left on device")
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", fails_at_step)
            try:
                generate.main()
            except OSError:
                assert calls == step
            else:
                break  # every step was tried
        generate.main()
        assert [row["messages"][0]["content"] for row in project.rows()] == after
        stored = {row["messages"][0]["content"] for row in project.rows("data/**/*.jsonl")}
        assert stored == set(QUESTIONS)
        assert asked(server) == [], f"lost when interrupted at file {step}"
    assert step > 1, "nothing was interrupted"


# a full disk

FULL = "what is stored stays, make room and run again"


@pytest.mark.parametrize("size", [1500, 6000])
def test_a_full_disk_ends_the_run_in_one_line_and_loses_nothing(project, server, eventually, size):
    """A file that may not grow beyond `size` bytes stands for it: the journal, and the log too."""
    project.ask(*[f"Q{n}" for n in range(40)])
    Path("logs").mkdir()
    Path("logs/generate.log").write_bytes(b"." * size)
    process = project.start(
        "generate", limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    )
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert FULL in errors
    assert "Traceback" not in errors
    lines = JOURNAL.read_bytes().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith(b"\n")]
    assert whole
    asked(server)
    generate.main()
    answered = {row["messages"][0]["content"] for row in whole}
    assert asked(server) == sorted({f"Q{n}" for n in range(40)} - answered)
    rows = project.rows()
    assert [row["sample_id"] for row in rows] == [f"Q{n}_gen0" for n in range(40)]
    assert all(row in rows for row in whole)


# a server that refuses from some point on


def test_what_a_server_refused_before_the_run_ended_is_asked_by_the_next(project, server):
    questions = [f"Q{n}" for n in range(200)]
    project.ask(*questions)
    project.set(**{"generate.concurrency": 1})
    server.from_request(20, fail(400, "no such role"))
    with pytest.raises(Refused, match=r"refused 30 questions in a row.*HTTP 400: no such role"):
        generate.main()
    assert len(asked(server)) == 19 + 30
    server.behave()
    generate.main()
    assert asked(server) == sorted(questions[19:])
    assert statuses(project) == dict.fromkeys(questions, "ok")


def test_what_was_refused_while_earlier_questions_were_still_answered_is_asked_again_too(
    project, server
):
    """A long answer that was under way comes in among the refusals."""
    questions = [f"Q{n}" for n in range(200)]
    project.ask(*questions)

    async def refuse(http: web.Request, answer: dict) -> web.StreamResponse:
        if len(server.asked) >= 30:
            server.release()
        return await fail(400, "no such role")(http, answer)

    server.when("Q18", server.hold)
    server.from_request(20, refuse)
    with pytest.raises(Refused):
        generate.main()
    asked(server)
    server.behave()
    generate.main()
    assert statuses(project) == dict.fromkeys(questions, "ok")


# the probe, seen from outside


def test_the_status_file_says_that_the_server_is_being_probed(project, server):
    server.spares_probes = False
    states: list[tuple[bool, str]] = []

    async def look(http: web.Request, answer: dict) -> web.StreamResponse:
        states.append((is_probe(await http.json()), status_file()["state"]))
        return web.json_response(answer)

    server.always(look)
    generate.main()
    assert {state for of_probe, state in states if of_probe} == {"probing"}
    assert {state for of_probe, state in states if not of_probe} <= {"probing", "asking"}
    assert status_file()["state"] == "done"


def test_ctrl_c_ends_a_probe_that_nobody_answers(project, server, eventually):
    server.spares_probes = False
    server.always(silence)
    project.set(**{"generate.timeout_s": 3600})
    process = project.start("generate")
    try:
        eventually(lambda: server.bodies, "a probe")
        assert status_file()["state"] == "probing"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not JOURNAL.exists()
