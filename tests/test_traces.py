"""Answers: the row that one becomes, when it is asked again, and how rows lie on disk.

On disk: `data/traces/journal.jsonl` while they come, parts afterwards, and the stash. A row here is
a small one, with `mark` to tell two answers of one key apart.
"""

import copy
import hashlib
import json
import os
import pickle
import random
import tracemalloc
from pathlib import Path

import orjson
import pytest

from pipeline import traces
from pipeline.asking import budget_of
from pipeline.client import Answer
from pipeline.errors import DataError
from pipeline.exchange import Question, request_body, trace_key, trace_of
from pipeline.params import Params, load_params
from pipeline.reasoning import Verdict
from pipeline.records import Status
from pipeline.server import Endpoint
from pipeline.traces import (
    FAILED_GATE,
    JOURNAL,
    STASH,
    Place,
    Row,
    Stored,
    append,
    fold,
    forget,
    keep,
    load_stored,
    read,
)
from tests.conftest import Project
from tests.fake_server import END, THINK, THINK_END, ids

# The answer to one question


PROMPT = {
    "index": 0,
    "split": "train",
    "key": "0" * 64,
    "sample_id": "c7_gen0",
    "source": "test",
    "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
    "later_turns": ["Q2", "Q3"],
}
GENERATED = [THINK, *ids("R"), THINK_END, *ids("A"), END]
NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **NEUTRAL}


def body(**message: object) -> dict:
    """A whole answer of the server; `message` in the place of reasoning and content."""
    return {
        "prompt_token_ids": [203, 81, END, 204],
        "choices": [
            {
                "message": message or {"role": "assistant", "reasoning": "R", "content": "A"},
                "finish_reason": "stop",
                "token_ids": GENERATED,
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9},
    }


def without_ids(**message: object) -> dict:
    answer = body(**message)
    answer["prompt_token_ids"] = answer["choices"][0]["token_ids"] = None
    return answer


def answer_of(body: dict | None, outcome: str = "answered", error: str | None = None) -> Answer:
    origin = Endpoint("http://127.0.0.1:9/v1", "models/verifier", "0.32.0", 1024)
    return Answer(
        key="k",
        body=body,
        error=error,
        outcome=outcome,
        attempts=2,
        endpoint=origin,
        max_tokens=99,
    )


@pytest.fixture(scope="module")
def params(tmp_path_factory):
    """`params(max_tokens=600, context=2048)`: params.yaml with these values, read once for all."""
    with pytest.MonkeyPatch.context() as patch:
        root = tmp_path_factory.mktemp("params")
        patch.chdir(root)
        Project(root)
        read_once = load_params()

    def make(context: int = 1024, **values: object) -> Params:
        verifier = read_once.verifier.model_copy(update={"max_model_len": context})
        generate = read_once.generate.model_copy(update=values)
        return read_once.model_copy(update={"verifier": verifier, "generate": generate})

    return make


@pytest.fixture
def row_of(params, verifier):
    """`row_of(body)`: the row that is stored for this answer."""

    def make(body, outcome="answered", error=None, **values):
        answer = answer_of(body, outcome, error)
        return trace_of(answer, Question.first(PROMPT), params(**values), verifier)

    return make


def test_a_row_holds_the_question_the_answer_and_how_it_was_asked(row_of):
    assert row_of(body()) == {
        "sample_id": "c7_gen0",
        "key": "k",
        "status": "ok",
        "source": "test",
        "messages": PROMPT["messages"],
        "reasoning": "R",
        "content": "A",
        "finish_reason": "stop",
        "prompt_token_ids": [203, 81, END, 204],
        "token_ids": GENERATED,
        "usage": {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9},
        "sampling": {**SAMPLING, "max_tokens": 99},
        "max_model_len": 1024,
        "attempts": 2,
        "server_version": "0.32.0",
    }


@pytest.mark.parametrize(
    "message",
    [
        {"reasoning": "R", "content": "A"},
        {"reasoning_content": "R", "content": "A"},
        {"reasoning": "R", "reasoning_content": "R", "content": "A"},
        {"reasoning": None, "reasoning_content": "R", "content": "A"},
        {"reasoning": "R", "reasoning_content": None, "content": "A"},
        {"reasoning": "", "reasoning_content": "R", "content": "A"},
        {"reasoning_content": "", "reasoning": "R", "content": "A"},
    ],
)
def test_both_names_of_the_reasoning_give_one_record(row_of, message):
    row = row_of(body(**message))
    assert (row["reasoning"], row["content"], row["status"]) == ("R", "A", "ok")
    assert "reasoning_content" not in row
    assert row == row_of(body())


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [([""], {"reasoning": ""}), ([None], {"reasoning": None}), ([], {})],
    ids=["empty", "null", "absent"],
)
def test_empty_null_and_absent_reasoning_stay_apart(row_of, field, given, kept):
    message = {"content": "A"} | dict.fromkeys([field] * len(given), *given)
    row = row_of(body(**message))
    assert {name: text for name, text in row.items() if name == "reasoning"} == kept


@pytest.mark.parametrize("given", [{"content": ""}, {"content": None}, {}])
def test_empty_null_and_absent_content_stay_apart(row_of, given):
    row = row_of(body(reasoning="R", **given))
    assert {name: text for name, text in row.items() if name == "content"} == given


@pytest.mark.parametrize(
    ("message", "reasoning", "content"),
    [
        ({"content": " R </think> A"}, " R ", " A"),  # A4
        ({"reasoning": None, "content": "<think>\nR\n</think>\n\nA"}, "\nR\n", "\n\nA"),  # A5
    ],
)
def test_one_unsplit_text_is_split_and_marked(row_of, message, reasoning, content):
    for answer in (body(**message), without_ids(**message)):
        row = row_of(answer)
        assert (row["reasoning"], row["content"]) == (reasoning, content)
        assert row["unsplit"] is True
        assert row["status"] == "ok"


def test_a_tag_that_the_answer_is_about_is_not_split(row_of):
    """A14."""
    text = {"reasoning": "I must explain the tag", "content": "close it with </think>"}
    row = row_of(body(**text))
    assert {name: row[name] for name in text} == text
    assert "unsplit" not in row


def test_without_thinking_nothing_is_split(row_of):
    row = row_of(without_ids(content="close it with </think>"), thinking=False)
    assert (row["content"], row["status"]) == ("close it with </think>", "ok")
    assert "reasoning" not in row
    assert "unsplit" not in row


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"thoughts": "R"}, ["thoughts"]),
        ({"z": "R", "a": "R"}, ["a", "z"]),
        ({"thoughts": " \n"}, None),
        ({"thoughts": ""}, None),
        ({"function_call": None, "annotations": [], "audio": {"id": "x"}}, None),
        ({"refusal": "no", "name": "bot"}, None),
    ],
)
def test_further_fields_with_text_are_named(row_of, fields, kept):
    row = row_of(body(reasoning=None, content="A", **fields))
    assert row.get("other_fields") == kept


@pytest.mark.parametrize("calls", [[], None, "absent"])
def test_no_tool_calls_are_none(row_of, calls):
    given = {} if calls == "absent" else {"tool_calls": calls}
    row = row_of(body(reasoning="R", content="A", **given))
    assert "tool_calls" not in row
    assert row["status"] == "ok"


def test_tool_calls_are_kept_and_judged(row_of):
    """C17."""
    calls = [{"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}]
    row = row_of(body(reasoning="R", content="(no content)", tool_calls=calls))
    assert row["tool_calls"] == calls
    assert row["status"] == "tool_call"


@pytest.mark.parametrize(
    ("usage", "kept"),
    [
        (
            {"completion_tokens": 5, "completion_tokens_details": {"reasoning_tokens": 1}},
            {"completion_tokens": 5, "reasoning_tokens": 1},
        ),
        ({"completion_tokens": 5, "completion_tokens_details": None}, {"completion_tokens": 5}),
        ({"completion_tokens": 5, "completion_tokens_details": {}}, {"completion_tokens": 5}),
        ({"completion_tokens": 5, "reasoning_tokens": 1},
         {"completion_tokens": 5, "reasoning_tokens": 1}),  # as stored rows have it
        ({"completion_tokens": "5", "prompt_tokens": True, "x": 1.5}, {}),
        ({}, {}),
        (None, {}),
    ],
)  # fmt: skip
def test_of_usage_the_whole_numbers_are_kept(row_of, usage, kept):
    row = row_of(body() | {"usage": usage})
    assert row["usage"] == kept
    assert row["status"] == "ok"


@pytest.mark.parametrize(
    ("outcome", "status"),
    [("refused", "rejected_by_server"), ("timed_out", "timed_out"), ("failed", "failed")],
)
def test_no_answer_is_a_row_with_the_servers_words(row_of, outcome, status):
    row = row_of(None, outcome, "HTTP 400: too long")
    assert (row["status"], row["error"]) == (status, "HTTP 400: too long")
    assert (row["finish_reason"], row["token_ids"], row["usage"]) == (None, [], {})
    assert not {"reasoning", "content"} & row.keys()


def changed(path: str, value: object) -> dict:
    """A whole answer with another value at `choices.0.message`."""
    answer = copy.deepcopy(body())
    *parents, last = path.split(".")
    inner = answer
    for name in parents:
        inner = inner[int(name) if name.isdigit() else name]
    inner[int(last) if last.isdigit() else last] = value
    return answer


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"choices": None},
        {"choices": []},
        {"choices": "none"},
        {"choices": {"0": {}}},
        {"choices": 1},
        {"error": {"message": "no luck"}},
        {"choices": [None]},
        {"choices": ["text"]},
        {"choices": [[]]},
        {"choices": [{}]},
        *(changed("choices.0.message", message) for message in ["text", ["text"], 1, True]),
        *(changed(ids_at, wrong)
          for ids_at in ("prompt_token_ids", "choices.0.token_ids")
          for wrong in (["65"], [65.0], [65, None], [-1], [256], [2**70], [True], [[65]], "AB",
                        {"0": 65}, 65, True, 1.5)),
        *(changed(text_at, wrong)
          for text_at in ("choices.0.message.content", "choices.0.message.reasoning")
          for wrong in ([{"type": "text", "text": "A"}], {"text": "A"}, 1, 0, False, [])),
        *(changed("usage", wrong) for wrong in ("many", [5], 5)),
        changed("usage.completion_tokens_details", [1]),
    ],
    ids=lambda answer: json.dumps(answer)[-60:],
)  # fmt: skip
@pytest.mark.parametrize("thinking", [True, False])
def test_an_answer_that_makes_no_sense_is_a_failed_row(row_of, answer, thinking):
    row = row_of(answer, thinking=thinking)
    assert row["status"] == "failed"
    assert row["error"].startswith("the answer makes no sense: ")
    # nothing of it is taken for an answer
    assert (row["finish_reason"], row["prompt_token_ids"], row["token_ids"]) == (None, [], [])
    assert not {"reasoning", "content"} & row.keys()
    assert orjson.loads(orjson.dumps(row)) == row


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (changed("choices.0.message", None), "ok"),  # by its ids
        (changed("choices.0.message", {}), "ok"),
        (changed("choices.0.finish_reason", None), "aborted"),
        (changed("choices.0.finish_reason", {"type": "stop"}), "aborted"),
        (changed("choices.0.finish_reason", ["stop"]), "aborted"),
        (changed("choices.0.token_ids", [255, *GENERATED]), "ok"),  # the largest id there is
        (changed("choices.0.token_ids", [0, *GENERATED]), "ok"),
        (changed("choices.0.token_ids", None), "ok"),  # by its text
        (changed("choices.0.token_ids", []), "ok"),
        (without_ids(content=None), "parser_conflict"),  # A11
    ],
    ids=lambda answer: json.dumps(answer)[-60:] if isinstance(answer, dict) else answer,
)
def test_what_is_odd_but_can_be_judged_is_judged(row_of, answer, status):
    row = row_of(answer)
    assert row["status"] == status
    assert "error" not in row


# Questions of a conversation


def test_the_next_turn_holds_the_answer_without_its_reasoning():
    first = Question.first(PROMPT)
    second = first.next_turn("\n\nA")
    third = second.next_turn("A2")
    assert third.messages == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "\n\nA"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "A2"},
        {"role": "user", "content": "Q3"},
    ]
    turns = (first, second, third)
    assert [turn.sample_id for turn in turns] == ["c7_gen0", "c7_gen1", "c7_gen2"]
    assert [turn.num_later for turn in turns] == [2, 1, 0]
    assert first.messages == PROMPT["messages"]  # as they were
    assert len(PROMPT["messages"]) == 2


@pytest.mark.parametrize(
    ("sample_id", "expected"),
    [("c7_gen0", "c7_gen1"), ("c7", "c7_gen1"), ("a_gen0_b", "a_gen0_b_gen1")],
)
def test_sample_ids_count_the_turns(sample_id, expected):
    question = Question.first(PROMPT | {"sample_id": sample_id}).next_turn("A")
    assert question.sample_id == expected


def test_the_row_of_a_later_turn_is_named_after_it(params, verifier):
    question = Question.first(PROMPT).next_turn("A")
    row = trace_of(answer_of(body()), question, params(), verifier)
    assert row["sample_id"] == "c7_gen1"
    assert row["messages"] == question.messages
    assert row["source"] == "test"


def test_the_request_says_every_value_that_decides(params):
    messages = PROMPT["messages"]
    assert request_body(messages, params().generate, 77) == {
        "messages": messages,
        "max_tokens": 77,
        **SAMPLING,
        "chat_template_kwargs": {"enable_thinking": True},
        "return_token_ids": True,
    }
    without_switch = request_body(messages, params(thinking_switch=None).generate, 77)
    assert without_switch["chat_template_kwargs"] == {}


# The key

ASKED = {
    "messages": PROMPT["messages"],
    "sampling": SAMPLING,
    "template_kwargs": {"enable_thinking": True},
}


def test_a_key_is_the_sha256_of_what_determines_the_answer(verifier):
    expected = {
        "messages": PROMPT["messages"],
        "sampling": SAMPLING,
        "thinking": {"enable_thinking": True},
        "model": "models/verifier",
        "weights": verifier.weights_fingerprint,
        "chat_template": "b" * 64,
        "tokenizer": "a" * 64,
    }
    canonical = orjson.dumps(expected, option=orjson.OPT_SORT_KEYS)
    key = hashlib.sha256(canonical).hexdigest()
    assert trace_key(**ASKED, verifier=verifier) == key


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q "}]},
        {"messages": [{"role": "user", "content": "S"}, {"role": "user", "content": "Q"}]},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "system", "content": "S"}]},
        {"messages": [{"role": "user", "content": "Q"}]},
        *({"sampling": SAMPLING | {name: 0.5}} for name in SAMPLING),
        {"sampling": SAMPLING | {"seed": 0}},
        {"template_kwargs": {"enable_thinking": False}},
        {"template_kwargs": {"thinking": True}},
        {"template_kwargs": {}},
    ],
)
def test_another_question_has_another_key(verifier, change):
    assert trace_key(**ASKED | change, verifier=verifier) != trace_key(**ASKED, verifier=verifier)


DETERMINE = {"model", "weights_fingerprint", "chat_template_sha256", "tokenizer_sha256"}


def test_of_the_verifier_only_what_determines_an_answer_changes_the_key(verifier):
    """Its model, weights, template and tokenizer; no id, size or name that was found beside it."""
    key = trace_key(**ASKED, verifier=verifier)
    change_it = {
        name
        for name, value in verifier.model_dump().items()
        if trace_key(
            **ASKED,
            verifier=verifier.model_copy(
                update={name: value + 1 if isinstance(value, int) else f"other {name}"}
            ),
        )
        != key
    }
    assert change_it == DETERMINE


def test_the_order_in_which_values_are_named_is_no_part_of_the_key(verifier):
    turned = {
        "messages": [{"content": m["content"], "role": m["role"]} for m in ASKED["messages"]],
        "sampling": dict(reversed(SAMPLING.items())),
    }
    assert trace_key(**ASKED | turned, verifier=verifier) == trace_key(**ASKED, verifier=verifier)


# When an answer is asked again

CUT_STATUSES = ["truncated_in_reasoning", "truncated_in_answer", "looping", "garbage"]
FOR_GOOD = sorted(set(Status) - {*CUT_STATUSES, "timed_out", "failed", "rejected_by_server"})


def stored_as(status: str, *, max_tokens: int, context: int, prompt: int, generated: int) -> Stored:
    verdict = Verdict(Status(status), None, prompt, generated, 0)
    place = Place(JOURNAL, 0, 1)
    return Stored(place, verdict, "Q_gen0", "test", "length", max_tokens, context, "", True)


RETRY = {"on_truncated": "retry", "retry_max_tokens": 768}


@pytest.mark.parametrize("now", [{}, RETRY, {"max_tokens": 100}])
def test_what_was_never_answered_is_asked_with_max_tokens(params, now):
    expected = now.get("max_tokens", 512)
    assert budget_of(None, params(**now)) == expected
    for status in ("timed_out", "failed"):
        then = {"max_tokens": 768, "context": 1024, "prompt": 0, "generated": 0}
        assert budget_of(stored_as(status, **then), params(**now)) == expected


@pytest.mark.parametrize("status", FOR_GOOD)
@pytest.mark.parametrize("now", [{}, {"max_tokens": 900}, {"context": 4096}, RETRY])
def test_an_answer_that_came_to_its_end_is_there_for_good(params, status, now):
    then = {"max_tokens": 512, "context": 1024, "prompt": 10, "generated": 100}
    assert budget_of(stored_as(status, **then), params(**now)) is None


@pytest.mark.parametrize(
    ("context_then", "now", "expected"),
    [
        (1024, {}, None),
        (1024, {"max_tokens": 900}, None),
        (1024, {"context": 1025}, 512),  # longer than the longest question there was
        (1024, {"context": 2048, **RETRY}, 512),
        (2048, {"context": 1024}, None),
        (0, {}, 512),  # stored before contexts were written down
    ],
)
def test_a_refused_question_is_asked_again_in_a_longer_context(params, context_then, now, expected):
    then = {"max_tokens": 512, "context": context_then, "prompt": 0, "generated": 0}
    assert budget_of(stored_as("rejected_by_server", **then), params(**now)) == expected


def cut(max_tokens: int, generated: int | None = None, context: int = 1024, prompt: int = 10):
    """How it was asked, and where it was cut: at max_tokens, unless told otherwise."""
    generated = max_tokens if generated is None else generated
    return {
        "max_tokens": max_tokens,
        "context": context,
        "prompt": prompt,
        "generated": generated,
    }


@pytest.mark.parametrize("status", CUT_STATUSES)
@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        # keep: only a larger max_tokens helps
        (cut(512), {}, None),
        (cut(512), {"max_tokens": 511}, None),
        (cut(512), {"max_tokens": 513}, 513),
        # retry: once more, with all there is
        (cut(512), RETRY, 768),
        (cut(768), RETRY, None),
        (cut(500), RETRY, 512),  # first as any question is asked, then with all there is
        (cut(600), RETRY, 768),
        (cut(512), RETRY | {"max_tokens": 600}, 600),
        (cut(900), RETRY, None),
        # back to keep, or to a smaller retry: what is there is more than one would get
        (cut(768), {}, None),
        (cut(768), RETRY | {"retry_max_tokens": 700}, None),
        (cut(768), RETRY | {"retry_max_tokens": 800}, 800),
        # the context cut it: more tokens would not fit
        (cut(512, generated=24, prompt=1000), {"max_tokens": 600}, None),
        (cut(512, generated=24, prompt=1000), RETRY, None),
        (cut(512, generated=24, prompt=1000), {}, None),
        (cut(512, generated=24, prompt=1000), {"context": 2048}, 512),
        (cut(512, generated=24, prompt=1000), {"context": 2048, **RETRY}, 768),
        (cut(512, generated=24, prompt=1000), {"context": 1025}, 25),  # what fits
        # a longer context is no help to what max_tokens cut
        (cut(512), {"context": 2048}, None),
        (cut(768), {"context": 2048, **RETRY}, None),
        (cut(512), {"context": 2048, **RETRY}, 768),
        # nobody knows how long it was (an import without usage)
        (cut(512, generated=0), {}, None),
        (cut(512, generated=0), {"max_tokens": 600}, 600),
        # nor is a shorter one
        (cut(512, context=2048), {}, None),
        (cut(512, context=2048), {"context": 600, "max_tokens": 599}, 590),
        (cut(512, context=2048), {"context": 520, "max_tokens": 519}, None),  # 510 fit
    ],
)  # fmt: skip
def test_a_cut_answer_is_asked_again_when_it_may_get_longer(params, status, then, now, expected):
    assert budget_of(stored_as(status, **then), params(**now)) == expected


# On disk


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/traces").mkdir(parents=True)
    Path("data/.stash").mkdir()


def judge(trace: dict) -> Verdict:
    """As stored."""
    return Verdict(Status(trace["status"]), None, 4, 5, 1)


def line(key: str, mark: str = "", **changes: object) -> bytes:
    """A stored row, spaced as no writer here spaces it: a row that is parsed and written again
    shows."""
    row = {
        "sample_id": f"{key}_gen0",
        "key": key,
        "status": "ok",
        "source": "test",
        "messages": [{"role": "user", "content": key}],
        "finish_reason": "stop",
        "token_ids": [1, 2, 3],
        "sampling": {"max_tokens": 512},
        "max_model_len": 1024,
        "mark": mark,
        "reasoning": "größer",
    }
    return json.dumps(row | changes, ensure_ascii=False, indent=None).encode() + b"\n"


def part(number: int) -> Path:
    return Path(f"data/traces/part-{number:05}.jsonl")


def put(path: Path, *lines: bytes) -> None:
    path.write_bytes(b"".join(lines))


def row(key: str, number: int = 0, **names: str) -> Row:
    return Row(number, key, **{"sample_id": f"{key}_gen0", "source": "test"} | names)


def fold_now(*rows: Row) -> None:
    fold(list(rows), load_stored(judge))


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True) if path.exists() else []


def files() -> dict[str, bytes]:
    """Every file under data/, by its path from there."""
    found = [path for path in Path("data").rglob("*") if path.is_file()]
    return {str(path.relative_to("data")): path.read_bytes() for path in found}


def marks(stored: dict[str, Stored]) -> dict[str, str]:
    return {key: read(answer.place)["mark"] for key, answer in stored.items()}


# loading


def test_nothing_stored_is_nothing():
    assert load_stored(judge) == {}


def test_an_appended_answer_can_be_read_where_it_lies(trace_of):
    rows = [trace_of("Q1", reasoning="größer"), trace_of("Q2"), trace_of("Q3")]
    put(JOURNAL, line("x"))
    with JOURNAL.open("ab") as journal:
        places = [append(journal, trace) for trace in rows]
        assert [read(place) for place in places] == rows  # flushed: a kill loses none
    assert JOURNAL.read_bytes().count(b"\n") == 4


def test_the_newest_of_stash_parts_and_journal_counts():
    put(STASH, line("a", "stash"), line("b", "stash"), line("c", "stash"), line("d", "stash"))
    put(part(0), line("b", "part 0"), line("c", "part 0"), line("e", "part 0"))
    put(part(1), line("c", "part 1"), line("d", "part 1"))
    put(JOURNAL, line("d", "first"), line("d", "second"))
    assert marks(load_stored(judge)) == {
        "a": "stash",
        "b": "part 0",
        "c": "part 1",
        "d": "second",
        "e": "part 0",
    }


@pytest.mark.parametrize("status", ["failed", "timed_out", "rejected_by_server", "aborted"])
def test_what_is_no_answer_never_takes_the_place_of_one(status):
    put(part(0), line("a", "answer"), line("b", "older", status="failed"))
    put(JOURNAL, line("a", "newer", status=status), line("b", "newer", status=status))
    assert marks(load_stored(judge)) == {"a": "answer", "b": "newer"}


@pytest.mark.parametrize("status", ["failed", "timed_out", "rejected_by_server", "aborted"])
@pytest.mark.parametrize("newer", ["ok", "truncated_in_reasoning", "empty_reasoning", "garbage"])
def test_any_answer_takes_the_place_of_none(status, newer):
    put(part(0), line("a", "older", status=status))
    put(JOURNAL, line("a", "newer", status=newer))
    assert marks(load_stored(judge)) == {"a": "newer"}


def test_answers_are_told_apart_by_the_present_judgement_and_not_the_stored_one():
    put(part(0), line("a", "part", status="failed"))
    put(JOURNAL, line("a", "journal", status="ok"))

    def turned(trace: dict) -> Verdict:
        status = Status.OK if trace["status"] == "failed" else Status.FAILED
        return Verdict(status, None, 0, 0, 0)

    assert marks(load_stored(turned)) == {"a": "part"}


def test_keep_is_what_loading_does():
    place = Place(JOURNAL, 0, 1)
    trace = json.loads(line("a"))
    ok, failed = (Stored.of(trace, judge({"status": s}), place) for s in ("ok", "failed"))
    stored: dict[str, Stored] = {}
    for answer in (failed, ok, failed):
        keep("a", answer, stored)
    assert stored == {"a": ok}


def test_stored_is_what_a_run_needs_to_know(trace_of):
    put(JOURNAL, line("a"), line("b", error="no luck", status="failed", finish_reason=None))
    first, second = load_stored(judge).values()
    assert first == Stored(
        place=Place(JOURNAL, 0, len(line("a"))),
        verdict=Verdict(Status.OK, None, 4, 5, 1),
        sample_id="a_gen0",
        source="test",
        finish_reason="stop",
        max_tokens=512,
        max_model_len=1024,
        error="",
        is_as_written=True,
    )
    assert second.place.offset == len(line("a"))
    assert (second.error, second.finish_reason) == ("no luck", None)


def test_rows_from_before_budgets_and_contexts_were_written_load():
    old = json.loads(line("a"))
    del old["max_model_len"], old["sampling"]["max_tokens"]
    put(part(0), orjson.dumps(old) + b"\n")
    answer = load_stored(judge)["a"]
    assert (answer.max_tokens, answer.max_model_len) == (0, 0)


@pytest.mark.parametrize("torn", [b"{", line("c")[:-1], line("c")[:20], b'{"key": "gr\xc3'])
def test_a_torn_last_line_of_the_journal_is_dropped(torn):
    put(JOURNAL, line("a"), line("b"), torn)
    assert list(load_stored(judge)) == ["a", "b"]
    with JOURNAL.open("ab") as journal:
        append(journal, json.loads(line("d")))
    assert list(load_stored(judge)) == ["a", "b", "d"]


def test_a_journal_of_a_torn_line_alone_is_empty():
    put(JOURNAL, b'{"key"')
    assert load_stored(judge) == {}
    assert JOURNAL.read_bytes() == b""


def test_a_whole_journal_is_left_alone():
    put(JOURNAL, line("a"), line("b"))
    load_stored(judge)
    assert JOURNAL.read_bytes() == line("a") + line("b")


@pytest.mark.parametrize("path", [STASH, part(0), JOURNAL])
def test_a_line_that_is_no_json_is_named(path):
    put(path, line("a"), b"{...\n", line("b"))
    with pytest.raises(DataError, match=f"{path} holds a line that is no JSON"):
        load_stored(judge)


# folding


def test_parts_are_in_the_order_of_the_rows():
    put(JOURNAL, *(line(key) for key in "abcde"))
    fold_now(row("e"), row("b"), row("d"), row("a", 1), row("c", 1))
    assert files() == {
        "traces/part-00000.jsonl": line("e") + line("b") + line("d"),
        "traces/part-00001.jsonl": line("a") + line("c"),
    }


def test_what_is_not_wanted_is_set_aside_and_comes_back_byte_for_byte():
    put(JOURNAL, *(line(key) for key in "abcd"))
    fold_now(*map(row, "abcd"))
    before = files()
    fold_now(*map(row, "db"))
    assert lines_of(part(0)) == [line("d"), line("b")]
    assert sorted(lines_of(STASH)) == [line("a"), line("c")]
    fold_now(*map(row, "abcd"))
    assert files() == before


def test_a_stashed_row_keeps_its_names():
    put(JOURNAL, line("a", sample_id="earlier_gen0", source="earlier"), line("b"))
    fold_now(row("b"))
    assert lines_of(STASH) == [line("a", sample_id="earlier_gen0", source="earlier")]


def test_a_part_that_is_left_without_rows_goes():
    put(part(0), line("a"))
    put(part(1), line("b"))
    put(part(7), line("c"))
    fold_now(row("a"), row("b"))
    assert files() == {
        "traces/part-00000.jsonl": line("a") + line("b"),
        ".stash/traces.jsonl": line("c"),
    }


def test_nothing_wanted_stashes_all():
    put(part(0), line("a"))
    put(JOURNAL, line("b"))
    fold_now()
    assert files() == {".stash/traces.jsonl": line("a") + line("b")}


def untouched(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns


def test_a_file_that_stays_the_same_is_not_written():
    put(part(0), line("a"), line("b"))
    put(part(1), line("c"))
    put(STASH, line("x"))
    put(JOURNAL, line("d"))
    kept = [part(0), STASH]
    before = [untouched(path) for path in kept]
    moved = untouched(part(1))
    fold_now(row("a"), row("b"), row("c", 1), row("d", 1))
    assert [untouched(path) for path in kept] == before
    assert untouched(part(1)) != moved
    assert lines_of(part(1)) == [line("c"), line("d")]


def test_folding_twice_changes_nothing():
    put(JOURNAL, *(line(key) for key in "abc"))
    rows = [row("a"), row("b", 1)]
    fold_now(*rows)
    before = files()
    stats = [untouched(path) for path in (part(0), part(1), STASH)]
    fold_now(*rows)
    assert files() == before
    assert [untouched(path) for path in (part(0), part(1), STASH)] == stats


@pytest.mark.parametrize("path", [part(0), STASH, JOURNAL])
def test_a_row_with_another_status_is_rewritten_in_that_field_alone(path):
    put(path, line("a", status="looping"), line("b"))

    def as_ok(trace: dict) -> Verdict:
        return Verdict(Status.OK, None, 4, 5, 1)

    wanted = [] if path == STASH else [row("a"), row("b")]
    fold(wanted, load_stored(as_ok))
    first, second = lines_of(STASH if path == STASH else part(0))
    assert list(json.loads(first).items()) == list(json.loads(line("a")).items())
    assert second == line("b")


def test_a_row_has_the_name_and_source_of_its_present_prompt():
    put(part(0), line("a"), line("b"))
    fold_now(row("a", sample_id="c9_gen2"), row("b", source="elsewhere"))
    first, second = (json.loads(each) for each in lines_of(part(0)))
    assert first == json.loads(line("a", sample_id="c9_gen2"))
    assert second == json.loads(line("b", source="elsewhere"))


MOVES = {
    "part to part": ([], ["ab", "cd"], "", ["cd", "ab"]),
    "part to an earlier one": ([], ["ab", "cd"], "", ["abc", "d"]),
    "part to a later one": ([], ["abc", "d"], "", ["a", "bcd"]),
    "part to stash": ([], ["ab", "cd"], "", ["ac"]),
    "stash to part": ("ab", ["cd"], "", ["abcd"]),
    "both at once": ("ab", ["cd", "ef"], "gh", ["ga", "ce", "h"]),
    "out of a part that goes": ([], ["ab", "cd"], "", ["dcba"]),
    "all aside": ([], ["ab", "cd"], "e", []),
    "all back": ("abcd", [], "e", ["ab", "cde"]),
    "reordered within a part": ([], ["abcd"], "", ["dbca"]),
    "from the journal alone": ([], [], "abcd", ["ba", "dc"]),
}  # stash, parts and journal before; parts after


def lay_out(stash: str, parts: list[str], journal: str) -> None:
    if stash:
        put(STASH, *(line(key, "1") for key in stash))
    for number, keys in enumerate(parts):
        put(part(number), *(line(key, "1") for key in keys))
    if journal:
        put(JOURNAL, *(line(key, "1") for key in journal))


def rows_of(parts: list[str]) -> list[Row]:
    return [row(key, number) for number, keys in enumerate(parts) for key in keys]


@pytest.mark.parametrize(("stash", "parts", "journal", "after"), MOVES.values(), ids=MOVES.keys())
def test_rows_move_between_files(stash, parts, journal, after):
    lay_out(stash, parts, journal)
    everything = set(stash) | set("".join(parts)) | set(journal)
    fold_now(*rows_of(after))
    expected = {f"traces/part-{number:05}.jsonl": keys for number, keys in enumerate(after)}
    found = files()
    aside = found.pop(".stash/traces.jsonl", b"")
    assert found == {
        name: b"".join(line(key, "1") for key in keys) for name, keys in expected.items()
    }
    left = everything - set("".join(after))
    assert sorted(aside.splitlines(keepends=True)) == sorted(line(key, "1") for key in left)


def test_of_two_rows_of_one_key_the_newest_is_left():
    put(STASH, line("a", "1"), line("b", "1"))
    put(part(0), line("a", "2"), line("c", "2"))
    put(JOURNAL, line("c", "3"), line("b", "3", status="failed"), line("c", "4", status="aborted"))
    fold_now(row("a"), row("b"), row("c"))
    assert files() == {
        "traces/part-00000.jsonl": line("a", "2") + line("b", "1") + line("c", "3"),
    }


# interrupted


def interrupted(rows: list[Row], step: int, how: str, monkeypatch) -> bool:
    """Fold, and be interrupted before the step-th thing that is done to a file; False if there is
    no such step. `how` is kill (nothing more is done, no `finally`, no flush) or raise."""
    count = 0

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == step:
                if how == "kill":
                    os._exit(9)
                raise OSError(28, "No space left on device")
            return function(*args, **kwargs)

        return call

    def work() -> None:
        stored = load_stored(judge)
        with monkeypatch.context() as patch:
            for name in ("replace", "fsync"):
                patch.setattr(os, name, counted(getattr(os, name)))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            patch.setattr(traces, "_line", counted(traces._line))
            fold(rows, stored)

    if how == "raise":
        try:
            work()
        except OSError:
            return True
        return False
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), "the fold itself failed"
    return status == 9


@pytest.mark.parametrize("how", ["kill", "raise"])
@pytest.mark.parametrize("then", ["the same", "as before"])
@pytest.mark.parametrize(("stash", "parts", "journal", "after"), MOVES.values(), ids=MOVES.keys())
def test_nothing_is_lost_wherever_a_fold_is_interrupted(
    monkeypatch, tmp_path, stash, parts, journal, after, then, how
):
    """…and the next fold, of the same rows or of those before, leaves each key once."""
    everything = dict.fromkeys([*stash, *"".join(parts), *journal], "1")
    next_rows = rows_of(after if then == "the same" else parts)
    step = 1
    while True:
        world = tmp_path / f"step {step}"
        for folder in ("data/traces", "data/.stash"):
            (world / folder).mkdir(parents=True)
        monkeypatch.chdir(world)
        lay_out(stash, parts, journal)
        if not interrupted(rows_of(after), step, how, monkeypatch):
            break
        assert marks(load_stored(judge)) == everything, f"lost at step {step}"
        fold_now(*next_rows)
        after_all = {name: data for name, data in files().items() if not name.endswith(".tmp")}
        found = [orjson.loads(each) for data in after_all.values() for each in data.splitlines()]
        assert sorted(each["key"] for each in found) == sorted(everything), f"at step {step}"
        in_parts = [json.loads(each)["key"] for n in range(3) for each in lines_of(part(n))]
        assert in_parts == [wanted.key for wanted in next_rows]
        assert "traces/journal.jsonl" not in after_all
        step += 1
    assert step > 3, "nothing was interrupted"


@pytest.mark.parametrize("seed", range(6))
def test_a_long_life_of_kills_loses_nothing(monkeypatch, seed):
    """New answers, failures, other params and kills in any order: the newest answer stays."""
    chance = random.Random(seed)
    newest: dict[str, tuple[str, str]] = {}  # key → mark, status
    for number in range(40):
        load_stored(judge)
        with JOURNAL.open("ab") as journal:
            for key in chance.sample("abcdefgh", chance.randint(0, 3)):
                status = chance.choice(["ok", "ok", "looping", "failed", "aborted"])
                append(journal, json.loads(line(key, str(number), status=status)))
                is_answer = status in ("ok", "looping")
                if is_answer or newest.get(key, ("", "failed"))[1] in ("failed", "aborted"):
                    newest[key] = (str(number), status)
        keys = chance.sample(sorted(newest), chance.randint(0, len(newest)))
        rows = [row(key, place // 3) for place, key in enumerate(keys)]
        step = chance.randint(1, 30)
        was_killed = interrupted(rows, step, "kill", monkeypatch)
        expected = {key: mark for key, (mark, _) in newest.items()}
        assert marks(load_stored(judge)) == expected, f"lost in round {number}"
        if not was_killed:
            found = [
                json.loads(each)
                for name, data in files().items()
                for each in data.splitlines()
                if not name.endswith(".tmp")
            ]
            assert sorted(each["key"] for each in found) == sorted(newest)
            assert {each["key"]: each["mark"] for each in found} == expected


def test_what_a_killed_fold_was_writing_is_swept_away():
    """data/traces is an output of DVC, which would take it along for ever."""
    put(part(0), line("a"))
    put(part(1).with_name("part-00001.jsonl.tmp"), line("b")[:30])
    fold_now(row("a"))
    assert files() == {"traces/part-00000.jsonl": line("a")}


# forgetting


def test_forgotten_answers_leave_the_journal_for_the_file_named():
    put(JOURNAL, line("a"), line("b"), line("a", "newer"), line("c"))
    put(FAILED_GATE, line("x"))
    forget(lambda trace: trace["key"] in {"a", "c"}, keep_in=FAILED_GATE)
    assert lines_of(JOURNAL) == [line("b")]
    assert lines_of(FAILED_GATE) == [line("x"), line("a"), line("a", "newer"), line("c")]


def test_forgotten_answers_are_gone_when_no_file_is_named():
    put(JOURNAL, line("a"), line("b"))
    put(part(0), line("a", "part"))
    forget(lambda trace: trace["key"] == "a")
    assert files() == {
        "traces/journal.jsonl": line("b"),
        "traces/part-00000.jsonl": line("a", "part"),
    }
    assert marks(load_stored(judge)) == {"a": "part", "b": ""}


def test_the_folder_of_the_file_named_is_made():
    FAILED_GATE.parent.rmdir()
    put(JOURNAL, line("a"))
    forget(lambda trace: trace["key"] == "a", keep_in=FAILED_GATE)
    assert lines_of(FAILED_GATE) == [line("a")]


def test_answers_that_a_gate_rejected_are_no_answers():
    put(FAILED_GATE, line("a"))
    assert load_stored(judge) == {}


# memory


def test_what_is_remembered_of_an_answer_does_not_grow_with_it(trace_of):
    sizes = []
    for length in (10, 100_000):
        trace = trace_of(
            "Q" * length,
            [65] * length,
            prompt=[65] * length,
            reasoning="R" * length,
            content="A" * length,
            tool_calls=["x" * length],
            sample_id="s",
        )
        stored = Stored.of(trace, judge(trace), Place(JOURNAL, 0, 1))
        sizes.append(len(pickle.dumps(stored)))
    assert sizes[0] == sizes[1]


def test_loading_and_folding_hold_few_rows_at_a_time():
    keys = [f"k{number}" for number in range(100)]
    with JOURNAL.open("wb") as journal:
        for key in keys:
            journal.write(line(key, "x" * 200_000))
    assert JOURNAL.stat().st_size > 20_000_000
    tracemalloc.start()
    try:
        stored = load_stored(judge)
        fold([row(key, place // 50) for place, key in enumerate(keys[::-1][:90])], stored)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert len(lines_of(part(0))) == 50
