"""generate against a server that misbehaves: what is stored, what is asked again, what is not."""

import json
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline import generate, traces
from pipeline.errors import BadRun, PipelineError, ServerError, UserError, VerifierError
from pipeline.params import load_params
from tests.conftest import ENDPOINTS
from tests.fake_server import (
    END,
    THINK,
    THINK_END,
    FakeServer,
    drop_token_ids,
    edited,
    fail,
    ids,
    prompt_ids,
    reset,
    says,
    silence,
    written,
)

QUESTIONS = ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
EMPTY = [THINK, *ids("\n\n"), THINK_END, *ids("42"), END]
ASKED_BY = {"role": "user", "content": "Q1"}


def asked(server: FakeServer) -> list[str]:
    """The questions asked since the last call, sorted (requests run side by side)."""
    questions = sorted(server.questions)
    server.bodies.clear()
    return questions


def statuses(project) -> dict[str, str]:
    return {row["messages"][0]["content"]: row["status"] for row in project.rows()}


def message_of(answer: dict) -> dict:
    return answer["choices"][0]["message"]


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
    assert sorted(path.name for path in Path("data/traces").iterdir()) == ["part-00000.jsonl"]


def test_the_report_counts_rows_and_tokens(project, server):
    server.writes["Q2"] = EMPTY
    project.set(**{"generate.gate.min_reasoning_fraction": 0.5})
    generate.main()
    report = project.report("generate")
    assert report["rows_in"] == 6
    assert {k: n for k, n in report["status"].items() if n} == {"ok": 5, "empty_reasoning": 1}
    # "\nI recall Q1\n" is 13 characters, the empty block two
    assert report["reasoning_tokens"] == 5 * 13 + 2
    assert report["generated_tokens"] == 5 * len(written("Q1")) + len(EMPTY)
    assert report["prompt_tokens"] == 6 * len(prompt_ids([ASKED_BY]))


def test_rows_are_split_into_parts_of_a_fixed_size(project, server, monkeypatch):
    monkeypatch.setattr(traces, "TRACES_PER_PART", 4)
    generate.main()
    counts = {name: data.count(b"\n") for name, data in project.bytes("data/traces/*").items()}
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
    server.when("Q1", edited(lambda answer: change(message_of(answer))))
    generate.main()
    row = project.rows()[0]
    assert {k: v for k, v in row.items() if k == "reasoning"} == expected
    assert row["status"] == "ok"  # its ids hold the reasoning


def test_null_and_absent_content_are_kept_apart(project, server):
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
    project.set(**{"generate.gate.min_reasoning_fraction": 0.5})
    server.when("Q1", act)
    generate.main()
    assert statuses(project) == dict.fromkeys(QUESTIONS, "ok") | {"Q1": status}
    asked(server)
    generate.main()
    assert asked(server) == []


def test_a_refusal_keeps_the_servers_words(project, server):
    server.when("Q1", fail(400, "longer than the maximum model length"))
    generate.main()
    row = project.rows()[0]
    assert "longer than the maximum model length" in row["error"]
    assert row["token_ids"] == []


@pytest.mark.parametrize(
    "change",
    [
        drop_token_ids,
        lambda answer: answer.pop("prompt_token_ids"),
        lambda answer: answer["choices"][0].pop("token_ids"),
        lambda answer: answer.update(choices=[]),
        lambda answer: answer.clear(),
    ],
    ids=["null", "no_prompt_ids", "no_ids", "no_choice", "nothing"],
)
def test_a_server_without_token_ids_is_said_clearly(project, server, change):
    server.always(edited(change))
    with pytest.raises(ServerError, match="return_token_ids"):
        generate.main()


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
        ("generate.max_tokens", 500),
        ("generate.max_tokens", 600),
        ("generate.endpoints", ["http://127.0.0.1:9/v1"]),
        ("generate.max_failed_fraction", 0.5),
        ("verifier.server_args", []),
    ],
)
def test_a_change_that_cannot_change_answers_asks_nothing(project, server, key, value):
    generate.main()
    before = project.bytes("data/traces/*")
    asked(server)
    project.set(**{key: value})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/*") == before


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
    before = project.bytes("data/traces/*")
    asked(server)
    project.ask(*QUESTIONS[:2])
    generate.main()
    assert [row["sample_id"] for row in project.rows()] == ["Q1_gen0", "Q2_gen0"]
    assert len(project.rows("data/.stash/traces.jsonl")) == 4
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/*") == before


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
    before = project.bytes("data/traces/*")
    asked(server)
    project.set(**{key: value})
    generate.main()
    assert asked(server) == QUESTIONS
    assert len(project.rows()) == 6
    project.set(**{key: old})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/*") == before


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
    server.writes["Q2"] = [THINK, *ids("a long thought, " * 2), THINK_END, *ids("42"), END]
    project.set(**{"generate.max_tokens": 30, "generate.gate.min_reasoning_fraction": 0.5})
    generate.main()
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
    before = project.bytes("data/traces/*")
    project.set(**{"generate.max_tokens": max_tokens})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/*") == before


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
    failed = trace_of("Q", [], None, status="failed", error="no luck")
    traces = [failed] * num_failed + [trace_of()] * (num - num_failed)
    if fails:
        with pytest.raises(BadRun, match=f"{num_failed} of {num}"):
            generate.check_failures(traces, load_params().generate)
    else:
        generate.check_failures(traces, load_params().generate)


def test_a_dead_server_keeps_what_was_answered(project, server):
    project.ask(*[f"Q{n}" for n in range(60)])
    server.from_request(11, reset)
    with pytest.raises(ServerError):
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


# the gate


def test_a_run_without_reasoning_stops_itself_with_a_diagnosis(project, server):
    project.ask(*[f"Q{n}" for n in range(50)])
    server.always(says(*EMPTY))
    with pytest.raises(BadRun, match=r"4 of 4 answers.*generate\.thinking_switch"):
        generate.main()
    assert len(server.bodies) == 4  # generate.gate.num_samples
    assert len(project.rows("data/.stash/failed_gate.jsonl")) == 4
    asked(server)
    server.behave()
    project.ask(*QUESTIONS)
    generate.main()
    assert asked(server) == QUESTIONS  # the bad answers were not kept as good ones
    assert set(statuses(project).values()) == {"ok"}


def test_a_wrong_switch_is_caught_by_the_gate(project, server):
    project.set(**{"generate.thinking": False})
    generate.main()
    assert set(statuses(project).values()) == {"ok"}
    asked(server)
    project.set(**{"generate.thinking": True})
    server.always(says(*ids("42"), END))
    with pytest.raises(BadRun, match="the verifier did not think"):
        generate.main()


def test_a_run_that_goes_bad_late_stops_too(project, server):
    project.ask(*[f"Q{n}" for n in range(60)])
    server.from_request(21, says(*EMPTY))
    with pytest.raises(BadRun, match="fail the reasoning gate"):
        generate.main()
    assert len(server.bodies) < 35


def test_a_run_shorter_than_the_window_is_judged_as_well(project, server):
    project.set(**{"generate.gate.num_samples": 32})
    server.always(says(*EMPTY))
    with pytest.raises(BadRun, match="6 of 6 answers"):
        generate.main()


def test_answers_of_an_earlier_run_survive_a_gate_that_fails(project, server):
    project.ask(*QUESTIONS[:3])
    generate.main()
    earlier = project.bytes("data/traces/*")
    asked(server)
    project.ask(*QUESTIONS)
    server.always(says(*EMPTY))
    with pytest.raises(BadRun):
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
    with pytest.raises(BadRun):
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
    before = project.bytes("data/traces/*")
    asked(server)
    project.set(**{"generate.concurrency": 3})
    generate.main()
    assert asked(server) == []
    assert project.bytes("data/traces/*") == before


def test_a_refusal_does_not_replace_an_answer_that_was_cut(project, server):
    server.when("Q2", says(*ids("too long to e"), finish="length"))
    project.set(**{"generate.max_tokens": 30, "generate.gate.min_reasoning_fraction": 0.5})
    generate.main()
    cut = project.rows()[1]
    server.behave()
    server.when("Q2", fail(400, "no"))
    project.set(**{"generate.max_tokens": 60})
    generate.main()
    assert project.rows()[1] == cut


def test_a_server_that_refuses_everything_ends_the_run_and_nothing_of_it_is_kept(project, server):
    server.always(fail(400, "unknown field"))
    with pytest.raises(BadRun, match="refuses every question: HTTP 400: unknown field"):
        generate.main()
    asked(server)
    server.behave()
    generate.main()
    assert asked(server) == QUESTIONS


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
        assert other.bodies == []


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
    assert server.bodies == []


def test_missing_prompts_are_one_clear_line(project, server):
    Path("data/prompts/prompts.jsonl").unlink()
    with pytest.raises(PipelineError, match=r"data/prompts/prompts\.jsonl"):
        generate.main()


# killed


def test_a_torn_last_line_of_the_journal_is_asked_again(project, server):
    generate.main()
    [part] = Path("data/traces").iterdir()
    lines = part.read_bytes().splitlines(keepends=True)
    part.unlink()
    Path("data/traces/journal.jsonl").write_bytes(b"".join(lines[:3]) + lines[3][:50])
    asked(server)
    generate.main()
    assert asked(server) == ["Q4", "Q5", "Q6"]
    assert part.read_bytes() == b"".join(lines)


def test_a_killed_run_goes_on_where_it_was(project, server, eventually):
    project.ask(*[f"Q{n}" for n in range(12)])
    server.from_request(8, server.hold)
    journal = Path("data/traces/journal.jsonl")
    process = project.start("generate")
    try:
        eventually(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 7, "7 answers")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    finished = journal.read_bytes().splitlines()
    answered = {json.loads(line)["messages"][0]["content"] for line in finished}
    server.release()
    server.behave()
    asked(server)
    generate.main()
    assert asked(server) == sorted({f"Q{n}" for n in range(12)} - answered)
    rows = Path("data/traces/part-00000.jsonl").read_bytes().splitlines()
    assert set(finished) <= set(rows)
    assert [json.loads(row)["sample_id"] for row in rows] == [f"Q{n}_gen0" for n in range(12)]
    assert not journal.exists()


def test_a_terminated_run_says_so_by_its_exit_code_and_goes_on(project, server, eventually):
    server.from_request(4, server.hold)
    journal = Path("data/traces/journal.jsonl")
    process = project.start("generate")
    try:
        eventually(lambda: journal.exists() and journal.read_bytes().count(b"\n") == 3, "3 answers")
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
        eventually(lambda: server.bodies, "a first request")
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
    monkeypatch.setattr(traces, "TRACES_PER_PART", 2)
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
