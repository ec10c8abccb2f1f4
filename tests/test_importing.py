"""`generate --import`: which rows are taken in, as what, and what becomes of them."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from pipeline import generate
from pipeline.errors import DataError
from pipeline.importing import USABLE, ImportRejection, import_file
from pipeline.params import line_of
from pipeline.records import Status
from tests.conftest import ROOT
from tests.fake_server import END, THINK, THINK_END, ids, prompt_ids

BOM = b"\xef\xbb\xbf"
QUESTIONS = ["Q1", "Q2", "Q3", "Q4", "Q5", "Q6"]
FILE = Path("answers.jsonl")
REJECTED = Path("logs/import.rejected.jsonl")
SAMPLING = {
    **{"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
}
THINKING = {"enable_thinking": True}
CLOSED = [THINK, *ids("because"), THINK_END, *ids("42"), END]


def user(question: str) -> list[dict]:
    return [{"role": "user", "content": question}]


def good(question: str = "Q1", **more: object) -> dict:
    """A row of the simplest kind."""
    row = {"messages": user(question), "reasoning": "because", "content": "42"}
    return row | {"finish_reason": "stop"} | more


def inside(question: str = "Q1", finish: str = "stop", **answer: object) -> dict:
    """A row whose answer is its last turn."""
    turns = [*user(question), {"role": "assistant", **answer}]
    return {"messages": turns, "finish_reason": finish}


def take_in(*rows: object) -> None:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    FILE.write_bytes(b"".join(line + b"\n" for line in lines))
    import_file(FILE)


def journal(project) -> list[dict]:
    return project.rows("data/traces/journal.jsonl")


def rejected() -> list[dict]:
    return [json.loads(line) for line in REJECTED.read_bytes().splitlines()]


def key_of(verifier, messages: list[dict], thinking=THINKING, **sampling: object) -> str:
    """The key of a live answer, by its definition."""
    determines = {
        "messages": messages,
        "sampling": SAMPLING | sampling,
        "thinking": thinking,
        "model": verifier.model,
        "weights": verifier.weights_fingerprint,
        "chat_template": verifier.chat_template_sha256,
        "tokenizer": verifier.tokenizer_sha256,
    }
    return hashlib.sha256(orjson.dumps(determines, option=orjson.OPT_SORT_KEYS)).hexdigest()


# what is taken in


def test_a_row_becomes_what_an_answer_of_the_server_becomes(project, verifier):
    take_in(good(prompt_token_ids=prompt_ids(user("Q1")), token_ids=CLOSED))
    [row] = journal(project)
    named = row.pop("sample_id")
    assert named.endswith("_gen0")
    assert row == {
        "key": key_of(verifier, user("Q1")),
        "status": "ok",
        "source": "import",
        "messages": user("Q1"),
        "reasoning": "because",
        "content": "42",
        "imported": True,
        "finish_reason": "stop",
        "prompt_token_ids": prompt_ids(user("Q1")),
        "token_ids": CLOSED,
        # counted, since nobody said; "Q1" is 5 tokens with the three of its template
        "usage": {"prompt_tokens": 5, "completion_tokens": 12},
        "sampling": {**SAMPLING, "max_tokens": 512},
        "max_model_len": 1024,
        "attempts": 1,
        "server_version": "unknown",
    }


@pytest.mark.parametrize(
    ("row", "status", "kept"),
    [
        (good(), "ok", {"reasoning": "because", "content": "42"}),
        (good(reasoning=None, reasoning_content="R"), "ok", {"reasoning": "R", "content": "42"}),
        (inside(reasoning="R", content="A"), "ok", {"reasoning": "R", "content": "A"}),
        (inside(reasoning_content="R", content="A"), "ok", {"reasoning": "R", "content": "A"}),
        # half inside, half beside; of both, what stands beside
        (inside(content="A") | {"reasoning": "R"}, "ok", {"reasoning": "R", "content": "A"}),
        (inside(content="A", reasoning="x") | {"reasoning": "R"}, "ok",
         {"reasoning": "R", "content": "A"}),
        # a null beside says nothing about what stands inside (a table with empty columns)
        (inside(content="A", reasoning="R") | {"reasoning": None, "content": None}, "ok",
         {"reasoning": "R", "content": "A"}),
        # no parser split it (A4, A5)
        (inside(content=" R </think> A"), "ok",
         {"reasoning": " R ", "content": " A", "unsplit": True}),
        (inside(content="<think>\nR\n</think>\n\nA"), "ok",
         {"reasoning": "\nR\n", "content": "\n\nA", "unsplit": True}),
        # cut (A6), and worse
        (good(finish_reason="length", content=None), "truncated_in_reasoning",
         {"reasoning": "because", "content": None}),
        (good(finish_reason="length"), "truncated_in_answer",
         {"reasoning": "because", "content": "42"}),
        (good("Q1 /no_think", reasoning=None), "thinking_off_by_user",
         {"reasoning": None, "content": "42"}),
        # ids alone are an answer, and decide
        ({"messages": user("Q1"), "token_ids": CLOSED, "finish_reason": "stop",
          "prompt_token_ids": prompt_ids(user("Q1"))}, "ok", {}),
    ],
)  # fmt: skip
def test_each_kind_of_row(project, row, status, kept):
    take_in(row)
    [stored] = journal(project)
    fields = ("reasoning", "content", "unsplit")
    assert {name: stored[name] for name in fields if name in stored} == kept
    assert stored["status"] == status
    assert stored["messages"][-1]["role"] == "user"
    assert stored["imported"] is True
    assert rejected() == []


@pytest.mark.parametrize(
    ("token_ids", "finish", "status"),
    [
        (CLOSED, "stop", "ok"),
        (CLOSED[:-1], "length", "truncated_in_answer"),
        (CLOSED[:4], "length", "truncated_in_reasoning"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"finish_reason": None}], ids=["absent", "null"])
def test_the_last_token_tells_whether_it_was_cut(project, token_ids, finish, status, given):
    row = good(prompt_token_ids=prompt_ids(user("Q1")), token_ids=token_ids)
    del row["finish_reason"]
    take_in(row | given)
    [stored] = journal(project)
    assert (stored["finish_reason"], stored["status"]) == (finish, status)


def test_what_a_row_says_of_itself_is_kept(project):
    take_in(
        good(
            sample_id="c7_gen0",
            source="old run",
            server_version="0.19.0",
            usage={"prompt_tokens": 4, "completion_tokens": 9, "reasoning_tokens": 6},
            sampling={"max_tokens": 300},
        )
    )
    [row] = journal(project)
    assert (row["sample_id"], row["source"]) == ("c7_gen0", "old run")
    assert row["server_version"] == "0.19.0"
    assert row["usage"] == {"prompt_tokens": 4, "completion_tokens": 9, "reasoning_tokens": 6}
    assert row["sampling"] == {**SAMPLING, "max_tokens": 300}


def test_earlier_turns_are_sent_turns_without_their_reasoning(project, verifier):
    said = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A", "reasoning": "R"},
        {"role": "user", "content": "Q2", "name": "me"},
    ]
    take_in(good() | {"messages": said})
    [row] = journal(project)
    assert row["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "A"},
        {"role": "user", "content": "Q2"},
    ]
    assert row["key"] == key_of(verifier, row["messages"])


# keys


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"sampling": {}, "thinking": True, "model": "models/verifier"},
        {"sampling": SAMPLING},
        {"sampling": {"max_tokens": 77}},  # only bounds the answer
        # as JSON from elsewhere has it: whole numbers, nulls for what is not known
        {"sampling": {"temperature": 0, "top_p": 1, "top_k": 0}},
        {"sampling": {"top_k": 0.0, "presence_penalty": 0}},
        {"sampling": None},
        {"sampling": {"temperature": None, "max_tokens": None}},
        {"thinking": None},
        {"model": None},
    ],
)
def test_what_a_row_does_not_say_params_say(project, verifier, said):
    take_in(good(**said))
    assert rejected() == []
    [row] = journal(project)
    assert row["key"] == key_of(verifier, user("Q1"))
    # numbers that a later run compares and counts with
    assert row["sampling"]["max_tokens"] == (
        77 if said == {"sampling": {"max_tokens": 77}} else 512
    )


def test_other_params_are_other_keys(project, verifier):
    project.set(**{"generate.temperature": 0.6, "generate.thinking_switch": None})
    take_in(good())
    [row] = journal(project)
    assert row["key"] == key_of(verifier, user("Q1"), {}, temperature=0.6)


@pytest.mark.parametrize(
    ("said", "thinking", "sampling"),
    [
        ({"sampling": {"temperature": 0.6}}, THINKING, {"temperature": 0.6}),
        ({"sampling": {"top_k": 20, "seed": 1}}, THINKING, {"top_k": 20, "seed": 1}),
        ({"thinking": False, "reasoning": None}, {"enable_thinking": False}, {}),
    ],
)
def test_an_answer_made_otherwise_has_the_key_of_that(project, verifier, said, thinking, sampling):
    take_in(good(**said))
    [row] = journal(project)
    assert row["key"] == key_of(verifier, user("Q1"), thinking, **sampling)
    for name, value in sampling.items():
        assert row["sampling"][name] == value


# what is not taken in


REJECTIONS = {
    "not_json": [b"{", b"{'messages': []}", b'{"x": NaN}', b"\xff\xfe", b'{"a": 1} {"b": 2}'],
    "bad_shape": [
        *([1], "text", None, 7, {}),
        {"messages": None},
        {"messages": "Q1"},
        {"messages": ["Q1"]},
        {"messages": [{"content": "Q1"}]},
        {"messages": [{"role": 1, "content": "Q1"}]},
        good() | {"messages": [{"role": "user"}]},
        good() | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Q1"}]}]},
        good(content=["42"]),
        good(content=42),
        good(reasoning={"text": "because"}),
        inside(content=[{"type": "text", "text": "42"}]),
        good(sampling=[0.6]),
        good(sampling="greedy"),
        good(sampling={"max_tokens": "512"}),
        good(sampling={"temperature": "hot"}),
        good(sampling={"max_tokens": True}),
        good(sampling={"max_tokens": 0}),
        good(sampling={"max_tokens": 0.5}),
        good(sampling={"max_tokens": -1}),
        # beyond what every reader of JSON keeps exact
        good(sampling={"seed": 2**53}),
        good(sampling={"seed": -(2**53)}),
        good(sampling={"max_tokens": 2**63}),
        good(sampling={"temperature": 1e300}),
        good(thinking="false"),  # A9
        good(thinking=0),
        good(token_ids=["1"]),
        good(token_ids=[1.0]),
        good(token_ids=[256]),  # beyond the vocabulary: of another model
        good(prompt_token_ids=[-1]),
        good(usage=[1]),
    ],
    "no_question": [
        good() | {"messages": []},
        good() | {"messages": [{"role": "system", "content": "S"}]},
        good() | {"messages": [{"role": "assistant", "content": "42"}]},
        good() | {"messages": [*user("Q1"), *[{"role": "assistant", "content": "42"}] * 2]},
    ],
    "other_model": [good(model="other/model"), good(model=1)],
    "no_finish_reason": [
        {name: value for name, value in good().items() if name != "finish_reason"},
        good(finish_reason=None),
        good(finish_reason=None, token_ids=[]),
        good(finish_reason=7),
    ],
    "no_text": [
        good(reasoning=None, content=None),
        good(reasoning="", content=" \n"),
        inside(),
        good(reasoning=None, content=None, finish_reason="abort"),
        # ids that say nothing without those of the prompt
        good(reasoning=None, content=None, token_ids=CLOSED),
    ],
    # what is of no use says what it is
    "empty_reasoning": [
        good(reasoning=""),
        good(reasoning=" \n"),
        good(reasoning=None),
        inside(content="42"),
        inside(content="<think></think>42"),
        # ids decide, whatever the text says
        good(prompt_token_ids=prompt_ids(user("Q1")), token_ids=[*ids("42"), END]),
    ],
    "parser_conflict": [good(content=None), good(content=" ")],
    "empty_answer": [
        {"messages": user("Q1"), "finish_reason": "stop",
         "prompt_token_ids": prompt_ids(user("Q1")),
         "token_ids": [THINK, *ids("because"), THINK_END, END]},
    ],
    "unclosed_reasoning": [
        {"messages": user("Q1"), "finish_reason": "stop",
         "prompt_token_ids": prompt_ids(user("Q1")),
         "token_ids": [THINK, *ids("because"), END]},
    ],
    "looping": [
        {"messages": user("Q1"), "finish_reason": "length",
         "token_ids": [THINK, *ids("so ab" * 60)],
         "prompt_token_ids": prompt_ids(user("Q1"))},
    ],
    "garbage": [
        {"messages": user("Q1"), "finish_reason": "length", "token_ids": [THINK, *ids("!" * 300)],
         "prompt_token_ids": prompt_ids(user("Q1"))},
    ],
    "aborted": [
        good(finish_reason="abort"),
        good(finish_reason="error"),
        good(finish_reason=""),
        good(finish_reason="abort", token_ids=CLOSED),
    ],
    "tool_call": [
        inside(content="42", reasoning="R", tool_calls=[{"function": {"name": "f"}}]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "row"), [(reason, row) for reason, rows in REJECTIONS.items() for row in rows]
)
def test_each_reason_not_to_take_a_row_in(project, reason, row):
    take_in(good("Q1"), row, good("Q3"))
    assert rejected() == [{"row": 2, "reason": reason}]
    assert [each["messages"][0]["content"] for each in journal(project)] == ["Q1", "Q3"]


def test_every_reason_has_a_row_above_or_below():
    never_imported = {"rejected_by_server", "timed_out", "failed"}  # of requests
    statuses = set(Status) - USABLE - never_imported
    assert {*REJECTIONS, "already_there"} == {*ImportRejection, *statuses}


def test_an_answer_that_is_there_is_not_taken_in_again(project):
    take_in(good("Q1"), good("Q2"), good("Q1", content="43"))
    assert rejected() == [{"row": 3, "reason": "already_there"}]
    before = project.bytes("data/**/*")
    take_in(good("Q2", content="44"), good("Q3"))
    assert rejected() == [{"row": 1, "reason": "already_there"}]
    assert [row["content"] for row in journal(project)] == ["42", "42", "42"]
    take_in(good("Q1"), good("Q2"), good("Q3"))
    assert [row["reason"] for row in rejected()] == ["already_there"] * 3
    assert project.bytes("data/prompts/*", "data/*.json").items() <= before.items()


@pytest.mark.parametrize("status", ["failed", "timed_out", "rejected_by_server", "aborted"])
def test_a_question_that_was_asked_in_vain_is_answered(project, verifier, trace_of, status):
    key = key_of(verifier, user("Q1"))
    vain = trace_of("Q1", [], "abort" if status == "aborted" else None, key=key, status=status)
    Path("data/traces").mkdir()
    Path("data/traces/part-00000.jsonl").write_bytes(json.dumps(vain).encode() + b"\n")
    take_in(good("Q1"))
    assert rejected() == []
    assert [row["content"] for row in journal(project)] == ["42"]


@pytest.mark.parametrize("where", ["data/traces/part-00000.jsonl", "data/.stash/traces.jsonl"])
def test_an_answer_of_the_server_is_not_replaced(project, verifier, trace_of, where):
    path = Path(where)
    path.parent.mkdir(parents=True)
    there = json.dumps(trace_of("Q1", key=key_of(verifier, user("Q1")))).encode() + b"\n"
    path.write_bytes(there)
    take_in(good("Q1"))
    assert rejected() == [{"row": 1, "reason": "already_there"}]
    assert path.read_bytes() == there


# what is said


def test_the_counts_add_up(project, capsys):
    take_in(
        *(good("Q1"), good("Q2"), good("Q3", finish_reason="length"), good("Q4", reasoning="")),
        *(b"{", b"{", good(model="x"), good("Q1")),
    )
    said, ids = capsys.readouterr().out.splitlines()
    key = f"params.yaml:{line_of('reassemble.source')} reassemble.source: ids"
    assert ids == (
        f"3 have no token ids: they train once {key} is ids_else_text (or text), and are not "
        "asked again"
    )
    assert said == (
        "8 rows: 3 taken in (2 ok, 1 truncated_in_answer), 5 rejected (1 empty_reasoning, "
        "2 not_json, 1 other_model, 1 already_there); `make repro` puts those to use that answer "
        "its questions"
    )
    assert rejected() == [
        {"row": 4, "reason": "empty_reasoning"},
        {"row": 5, "reason": "not_json"},
        {"row": 6, "reason": "not_json"},
        {"row": 7, "reason": "other_model"},
        {"row": 8, "reason": "already_there"},
    ]
    assert len(journal(project)) == 3


@pytest.mark.parametrize("source", ["text", "ids_else_text"])
def test_rows_without_ids_are_rebuilt_where_text_does(project, capsys, source):
    project.set(**{"reassemble.source": source})
    take_in(good("Q1"), good("Q2", prompt_token_ids=prompt_ids(user("Q2")), token_ids=CLOSED))
    *_, said = capsys.readouterr().out.splitlines()
    assert said == (
        "1 have no token ids: they are rebuilt from their text, and are not asked again"
    )


def test_ids_without_those_of_the_prompt_count_as_none(project, capsys):
    """The template may have opened the think block, which only the prompt's ids would show."""
    take_in(good("Q1", token_ids=CLOSED[1:]), good("Q2", token_ids=CLOSED))
    assert [row["status"] for row in journal(project)] == ["ok", "ok"]
    assert "2 have no token ids" in capsys.readouterr().out


def test_blank_lines_are_no_rows_and_keep_the_numbers_of_the_lines(project, capsys):
    take_in(b"", good("Q1"), b" \t", b"{", b"\r")
    assert "2 rows: 1 taken in (1 ok), 1 rejected (1 not_json)" in capsys.readouterr().out
    assert rejected() == [{"row": 4, "reason": "not_json"}]


def test_a_byte_order_mark_before_the_first_row_is_ignored(project):
    take_in(BOM + json.dumps(good("Q1")).encode(), good("Q2"))
    assert rejected() == []
    assert [row["messages"] for row in journal(project)] == [user("Q1"), user("Q2")]


def test_numbers_up_to_2_to_the_53_are_kept_exactly(project, verifier):
    take_in(good(sampling={"seed": 2**53 - 1}))
    [row] = journal(project)
    assert row["sampling"]["seed"] == 9007199254740991
    assert row["key"] == key_of(verifier, user("Q1"), seed=9007199254740991)


@pytest.mark.parametrize("row", [good(reasoning=""), good(content=None), good(finish_reason="x")])
def test_what_is_of_no_use_does_not_take_the_place_of_a_good_row_after_it(project, row):
    take_in(row, good("Q1"))
    assert [each["status"] for each in journal(project)] == ["ok"]
    assert [each["row"] for each in rejected()] == [1]


def test_an_empty_file_is_no_rows(project, capsys):
    take_in()
    assert "0 rows: 0 taken in (none), 0 rejected (none)" in capsys.readouterr().out
    assert rejected() == []


def test_the_list_is_that_of_the_last_import(project):
    take_in(b"{")
    take_in(good())
    assert rejected() == []


@pytest.mark.parametrize(
    ("path", "said"), [("nowhere.jsonl", "No such file"), ("data", "Is a directory")]
)
def test_a_file_that_cannot_be_read_is_one_clear_line(project, path, said):
    with pytest.raises(DataError, match=f"{path}: {said}"):
        import_file(Path(path))
    assert not Path("data/traces/journal.jsonl").exists()


@pytest.mark.parametrize(
    ("file", "code", "said"),
    [("answers.jsonl", 0, "1 rows: 1 taken in"), ("nowhere.jsonl", 1, "nowhere.jsonl: No such")],
)
def test_the_command_line_takes_a_file(project, file, code, said):
    FILE.write_text(json.dumps(good()) + "\n", encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "pipeline.generate", "--import", file],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == code
    assert said in (ended.stderr if code else ended.stdout)


# what becomes of it


@pytest.mark.parametrize("source", ["ids", "text", "ids_else_text"])
def test_imported_answers_alone_are_a_run_without_a_server(project, source):
    project.set(**{"reassemble.source": source})
    take_in(*(good(question, content=f"{question}!") for question in QUESTIONS[::-1]))
    generate.main()
    rows = project.rows()
    assert [row["content"] for row in rows] == [f"{question}!" for question in QUESTIONS]
    assert [row["sample_id"] for row in rows] == [f"{question}_gen0" for question in QUESTIONS]
    assert {row["source"] for row in rows} == {"test"}  # that of the prompt
    assert not Path("data/traces/journal.jsonl").exists()
    assert not Path("data/.stash/traces.jsonl").exists()


def test_answers_made_otherwise_wait_in_the_stash_until_they_are_wanted(project):
    rows = [good(question) for question in QUESTIONS]
    hot = [good(question, sampling={"temperature": 0.6}) for question in QUESTIONS]
    off = [good(question, thinking=False, reasoning=None) for question in QUESTIONS]
    unasked = [good("Q7")]
    take_in(*rows, *hot, *off, *unasked)
    generate.main()
    assert {row["sampling"]["temperature"] for row in project.rows()} == {0.0}
    assert len(project.rows("data/.stash/traces.jsonl")) == 13
    project.set(**{"generate.temperature": 0.6})
    generate.main()  # no server there: all is
    assert [row["sampling"]["temperature"] for row in project.rows()] == [0.6] * 6
    project.set(**{"generate.temperature": 0.0, "generate.thinking": False})
    generate.main()
    assert [row["reasoning"] for row in project.rows()] == [None] * 6
    assert {row["status"] for row in project.rows()} == {"ok"}
    assert len(project.rows("data/.stash/traces.jsonl")) == 13


def test_the_next_run_asks_only_what_was_not_imported(project, server):
    take_in(good("Q2"), good("Q5"))
    generate.main()
    assert {"Q2", "Q5"}.isdisjoint(server.questions)
    assert {"Q1", "Q3", "Q4", "Q6"} <= set(server.questions)
    imported = [row["sample_id"] for row in project.rows() if row.get("imported")]
    assert imported == ["Q2_gen0", "Q5_gen0"]
    assert len(project.rows()) == 6
    server.bodies.clear()
    generate.main()
    assert server.bodies == []


def test_a_cut_import_is_asked_again_with_more(project, server):
    take_in(good("Q2", finish_reason="length", content=None, sampling={"max_tokens": 300}))
    generate.main()
    assert "Q2" in server.questions
    assert not any(row.get("imported") for row in project.rows())
