"""A run that goes bad after a good probe: what is said, and which line of params.yaml it names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pipeline import generate
from pipeline.errors import GateFailed
from pipeline.reasoning import Cause
from tests.conftest import ENDPOINTS
from tests.fake_server import (
    END,
    THINK,
    THINK_END,
    TRY_MAX_TOKENS,
    Act,
    Answer,
    FakeServer,
    drop_token_ids,
    edited,
    fail,
    ids,
    is_question,
    prompt_ids,
    reset,
    says,
    silence,
    with_ids,
    written,
)
from tests.test_probe import (
    all_in_reasoning,
    exclude_reasoning,
    one_text,
    renamed,
    strip_reasoning,
)

EMPTY = [THINK, *ids("\n\n"), THINK_END, *ids("42"), END]
EMPTY_SHOWN = r"""{"reasoning": "\n\n", "content": "42", "status": "empty_reasoning"}"""
Body = dict[str, Any]


@pytest.fixture
def server(server):
    """The probe finds it sound: what a test scripts begins with the first question."""
    server.spares_probes = True
    return server


def diagnosis() -> str:
    with pytest.raises(GateFailed) as error:
        generate.main()
    return str(error.value)


def place(key: str) -> str:
    """`params.yaml:12 generate.max_tokens`, counted by hand in the project's file."""
    lines = Path("params.yaml").read_text("utf-8").splitlines()
    number = -1
    for depth, name in enumerate(key.split(".")):
        begin = f"{'  ' * depth}{name}:"
        number = next(n for n, text in enumerate(lines) if n > number and text.startswith(begin))
    return f"params.yaml:{number + 1} {key}"


def thinks_when(condition: Callable[[Body], object]) -> Act:
    """A chat template that closes the think block of every request but these."""

    async def act(request: web.Request, answer: Answer) -> web.StreamResponse:
        body = await request.json()
        thinking = bool(condition(body))
        prompt = prompt_ids(body["messages"], thinking=thinking)
        writing = written(body["messages"][-1]["content"], thinking=thinking)
        finished = with_ids(
            {**answer, "prompt_token_ids": prompt}, writing, "stop", thinking=thinking
        )
        return web.json_response(finished)

    return act


def switches(body: Body) -> Body:
    return body.get("chat_template_kwargs") or {}


# each cause

NEVER = [THINK, *ids("never"), END]
WITHOUT_ANSWER = [THINK, *ids("because"), THINK_END, END]
SHORT = [THINK, *ids("ab"), THINK_END, *ids("42"), END]
CUT = [THINK, *ids(" ".join(map(str, range(99))))]
# What the server does from its first question on, what is said, and the lines that are named.
CASES: dict[str, tuple[Act, str, list[str]]] = {
    "thinking_off": (
        thinks_when(lambda body: False),
        "the chat template closes the think block itself",
        ["think.start: <think>"],
    ),
    "not_thinking": (says(*EMPTY), "the verifier did not think", ["think.start: <think>"]),
    "short": (
        says(*SHORT),
        "the reasoning is shorter than",
        ["generate.gate.min_reasoning_tokens: 3"],
    ),
    "cut": (
        says(*CUT, finish="length"),
        "the reasoning is cut before it closes: raise",
        ["generate.max_tokens: 512"],
    ),
    "unclosed": (says(*NEVER), "stops without a closing token", ["think.end: </think>"]),
    "no_answer": (
        says(*WITHOUT_ANSWER),
        "the turn ends with the reasoning",
        ["think.end: </think>"],
    ),
    "no_token_ids": (
        edited(drop_token_ids),
        "a vLLM that knows return_token_ids",
        ["generate.endpoints"],
    ),
    "no_parser": (
        edited(one_text()),
        "reasoning and answer come as one text in `content`",
        ["verifier.reasoning_parser: qwen3"],
    ),
    "wrong_parser": (
        edited(all_in_reasoning),
        "the whole answer comes in `reasoning`",
        ["verifier.reasoning_parser: qwen3"],
    ),
    "field_renamed": (
        renamed("thoughts"),
        "in a field this pipeline does not know (thoughts)",
        ["generate.endpoints"],
    ),
    "reasoning_hidden": (
        edited(strip_reasoning),
        "generated and billed but left out of the answer",
        ["generate.endpoints"],
    ),
    "looping": (
        says(THINK, *ids("so " * 40), finish="length"),
        "the verifier repeats itself until it is cut",
        ["generate.temperature: 0.0", "verifier.dtype: float32"],
    ),
    "garbage": (
        says(THINK, *ids("!" * 99), finish="length"),
        "the verifier writes one token over and over",
        ["verifier.dtype: float32", "verifier.quantization: None"],
    ),
    "conflict": (
        says(*written("Q"), finish="length"),
        "token ids, text and finish_reason contradict each other",
        ["think.end: </think>"],
    ),
    "aborted": (
        says(THINK, *ids("half"), finish="repetition"),
        "the server ends its answers with finish_reason 'repetition'; see its log",
        [],
    ),
    "tool_call": (
        says(*written("Q"), finish="tool_calls"),
        "the verifier calls tools, though none were offered",
        ["verifier.reasoning_parser: qwen3"],
    ),
}


def test_every_cause_is_here():
    """The one that needs generate.thinking false has a test of its own."""
    assert {*CASES, "thinks_anyway"} == set(Cause)


@pytest.mark.parametrize(("act", "said", "keys"), CASES.values(), ids=CASES.keys())
def test_each_cause_is_told_with_the_line_to_change(project, server, act, said, keys):
    server.always(act)
    words = diagnosis()
    assert words.startswith("4 of 4 answers fail the reasoning gate: ")
    assert said in words
    for key in keys:
        name, _, value = key.partition(": ")
        assert place(name) + (f": {value}" if value else "") in words
    assert words.count('\n  {"reasoning": ') == 2
    assert len(server.asked) == 4


def test_reasoning_that_vllm_was_told_to_leave_out_is_told_as_that(project, server):
    """It leaves out the token ids as well, which is the lesser half of the truth."""
    server.always(edited(exclude_reasoning))
    assert "sets include_reasoning to false or strips it" in diagnosis()


def test_prompt_ids_that_are_missing_are_token_ids_that_are_missing(project, server):
    server.always(edited(lambda answer: answer.pop("prompt_token_ids")))
    assert "a vLLM that knows return_token_ids" in diagnosis()


def test_thinking_that_was_not_asked_for_is_told(project, server):
    project.set(**{"generate.thinking": False})
    server.always(thinks_when(lambda body: True))
    words = diagnosis()
    assert "the verifier thinks although generate.thinking is false" in words
    assert f"{place('generate.thinking_switch')}: enable_thinking" in words


def test_the_records_are_shown_as_a_person_would_see_them(project, server):
    server.always(says(*EMPTY))
    assert diagnosis().endswith(f"\n  {EMPTY_SHOWN}\n  {EMPTY_SHOWN}")


def test_a_long_record_is_cut(project, server):
    server.always(says(*CUT, finish="length"))
    *_, record = diagnosis().splitlines()
    assert '{"reasoning": "0 1 2 3 4 5' in record
    assert len(record) < 160
    assert "…" in record
    assert record.endswith('"content": null, "status": "truncated_in_reasoning"}')


def test_a_record_cannot_command_the_terminal(project, server):
    red, title = "\x1b[31m", "\x9b2J"
    server.always(
        edited(
            lambda answer: answer["choices"][0].update(
                token_ids=EMPTY, message={"role": "assistant", "content": red + title + "42"}
            )
        )
    )
    words = diagnosis()
    assert "\x1b" not in words
    assert "\x9b" not in words
    assert "42" in words.splitlines()[-1]


def test_the_most_frequent_cause_is_explained_and_the_others_are_counted(project, server):
    project.set(**{"generate.concurrency": 1})
    server.when("Q1", says(*EMPTY))
    server.when("Q2", says(*NEVER))
    server.when("Q3", says(*EMPTY))
    words = diagnosis()
    assert words.startswith("3 of 4 answers fail the reasoning gate: the verifier did not think")
    assert "(besides: 1 unclosed)" in words


def test_a_run_that_fails_ends_with_exit_code_1_and_says_why(project, server):
    server.always(says(*EMPTY))
    process = project.start("generate")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "generate: 4 of 4 answers fail the reasoning gate: the verifier did not think" in errors
    assert f"\n  {EMPTY_SHOWN}" in errors
    assert "Traceback" not in errors
    assert "GateFailed" in Path("logs/generate.log").read_text("utf-8")


def test_answers_that_max_tokens_cut_stay(project, server):
    """They are the longest ones, and a larger max_tokens asks just them again."""
    project.set(**{"generate.max_tokens": 10})
    words = diagnosis()
    assert f"raise {place('generate.max_tokens')}: 10" in words
    journal = project.rows("data/traces/journal.jsonl")
    assert [row["status"] for row in journal] == ["truncated_in_reasoning"] * 4
    assert not Path("data/.stash/failed_gate.jsonl").exists()


# answers that are stored already


def test_stored_answers_are_judged_by_a_stricter_gate_without_a_server(
    project, server, monkeypatch
):
    generate.main()
    before = project.bytes("data/traces/*")
    server.stop()
    monkeypatch.delenv(ENDPOINTS)
    project.set(**{"generate.gate.min_reasoning_tokens": 14})  # they have 13
    words = diagnosis()
    assert "6 of 6 answers fail" in words
    assert f"shorter than {place('generate.gate.min_reasoning_tokens')}: 14" in words
    assert words.count(r'"content": "\n\nIt is ') == 2
    assert project.bytes("data/traces/*") == before
    project.set(**{"generate.gate.min_reasoning_tokens": 13})
    generate.main()
    assert project.bytes("data/traces/*") == before


def test_without_a_server_the_switch_is_named_and_nothing_tried(project, server):
    project.set(**{"generate.gate.min_reasoning_fraction": 0.0})
    server.always(says(*EMPTY))
    generate.main()
    server.bodies.clear()
    project.set(**{"generate.gate.min_reasoning_fraction": 0.9})
    words = diagnosis()
    assert "a name that the chat template does not know is ignored" in words
    assert f"{place('generate.thinking_switch')}: enable_thinking" in words
    assert words.endswith(f"\n  {EMPTY_SHOWN}\n  {EMPTY_SHOWN}")
    assert server.bodies == []


# which switch works, tried on the running server


def has_system_prompt(body: Body) -> bool:
    system = [message for message in body["messages"] if message["role"] == "system"]
    return system == [{"role": "system", "content": "detailed thinking on"}]


@pytest.mark.parametrize(
    ("named", "condition", "advice"),
    [
        ("enable_thinking", lambda body: switches(body).get("thinking"), "with thinking: change"),
        (
            "thinking",
            lambda body: switches(body).get("enable_thinking"),
            "with enable_thinking: change",
        ),
        (
            "think",
            lambda body: {"thinking", "enable_thinking"} & switches(body).keys(),
            "with thinking or enable_thinking: change",
        ),
        (
            "enable_thinking",
            lambda body: (
                "chat_template_kwargs" not in body
                and "reasoning_effort" not in body
                and not has_system_prompt(body)
            ),
            "with null: change",
        ),
        (
            "enable_thinking",
            lambda body: body.get("reasoning_effort") == "high",
            "with reasoning_effort: high, which this pipeline does not send;",
        ),
    ],
    ids=["thinking", "enable_thinking", "two", "null", "reasoning_effort"],
)
def test_the_switch_that_works_is_named(project, monkeypatch, named, condition, advice):
    project.set(**{"generate.thinking_switch": named})
    with FakeServer(switch=named, spares_probes=True) as server:
        server.always(thinks_when(condition))
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = diagnosis()
    line = f"{place('generate.thinking_switch')}: {named}"
    assert (
        f"the chat template closes the think block itself, so the verifier does not think; it "
        f"does {advice} {line}" in words
    )


def test_a_verifier_that_thinks_when_it_is_tried_is_not_told_to_change_its_switch(project, server):
    async def not_when_it_counts(request: web.Request, answer: Answer) -> web.StreamResponse:
        body = await request.json()
        if is_question(body):
            return await says(*EMPTY)(request, answer)
        return web.json_response(answer)

    server.always(not_when_it_counts)
    words = diagnosis()
    line = f"{place('generate.thinking_switch')}: enable_thinking"
    assert f"asked once more, it does: its answers differ from one to the next; {line}" in words


@pytest.mark.parametrize("own", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_system_prompt_that_works_is_told(project, server, own):
    """It takes the place of the question's own."""
    path = Path("data/prompts/prompts.jsonl")
    rows = project.rows(str(path))
    for row in rows:
        row["messages"] = [*own, *row["messages"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    server.always(thinks_when(has_system_prompt))
    words = diagnosis()
    assert (
        'it does with the system prompt "detailed thinking on": give it to the questions' in words
    )


def test_each_known_switch_is_tried_once_and_as_it_would_be_sent(project, server):
    project.set(**{"generate.temperature": 0.6})
    server.always(says(*EMPTY))
    words = diagnosis()
    known = "thinking, enable_thinking, null, reasoning_effort, a system prompt"
    assert f"it does with none of the known switches ({known})" in words
    tried = [body for body in server.bodies if body["max_tokens"] == TRY_MAX_TOKENS]
    assert len(tried) == 5
    assert {body["temperature"] for body in tried} == {0.6}
    assert {body["return_token_ids"] for body in tried} == {True}
    named = [switches(body) for body in tried]
    assert sorted(map(list, named)) == [[], [], [], ["enable_thinking"], ["thinking"]]
    assert all(value is True for switch in named for value in switch.values())


def test_an_empty_think_block_is_no_thinking_that_works(project, server):
    """What Qwen3 writes when it is switched off."""
    server.always(says(THINK, *ids("\n"), THINK_END, *ids("42"), END))
    assert "it does with none of the known switches" in diagnosis()


@pytest.mark.parametrize(
    "act",
    [reset, silence, fail(500), fail(401), fail(404), edited(lambda answer: answer.clear())],
    ids=["reset", "silence", "500", "401", "404", "nonsense"],
)
def test_a_server_that_fails_while_it_is_tried_does_not_hide_the_diagnosis(project, server, act):
    async def fails_when_tried(request: web.Request, answer: Answer) -> web.StreamResponse:
        body = await request.json()
        return await (says(*EMPTY) if is_question(body) else act)(request, answer)

    project.set(**{"generate.timeout_s": 1})
    server.always(fails_when_tried)
    words = diagnosis()
    assert "4 of 4 answers fail the reasoning gate: the verifier did not think" in words
    assert words.endswith(f"\n  {EMPTY_SHOWN}\n  {EMPTY_SHOWN}")
