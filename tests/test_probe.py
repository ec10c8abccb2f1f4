"""The questions before the first question: what is found, and what stops a run before it starts."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from aiohttp import web

from pipeline import generate
from pipeline.errors import BadRun
from pipeline.exchange import Question
from pipeline.params import load_params
from pipeline.probe import probe, questions_to_probe_with
from pipeline.server import meet
from pipeline.verifier import load_verifier
from tests.conftest import ENDPOINTS, Project
from tests.fake_server import (
    END,
    MODEL,
    THINK,
    THINK_END,
    Act,
    Answer,
    FakeServer,
    drop_token_ids,
    edited,
    fail,
    ids,
    is_probe,
    logprob_of,
    reset,
    says,
    silence,
    text_of,
)

PROBE_FILE = Path("data/traces/probe.json")
AS_VLLM = {
    "server_version": "0.32.0",
    "model": MODEL,
    "max_model_len": 1024,
    "returns_token_ids": True,
    "reasoning_field": "reasoning",
    "think_start_in": "completion",
    "switch_takes_effect": True,
    "think_tokens_in_text": True,
    "sampling_arrives": True,
}
IN_WORDS = (
    "probe: vLLM 0.32.0 serves models/verifier, 1024 tokens of context, token ids come back, "
    "reasoning comes in `reasoning`, the think-start is in the completion, the thinking switch "
    "takes effect, think tokens show in text, sampling values arrive"
)
NAN = "Out of range float values are not JSON compliant: nan"
FOUND = [*ids("\n\nIt is 1Q"), END]  # the answer to Q1


def message_of(answer: Answer) -> dict:
    return answer["choices"][0]["message"]


def renamed(*names: str) -> Act:
    """The reasoning in fields of these names, and in no other."""

    def change(answer: Answer) -> None:
        text = message_of(answer).pop("reasoning")
        message_of(answer).update(dict.fromkeys(names, text))

    return edited(change)


def prefill(answer: Answer) -> None:
    """As if the chat template had opened the think block (Kimi, DeepSeek-R1)."""
    choice = answer["choices"][0]
    if choice["token_ids"][0] == THINK:
        answer["prompt_token_ids"].append(choice["token_ids"].pop(0))
        if choice.get("logprobs"):
            choice["logprobs"]["content"].pop(0)


def one_text(*, opened: bool = True, tags: bool = True) -> Callable[[Answer], None]:
    """A server without a reasoning parser: all is in `content`, with what tags there are."""

    def change(answer: Answer) -> None:
        if not opened:
            prefill(answer)
        text = text_of(answer["choices"][0]["token_ids"])
        if not tags:
            text = text.replace("<think>", "").replace("</think>", "")
        message_of(answer).update(reasoning=None, content=text)

    return change


def all_in_reasoning(answer: Answer) -> None:
    """The parser of another model, that never finds the end of the reasoning."""
    message = message_of(answer)
    message.update(reasoning=f"{message['reasoning']}{message['content']}", content=None)


def bill_reasoning(answer: Answer) -> None:
    answer["usage"]["completion_tokens_details"] = {"reasoning_tokens": 13}


def exclude_reasoning(answer: Answer) -> None:
    """vLLM 0.32 with include_reasoning false: no text, no ids, no probabilities."""
    bill_reasoning(answer)
    message_of(answer)["reasoning"] = None
    answer["choices"][0].update(token_ids=None, logprobs=None)


def strip_reasoning(answer: Answer) -> None:
    """A proxy that removes the field."""
    bill_reasoning(answer)
    del message_of(answer)["reasoning"]


async def knows_no_logprobs(request: web.Request, answer: Answer) -> web.StreamResponse:
    body = await request.json()
    if "logprobs" in body:
        return await fail(400, "unknown field logprobs")(request, answer)
    return web.json_response(answer)


async def takes_another_token(request: web.Request, answer: Answer) -> web.StreamResponse:
    """The third token was not the likeliest one."""
    body = await request.json()
    content = (answer["choices"][0].get("logprobs") or {}).get("content") or []
    if len(content) > 2:
        token = answer["choices"][0]["token_ids"][2]
        content[2] = logprob_of(token, body["top_logprobs"], likeliest=ord("z"))
    return web.json_response(answer)


@pytest.fixture
def look(project: Project) -> Callable[..., dict]:
    """`look(server)`: what the probe finds when it asks it Q1."""

    def ask(server: FakeServer, question: str = "Q1") -> dict:
        project.ask(question)
        row = json.loads(Path("data/prompts/prompts.jsonl").read_bytes())
        endpoint = meet(server.base_url)
        return asdict(probe(endpoint, [Question.first(row)], load_params(), load_verifier()))

    return ask


def stopped(*servers: FakeServer) -> str:
    """What a run says that its probe stops, before it asked any of these servers a question."""
    with pytest.raises(BadRun) as error:
        generate.main()
    for server in servers:
        assert server.asked == []
    assert not Path("data/traces/journal.jsonl").exists()
    assert not PROBE_FILE.exists()
    return str(error.value)


def place(key: str) -> str:
    """`params.yaml:12 generate.thinking_switch`, counted by hand in the project's file."""
    section, *_, name = key.split(".")
    lines = Path("params.yaml").read_text("utf-8").splitlines()
    start = lines.index(f"{section}:")
    number = next(n for n, text in enumerate(lines) if n > start and text.startswith(f"  {name}:"))
    return f"params.yaml:{number + 1} {key}"


# what is found


def test_a_present_vllm_is_seen_as_it_is(look, server):
    assert look(server) == AS_VLLM


def test_it_takes_three_short_requests(look, server):
    look(server)
    configured, switched = sorted(server.bodies, key=lambda body: -body["max_tokens"])
    assert configured["chat_template_kwargs"] == {"enable_thinking": True}
    assert configured["temperature"] == 0.0
    assert configured["return_token_ids"] is True
    assert configured["max_tokens"] == 512
    assert switched["chat_template_kwargs"] == {"enable_thinking": False}
    assert switched["max_tokens"] == 1
    assert len(server.completion_bodies) == 1
    assert all(map(is_probe, server.bodies))


@pytest.mark.parametrize(
    ("act", "found"),
    [
        (renamed("reasoning"), {}),
        (renamed("reasoning_content"), {"reasoning_field": "reasoning_content"}),
        (renamed("reasoning", "reasoning_content"), {}),
        (edited(prefill), {"think_start_in": "prompt"}),
        (knows_no_logprobs, {"sampling_arrives": None}),
        (edited(lambda a: a["choices"][0].update(logprobs=None)), {"sampling_arrives": None}),
        (edited(lambda a: a["choices"][0].pop("logprobs", None)), {"sampling_arrives": None}),
        (
            edited(lambda a: a["choices"][0].update(logprobs={"content": [{"token": "x"}]})),
            {"sampling_arrives": None},
        ),
    ],
    ids=[
        "reasoning",
        "reasoning_content",
        "both",
        "prefilled",
        "refuses_logprobs",
        "null_logprobs",
        "no_logprobs",
        "other_logprobs",
    ],
)
def test_what_a_server_does_otherwise_is_found(look, server, act, found):
    server.always(act)
    assert look(server) == AS_VLLM | found


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ({"hides_think_tokens": True}, {"think_tokens_in_text": False}),
        ({"completes": False}, {"think_tokens_in_text": None}),
        ({"max_model_len": 4096}, {"max_model_len": 4096}),
        ({"thinks_by_default": False}, {}),  # the switch, which is sent, turns it on
    ],
    ids=["hidden_tokens", "chat_alone", "longer_context", "off_by_default"],
)
def test_another_kind_of_server_is_seen_as_it_is(look, kind, found):
    with FakeServer(**kind) as server:
        assert look(server) == AS_VLLM | found


def test_a_guarded_server_is_seen_too(look, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with FakeServer(api_key="sk-test") as server:
        assert look(server) == AS_VLLM


def test_a_model_without_a_switch_that_always_thinks_is_fine(look, project, server):
    project.set(**{"generate.thinking_switch": None})
    assert look(server) == AS_VLLM | {"switch_takes_effect": None}
    assert len(server.bodies) == 1


def test_a_verifier_that_shall_not_think_is_fine(look, project, server):
    project.set(**{"generate.thinking": False})
    nothing = dict.fromkeys(("reasoning_field", "think_start_in", "think_tokens_in_text"))
    assert look(server) == AS_VLLM | nothing


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_an_answer_that_max_tokens_cuts_is_no_fault(look, project, server, max_tokens):
    project.set(**{"generate.max_tokens": max_tokens})
    found = AS_VLLM | {"think_tokens_in_text": None}
    assert look(server) == (found if max_tokens > 1 else found | {"reasoning_field": None})


def test_a_question_that_switches_thinking_off_is_no_fault(look, server):
    """Where there is no other."""
    server.writes["Hi /no_think"] = [THINK, *ids("\n\n"), THINK_END, *ids("Hi"), END]
    found = look(server, "Hi /no_think")
    assert found == AS_VLLM | {"reasoning_field": None}


@pytest.mark.parametrize(
    "writing",
    [
        [THINK, *ids("ab"), THINK_END, *FOUND],
        [THINK, *ids("never"), END],
        [THINK, *ids("because"), THINK_END, END],
        [THINK, *ids("so " * 300)],
    ],
    ids=["short", "unclosed", "no_answer", "looping"],
)
def test_what_one_answer_cannot_decide_is_left_to_the_gate(look, server, writing):
    server.writes["Q1"] = writing
    assert look(server)["returns_token_ids"]


# a server that returns no ids, where text is to do

TEXT_ALONE = AS_VLLM | {
    "returns_token_ids": False,
    **dict.fromkeys(("think_start_in", "switch_takes_effect", "think_tokens_in_text")),
}
BY_TEXT = pytest.mark.parametrize("source", ["text", "ids_else_text"])


def no_change(answer: Answer) -> None:
    pass


def rename(answer: Answer) -> None:
    message_of(answer)["thoughts"] = message_of(answer).pop("reasoning")


def without_ids(change: Callable[[Answer], object] = no_change) -> Act:
    """`change`, and then the ids are dropped."""

    def both(answer: Answer) -> None:
        change(answer)
        drop_token_ids(answer)

    return edited(both)


@BY_TEXT
def test_a_server_without_token_ids_will_do_where_text_does(look, project, server, source):
    project.set(**{"reassemble.source": source})
    server.always(without_ids())
    assert look(server) == TEXT_ALONE


@pytest.mark.parametrize(
    "change",
    [
        lambda answer: answer.pop("prompt_token_ids"),
        lambda answer: (prefill(answer), answer.pop("prompt_token_ids")),
        lambda answer: answer["choices"][0].pop("token_ids"),
    ],
    ids=["no_prompt_ids", "no_prompt_ids_prefilled", "no_ids"],
)
def test_one_half_of_the_ids_is_none(look, project, server, change):
    project.set(**{"reassemble.source": "text"})
    server.always(edited(change))
    found = look(server)
    assert not found["returns_token_ids"]
    assert found["reasoning_field"] == "reasoning"


def test_a_server_with_token_ids_is_seen_as_ever_where_text_would_do(look, project, server):
    project.set(**{"reassemble.source": "text"})
    assert look(server) == AS_VLLM


@BY_TEXT
@pytest.mark.parametrize("thinking", [True, False])
def test_that_no_token_ids_come_back_is_said_and_stored(project, server, capsys, source, thinking):
    project.set(**{"reassemble.source": source, "generate.thinking": thinking})
    server.always(without_ids())
    generate.main()
    field = "reasoning comes in `reasoning`, " if thinking else ""
    assert (
        "probe: vLLM 0.32.0 serves models/verifier, 1024 tokens of context, no token ids come "
        f"back, only text, {field}sampling values arrive\n"
    ) in capsys.readouterr().out
    nothing = {} if thinking else {"reasoning_field": None}
    assert json.loads(PROBE_FILE.read_bytes()) == [TEXT_ALONE | nothing]


@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_text_that_max_tokens_cuts_is_no_fault(look, project, server, max_tokens):
    project.set(**{"reassemble.source": "text", "generate.max_tokens": max_tokens})
    server.always(without_ids())
    nothing = {"reasoning_field": None} if max_tokens == 1 else {}
    assert look(server) == TEXT_ALONE | nothing


@BY_TEXT
@pytest.mark.parametrize(
    ("change", "said", "key"),
    [
        (rename, "does not know (thoughts)", "generate.endpoints"),
        (one_text(), "without a reasoning parser", "verifier.reasoning_parser"),
        (one_text(opened=False), "without a reasoning parser", "verifier.reasoning_parser"),
        # nothing tells it from an answer without reasoning
        (one_text(tags=False), "the verifier did not think", "think.start"),
        (all_in_reasoning, "`content` is empty", "verifier.reasoning_parser"),
        (exclude_reasoning, "include_reasoning", "generate.endpoints"),
        (strip_reasoning, "generated and billed but left out", "generate.endpoints"),
        (lambda a: message_of(a).pop("reasoning"), "the verifier did not think", "think.start"),
        (lambda a: message_of(a).update(reasoning="\n"), "did not think", "think.start"),
        (lambda a: message_of(a).update(reasoning=None, content=None), "left out of the answer",
         "generate.endpoints"),
        (lambda a: a["choices"][0].update(finish_reason="abort"), "finish_reason 'abort'", None),
    ],
    ids=[
        *("unknown_field", "no_parser", "closing_tag_only", "no_tags", "wrong_parser"),
        *("not_included", "stripped", "no_reasoning", "blank", "nothing", "aborted"),
    ],
)  # fmt: skip
def test_text_that_is_not_right_stops_the_run_all_the_same(
    project, server, source, change, said, key
):
    project.set(**{"reassemble.source": source})
    server.always(without_ids(change))
    words = stopped(server)
    assert said in words
    assert key is None or place(key) in words


def test_the_right_switch_is_found_by_text_too(project, monkeypatch):
    project.set(**{"reassemble.source": "text", "generate.thinking_switch": None})
    with FakeServer(thinks_by_default=False) as server:
        server.always(without_ids())
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = stopped(server)
    assert f"it does with enable_thinking: change {place('generate.thinking_switch')}" in words


def test_by_text_too_a_verifier_that_thinks_although_it_shall_not_is_told(project, monkeypatch):
    project.set(**{"generate.thinking": False, "generate.thinking_switch": None})
    project.set(**{"reassemble.source": "text"})
    with FakeServer() as server:
        server.always(without_ids())
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        assert "thinks although generate.thinking is false" in stopped(server)


# how it is told


def test_the_findings_are_printed_and_stored(project, server, capsys):
    generate.main()
    assert IN_WORDS in capsys.readouterr().out
    assert json.loads(PROBE_FILE.read_bytes()) == [AS_VLLM]


def test_what_was_not_seen_is_not_said(project, monkeypatch, capsys):
    project.set(**{"generate.thinking_switch": None})
    with FakeServer(hides_think_tokens=True) as server:
        server.always(knows_no_logprobs)
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        generate.main()
    words = capsys.readouterr().out
    assert "the think-start is in the completion, think tokens are left out of text\n" in words


def test_a_second_probing_writes_the_same_bytes(project, server):
    project.ask("Q1", "Q2", "Q3", "Q4")
    generate.main()
    before, written_at = PROBE_FILE.read_bytes(), PROBE_FILE.stat().st_mtime_ns
    server.bodies.clear()
    project.ask("Q1", "Q2", "Q3", "Q4", "Q5")
    generate.main()
    assert server.asked == ["Q5"]
    assert PROBE_FILE.read_bytes() == before
    assert PROBE_FILE.stat().st_mtime_ns == written_at


def test_a_finished_run_probes_nobody(project, server):
    generate.main()
    server.bodies.clear()
    generate.main()
    assert server.bodies == []


@pytest.mark.parametrize("reverse", [False, True])
def test_several_servers_are_all_probed_and_equal_ones_told_once(
    project, monkeypatch, capsys, reverse
):
    with FakeServer() as one, FakeServer() as same, FakeServer(max_model_len=4096) as longer:
        urls = [server.base_url for server in (one, same, longer)]
        monkeypatch.setenv(ENDPOINTS, ",".join(urls[::-1] if reverse else urls))
        generate.main()
        for server in (one, same, longer):
            assert len(server.completion_bodies) == 1
    assert capsys.readouterr().out.count("probe: ") == 2
    found = json.loads(PROBE_FILE.read_bytes())
    assert found == [AS_VLLM, AS_VLLM | {"max_model_len": 4096}]  # in whatever order they came


@pytest.mark.parametrize(
    ("questions", "expected"),
    [
        (["a longer one", "short", "the longest of them"], "short"),
        (["/no_think", "a longer one"], "a longer one"),
        (["say so /nothink", "/no_think"], "/no_think"),
    ],
    ids=["shortest", "thinking", "none_thinking"],
)
def test_the_shortest_question_that_leaves_thinking_on_is_asked(project, questions, expected):
    project.ask(*questions)
    rows = project.rows("data/prompts/prompts.jsonl")
    wanted = {row["key"]: Question.first(row) for row in rows}
    chosen = questions_to_probe_with(wanted, {})[0]
    assert chosen.messages[0]["content"] == expected


def test_findings_come_back_with_the_settings_they_belong_to(project, server):
    """data/traces is an output of DVC: the same rows must come with the same findings."""
    generate.main()
    before = project.bytes("data/traces/*")
    project.set(**{"generate.thinking": False})
    generate.main()
    assert project.bytes("data/traces/probe.json") != {
        "data/traces/probe.json": before["data/traces/probe.json"]
    }
    server.bodies.clear()
    project.set(**{"generate.thinking": True})
    generate.main()
    assert server.bodies == []
    assert project.bytes("data/traces/*") == before


# what stops a run before its first question


@pytest.mark.parametrize(
    "change",
    [
        drop_token_ids,
        lambda answer: answer.pop("prompt_token_ids"),
        lambda answer: answer["choices"][0].pop("token_ids"),
        lambda answer: answer.update(prompt_token_ids=None),
        lambda answer: answer.update(prompt_token_ids=[]),
    ],
    ids=["null", "no_prompt_ids", "no_ids", "null_prompt_ids", "empty_prompt_ids"],
)
def test_a_server_without_token_ids_is_said_clearly(project, server, change):
    server.always(edited(change))
    words = stopped(server)
    assert "return_token_ids" in words
    assert place("generate.endpoints") in words
    assert f"{place('reassemble.source')}: ids to text or ids_else_text" in words
    assert '{"reasoning": ' in words


PARSER, ENDPOINTS_KEY = "verifier.reasoning_parser: qwen3", "generate.endpoints"
MISMATCHES = {
    "unknown_field": (renamed("thoughts"), "does not know (thoughts)", ENDPOINTS_KEY),
    "no_parser": (edited(one_text()), "without a reasoning parser", PARSER),
    "closing_tag_only": (edited(one_text(opened=False)), "without a reasoning parser", PARSER),
    "no_tags": (edited(one_text(tags=False)), "without a reasoning parser", PARSER),
    "wrong_parser": (edited(all_in_reasoning), "`content` is empty", PARSER),
    "not_included": (edited(exclude_reasoning), "include_reasoning", ENDPOINTS_KEY),
    "stripped": (edited(strip_reasoning), "generated and billed but left out", ENDPOINTS_KEY),
    "other_tokens": (takes_another_token, "temperature 0 was asked for", ENDPOINTS_KEY),
    "garbage": (says(*ids("!" * 99), finish="length"), "one token over", "verifier.dtype: float32"),
    "aborted": (says(*ids("half"), finish="abort"), "finish_reason 'abort'", "its log"),
    "nan_refused": (fail(400, NAN), f"calculates NaN (HTTP 400: {NAN})", "verifier.dtype: float32"),
    "nan_failed": (fail(500, NAN), f"calculates NaN (HTTP 500: {NAN})", "verifier.dtype: float32"),
}


@pytest.mark.parametrize(("act", "said", "key"), MISMATCHES.values(), ids=MISMATCHES.keys())
def test_a_server_that_does_otherwise_stops_the_run(project, server, act, said, key):
    server.always(act)
    words = stopped(server)
    assert said in words
    name, *value = key.partition(": ")
    assert (place(name) + "".join(value) if "." in name else name) in words
    assert server.base_url in words


async def nan_probabilities(request: web.Request, answer: Answer) -> web.StreamResponse:
    """vLLM where logits hold NaN: fine as long as nobody asks for probabilities (D15)."""
    body = await request.json()
    refused = body.get("logprobs")
    return await fail(400, NAN)(request, answer) if refused else web.json_response(answer)


def test_nan_that_only_probabilities_show_stops_the_run(project, server):
    server.always(nan_probabilities)
    words = stopped(server)
    assert "calculates NaN" in words
    assert f"{place('verifier.dtype')}: float32" in words


def test_nan_on_one_question_is_no_fault_of_that_question(project, server):
    server.when("Q1", *[fail(400, NAN)] * 9)
    assert "calculates NaN" in stopped(server)


@pytest.mark.parametrize("act", [fail(500), fail(400)], ids=["failed", "refused"])
def test_a_question_that_fails_alone_does_not_stop_the_run(project, server, act):
    """The shortest one, which is the first to be asked."""
    project.set(**{"generate.max_failed_fraction": 0.2})
    server.when("Q1", *[act] * 99)
    generate.main()
    assert json.loads(PROBE_FILE.read_bytes()) == [AS_VLLM]
    statuses = [row["status"] for row in project.rows()]
    assert statuses[0] in ("failed", "rejected_by_server")
    assert statuses[1:] == ["ok"] * 5


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (fail(500, "EngineCore died"), "HTTP 500: EngineCore died"),
        (fail(400, "no chat template"), "HTTP 400: no chat template"),
        (reset, "Server disconnected"),
        (silence, "timed out"),
        (edited(lambda answer: answer.clear()), "the answer makes no sense"),
        (edited(lambda answer: answer.update(choices=[])), "the answer makes no sense"),
    ],
    ids=["failed", "refused", "reset", "silence", "nothing", "no_choice"],
)
def test_a_server_that_does_not_answer_stops_the_run_in_its_own_words(project, server, act, said):
    project.set(**{"generate.timeout_s": 1})
    server.always(act)
    with pytest.raises(BadRun, match="does not answer the first question") as error:
        generate.main()
    assert said in str(error.value)
    # Another question may fare better, unless it takes as long to find out.
    probed_with = {"Q1"} if act is silence else {"Q1", "Q2", "Q3"}
    assert set(server.questions) == probed_with
    assert not Path("data/traces/journal.jsonl").exists()


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_model_stops_the_run(project, server, status):
    server.always(fail(status, "who are you"))
    words = stopped(server)
    assert f"{server.base_url} says HTTP {status}: who are you" in words


# the thinking switch


@pytest.mark.parametrize("by_default", [True, False])
@pytest.mark.parametrize(
    ("named", "known"), [("enable_thinking", "thinking"), ("thinking", "enable_thinking")]
)
def test_a_switch_of_another_name_is_told_and_the_right_one_named(
    project, monkeypatch, named, known, by_default
):
    """Ignored without a word (A8): whether the model then thinks is up to its template."""
    project.set(**{"generate.thinking_switch": named})
    with FakeServer(switch=known, thinks_by_default=by_default) as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = stopped(server)
    assert f"{place('generate.thinking_switch')}: {named}" in words
    advice = f"Set it to {known}" if by_default else f"it does with {known}: change"
    assert advice in words
    if not by_default:
        assert "the chat template closes the think block itself" in words


def test_a_switch_where_none_is_known_is_told(project, monkeypatch):
    with FakeServer(switch="depth") as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = stopped(server)
    assert f"{place('generate.thinking_switch')}: enable_thinking" in words
    assert "Set it to null, for it knows neither thinking nor enable_thinking" in words


def test_no_switch_for_a_model_that_needs_one_is_told(project, monkeypatch):
    project.set(**{"generate.thinking_switch": None})
    with FakeServer(thinks_by_default=False) as server:
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = stopped(server)
    assert "the chat template closes the think block itself" in words
    assert f"it does with enable_thinking: change {place('generate.thinking_switch')}" in words


@pytest.mark.parametrize("named", ["thinking", None])
def test_a_verifier_that_thinks_although_it_shall_not_is_told(project, monkeypatch, named):
    project.set(**{"generate.thinking": False, "generate.thinking_switch": named})
    with FakeServer() as server:  # which knows enable_thinking alone
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        words = stopped(server)
    assert "thinks although generate.thinking is false" in words
    assert f"{place('generate.thinking_switch')}: {named}" in words


def test_the_switch_is_proved_on_a_server_without_logprobs_too(project, monkeypatch):
    with FakeServer(switch="thinking") as server:
        server.always(knows_no_logprobs)
        monkeypatch.setenv(ENDPOINTS, server.base_url)
        with pytest.raises(BadRun, match="Set it to thinking"):
            generate.main()


# think tokens


@pytest.mark.parametrize(
    "act",
    [says(*ids("42"), END), says(THINK, *ids("\n\n"), THINK_END, *FOUND)],
    ids=["no_think_tokens", "empty_block"],
)
def test_a_model_that_thinks_with_no_switch_is_told(project, server, act):
    server.always(act)
    words = stopped(server)
    assert "the verifier did not think; it does with none of the known switches" in words
    assert place("think.start") in words


def test_think_tokens_of_other_ids_are_told(project, server):
    other = {"start_id": 210, "end_id": 211}
    project.set(**{f"think.{name}": value for name, value in other.items()})
    project.identity(**{f"think_{name}": value for name, value in other.items()})
    words = stopped(server)
    assert "its think tokens are others" in words
    assert place("think.start") in words


@pytest.mark.parametrize("position", [0, 1])
def test_of_several_servers_the_wrong_one_is_named(project, server, monkeypatch, position):
    with FakeServer() as wrong:
        wrong.always(edited(one_text()))
        urls = [server.base_url]
        urls.insert(position, wrong.base_url)
        monkeypatch.setenv(ENDPOINTS, ",".join(urls))
        words = stopped(server, wrong)
        assert f"probe of {wrong.base_url}" in words
        assert server.base_url not in words
