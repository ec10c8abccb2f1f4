"""Raw rows become questions: each kind of bad row has its outcome, and every row is counted."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import prompts
from pipeline.errors import DataError
from pipeline.params import load_params

SOURCE = Path("data/raw/questions.jsonl")
IMAGE = {"type": "image_url", "image_url": {"url": "file:///x.png"}}


def human(value: object, **more: object) -> dict:
    return {"from": "human", "value": value, **more}


def gpt(value: object) -> dict:
    return {"from": "gpt", "value": value}


def system(value: object) -> dict:
    return {"from": "system", "value": value}


def run(project, rows: list, path: Path = SOURCE, **overrides: object) -> list[dict]:
    """The kept prompts of a source that holds `rows` (bytes are written as they are)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = {name: None for row in rows for name in row}
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    values = {"num_held_out": 1, "sources": [str(path)]} | overrides
    project.set(**{f"prompts.{key}": value for key, value in values.items()})
    if "sample_cap" not in overrides:  # all of them
        params = load_params().prompts
        num_questions = len(prompts.read_questions(params)[0])
        project.set(**{"prompts.sample_cap": max(num_questions - params.num_held_out, 1)})
    prompts.main()
    return project.rows("data/prompts/prompts.jsonl")


def questions(kept: list[dict]) -> list[str]:
    return [row["messages"][-1]["content"] for row in kept]


FILLER = [{"conversations": [human(f"filler {n}")]} for n in range(3)]


def outcome(project, row: object, turns: str) -> list[dict] | str:
    """The messages a row becomes, or the reason it is rejected for."""
    kept = run(project, [*FILLER, row], turns=turns)
    rejected = project.rows("data/prompts/rejected.jsonl")
    report = project.report("prompts")
    assert report["rows_in"] == 4
    assert len(kept) + len(rejected) == 4
    if rejected:
        reason = rejected[0]["reason"]
        assert rejected == [{"file": str(SOURCE), "row": 4, "reason": reason}]
        assert {k: n for k, n in report["rejected"].items() if n} == {reason: 1}
        return reason
    [messages] = [m for m in (p["messages"] for p in kept) if "filler" not in m[-1]["content"]]
    return messages


USER_Q = [{"role": "user", "content": "Q"}]
SYSTEM_Q = [{"role": "system", "content": "S"}, *USER_Q]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        # C1
        ({"id": "1", "conversations": []}, "no_conversation"),
        ({"id": "2", "conversations": None}, "no_conversation"),
        ({"id": "3"}, "no_conversation"),
        ({"id": "4", "messages": [], "conversations": [human("Q")]}, USER_Q),
        ({"id": "4b", "messages": None, "conversations": [human("Q")]}, USER_Q),
        ({"id": "5", "conversations": '[{"from":"human","value":"Q"}]'}, "bad_shape"),
        ({"id": "6", "conversations": [None, "x", human("Q")]}, "bad_shape"),
        ({"conversations": {"from": "human", "value": "Q"}}, "bad_shape"),
        ([human("Q")], "bad_shape"),
        ("Q", "bad_shape"),
        (5, "bad_shape"),
        ({"conversations": [{"from": "human"}]}, "bad_shape"),
        ({"conversations": [human(None)]}, "bad_shape"),
        ({"conversations": [human(5)]}, "bad_shape"),
        # C2
        ({"conversations": [system("S"), human("Q")]}, SYSTEM_Q),
        ({"conversations": [human("Q"), system("S"), gpt("A")]}, USER_Q),
        ({"conversations": [system(""), human("Q")]}, USER_Q),
        ({"conversations": [system(" \n"), human("Q")]}, USER_Q),
        ({"conversations": [system("S")]}, "no_question"),
        # C3
        ({"conversations": [gpt("Sure"), human("Q"), gpt("A")]}, "starts_with_assistant"),
        ({"conversations": [system("S"), gpt("Sure"), human("Q")]}, "starts_with_assistant"),
        ({"conversations": [gpt("Sure")]}, "starts_with_assistant"),
        # C5
        (
            {
                "conversations": [
                    human("Q"),
                    {"from": "function_call", "value": "{}"},
                    {"from": "observation", "value": "42"},
                    gpt("A"),
                ]
            },
            "tools",
        ),
        (
            {"conversations": [{"from": "Human ", "value": "Q"}, {"from": "bing", "value": "A"}]},
            USER_Q,
        ),
        (
            {"conversations": [human("Q"), {"from": "observation", "value": "42"}, gpt("A")]},
            "tools",
        ),
        ({"conversations": [human("Q"), {"from": "kimi-k2", "value": "A"}]}, "unknown_role"),
        ({"conversations": [{"from": "narrator", "value": "Q"}]}, "unknown_role"),
        ({"conversations": [human("Q"), {"from": "narrator", "value": "A"}]}, "unknown_role"),
        ({"conversations": [{"value": "Q"}]}, "unknown_role"),
        ({"conversations": [{"from": 5, "value": "Q"}]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": "Q"}]}, USER_Q),
        # C7
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}, IMAGE]}]},
         "multimodal"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"}]}]}, USER_Q),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Q"},
                                                    {"type": "text", "text": "?"}]}]},
         [{"role": "user", "content": "Q?"}]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
         "bad_shape"),
        ({"messages": [{"role": "user", "content": []}]}, "blank"),
        # C8
        ({"conversations": [human("  \n"), gpt("A")]}, "blank"),
        ({"conversations": [human("")]}, "blank"),
        ({"conversations": [human("Q"), gpt("")]}, USER_Q),  # its answer is not used
        # C14
        ({"conversations": [human("Q"), gpt("A1"), human("Q2")]}, USER_Q),
        # C15: kept; the answer's status says that the question switched thinking off
        (
            {"conversations": [human("Say hi /no_think")]},
            [{"role": "user", "content": "Say hi /no_think"}],
        ),
        # C16
        ({"tools": "not json", "conversations": [human("Q")]}, "tools"),
        ({"tools": [{"type": "function"}], "conversations": [human("Q")]}, "tools"),
        ({"tools": '[{"type": "function"}]', "conversations": [human("Q")]}, "tools"),
        ({"tools": "[]", "conversations": [human("Q")]}, USER_Q),
        ({"tools": [], "conversations": [human("Q")]}, USER_Q),
        ({"tools": None, "conversations": [human("Q")]}, USER_Q),
        # torn and foreign lines
        (b'{"conversations": [{"from": "human", "val', "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"null", "not_json"),
        (b'{"conversations": [{"from": "human", "value": NaN}]}', "not_json"),
        # both names of a key, one of them null
        (
            {"conversations": [{"from": "human", "value": "Q", "role": None, "content": None}]},
            USER_Q,
        ),
        # control characters, other scripts and marker text are questions like any other
        (
            {"conversations": [human("\u0000 \U0001f642 </think> <|im_end|>")]},
            [{"role": "user", "content": "\u0000 \U0001f642 </think> <|im_end|>"}],
        ),
        # the white space of a question is part of it
        ({"conversations": [human(" Q \n")]}, [{"role": "user", "content": " Q \n"}]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("turns", ["first", "all"])
def test_each_kind_of_row_has_its_outcome(project, row, expected, turns):
    assert outcome(project, row, turns) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("human", USER_Q),
        ("user", USER_Q),
        ("USER ", USER_Q),
        ("gpt", "starts_with_assistant"),
        ("assistant", "starts_with_assistant"),
        ("chatgpt", "starts_with_assistant"),
        ("bing", "starts_with_assistant"),
        ("bard", "starts_with_assistant"),
        ("model", "starts_with_assistant"),
        ("system", "no_question"),
        ("tool", "tools"),
        ("function", "tools"),
        ("function_call", "tools"),
        ("observation", "tools"),
        ("", "unknown_role"),
    ],
)
@pytest.mark.parametrize(("who", "what"), [("from", "value"), ("role", "content")])
def test_each_name_of_a_role_is_known(project, name, expected, who, what):
    assert outcome(project, {"conversations": [{who: name, what: "Q"}]}, "first") == expected


@pytest.mark.parametrize(
    ("later", "later_turns", "num_cut"),
    [
        ([], [], 0),
        ([gpt("A")], [], 0),
        ([gpt("A"), human("Q2"), gpt("A2")], ["Q2"], 0),
        # C14: a trailing user turn counts
        ([gpt("A"), human("Q2")], ["Q2"], 0),
        ([gpt("A"), human("Q2"), gpt("A2"), human("Q3")], ["Q2", "Q3"], 0),
        # with no answer between them, each is still a turn of its own
        ([human("Q2"), human("Q3"), gpt("A3")], ["Q2", "Q3"], 0),
        ([gpt("A"), gpt("more"), human("Q2")], ["Q2"], 0),
        # only a leading system turn is sent
        ([gpt("A"), system("S"), human("Q2")], ["Q2"], 0),
        # an answer is not used, whatever it holds
        ([gpt(""), human("Q2"), gpt(None), human("Q3")], ["Q2", "Q3"], 0),
        ([gpt([IMAGE]), human("Q2")], ["Q2"], 0),
        ([gpt("A"), human(" Q2\n")], [" Q2\n"], 0),
        ([gpt("A"), human("Q"), gpt("A"), human("Q")], ["Q", "Q"], 0),
        ([gpt("A"), human([{"type": "text", "text": "Q2"}])], ["Q2"], 0),
        # what cannot be sent ends the conversation
        ([gpt("A"), human("  \n")], [], 1),
        ([gpt("A"), human(""), gpt("A2"), human("Q3")], [], 2),
        ([gpt("A"), human("Q2"), gpt("A2"), human([IMAGE]), gpt("A3"), human("Q4")], ["Q2"], 2),
        ([gpt("A"), human("Q2"), human(None), human("Q4"), human("Q5")], ["Q2"], 3),
        ([gpt("A"), human(5), human("Q3")], [], 2),
        ([gpt("A"), human("cut \ud83d"), human("Q3")], [], 2),
    ],
)
def test_the_later_turns_of_a_conversation(project, later, later_turns, num_cut):
    path = SOURCE.with_suffix(".json")  # takes half an escaped character
    rows = [*FILLER, {"conversations": [system("S"), human("Q"), *later]}]
    for turns, expected in (("all", (later_turns, num_cut)), ("first", ([], 0))):
        kept = run(project, rows, path, turns=turns)
        [prompt] = [row for row in kept if row["messages"][-1]["content"] == "Q"]
        report = project.report("prompts")
        assert prompt["messages"] == SYSTEM_Q
        assert (prompt["later_turns"], report["user_turns_cut"]) == expected
        assert report["user_turns"] == 4 + len(expected[0])
        assert sum(report["rejected"].values()) == 0
        assert report["rows_in"] == len(kept) == 4


Q_SENT = b'[{"content":"Q","role":"user"}]'
TWO_TURNS = {"conversations": [human("Q"), gpt("A"), human("Q2"), gpt("A2")]}


@pytest.mark.parametrize("turns", ["first", "all"])
@pytest.mark.parametrize("row", [{"conversations": [human("Q")]}, TWO_TURNS])
def test_a_key_is_the_hash_of_what_is_sent_first(project, row, turns):
    """So asking the later turns too moves no prompt to another place."""
    kept = run(project, [*FILLER, row], turns=turns)
    [prompt] = [row for row in kept if row["messages"][-1]["content"] == "Q"]
    assert prompt["key"] == hashlib.sha256(Q_SENT).hexdigest()
    assert prompt["sample_id"] == hashlib.sha256(Q_SENT).hexdigest()[:16] + "_gen0"


@pytest.mark.parametrize("turns", ["first", "all"])
def test_conversations_that_begin_alike_are_one(project, turns):
    rows = [
        *FILLER,
        {"conversations": [human("Q"), gpt("A"), human("Q2")]},
        {"conversations": [human("Q"), gpt("A"), human("Q3")]},
        {"conversations": [human("Q"), gpt("B")]},
    ]
    kept = run(project, rows, turns=turns)
    rejected = project.rows("data/prompts/rejected.jsonl")
    assert [(row["row"], row["reason"]) for row in rejected] == [
        (len(FILLER) + 2, "duplicate"),
        (len(FILLER) + 3, "duplicate"),
    ]
    assert len(kept) + len(rejected) == len(rows)


def test_turns_beyond_the_cap_are_not_counted(project):
    turns = [human("Q2"), human("Q3"), human(""), human("Q5")]
    rows = [{"conversations": [human(f"Q{n}"), *turns]} for n in range(10, 15)]
    kept = run(project, rows, turns="all", num_held_out=1, sample_cap=2)
    assert len(kept) == 3
    report = project.report("prompts")
    # a first and two later ones each; the blank one and the one behind it are cut
    assert (report["user_turns"], report["user_turns_cut"]) == (9, 6)


@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_a_lone_surrogate_costs_its_own_row_alone(project, suffix):
    rows = [*FILLER, {"conversations": [human("cut \ud83d")]}]
    kept = run(project, rows, SOURCE.with_suffix(suffix))
    assert sorted(questions(kept)) == ["filler 0", "filler 1", "filler 2"]
    assert len(project.rows("data/prompts/rejected.jsonl")) == 1


def test_two_rows_that_send_the_same_are_duplicates_whatever_else_they_hold(project):
    rows = [
        {"id": 1, "conversations": [human("Q"), gpt("A")]},
        {"id": 2, "messages": [{"role": "user", "content": "Q"}]},
        {"id": 3, "conversations": [system(""), human("Q"), gpt("B"), human("Q2")]},
        {"id": 4, "conversations": [system("S"), human("Q")]},
        {"id": 5, "conversations": [human("Q ")]},
    ]
    kept = run(project, rows)
    assert len(kept) == 3
    rejected = project.rows("data/prompts/rejected.jsonl")
    assert [(row["row"], row["reason"]) for row in rejected] == [(2, "duplicate"), (3, "duplicate")]


def test_rows_in_are_kept_beyond_the_cap_and_rejected(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(12)]
    rows += [{"conversations": [human("Q3")]}, {"conversations": []}]
    kept = run(project, rows, num_held_out=2, sample_cap=5)
    report = project.report("prompts")
    assert report["rows_in"] == 14
    assert (report["held_out"], report["train"], report["beyond_cap"]) == (2, 5, 5)
    assert (report["rejected"]["duplicate"], report["rejected"]["no_conversation"]) == (1, 1)
    assert sum(report["rejected"].values()) == 2
    assert Counter(row["split"] for row in kept) == {"held_out": 2, "train": 5}


def test_index_is_the_line_and_the_first_rows_are_held_out(project):
    kept = run(project, [{"conversations": [human(f"Q{n}")]} for n in range(6)], num_held_out=2)
    assert [row["index"] for row in kept] == [0, 1, 2, 3, 4, 5]
    assert [row["split"] for row in kept] == ["held_out"] * 2 + ["train"] * 4
    assert len({row["sample_id"] for row in kept}) == 6
    assert all(row["sample_id"] == row["key"][:16] + "_gen0" for row in kept)


def test_a_raised_cap_adds_at_the_end_and_moves_nobody(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(20)]
    small = run(project, rows, num_held_out=3, sample_cap=4)
    large = run(project, rows, num_held_out=3, sample_cap=11)
    assert len(large) == 14
    assert large[:7] == small


def test_more_raw_rows_keep_the_order_of_the_old_ones(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(20)]
    few = questions(run(project, rows[:8]))
    many = questions(run(project, rows))
    assert [question for question in many if question in few] == few


def test_the_order_of_the_source_does_not_matter(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(20)]
    assert run(project, rows) == run(project, rows[::-1])


def test_another_seed_gives_another_order_of_the_same_questions(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(20)]
    one, other = (questions(run(project, rows, seed=seed)) for seed in (0, 1))
    assert one != other
    assert sorted(one) == sorted(other)


def test_the_order_differs_from_that_of_the_source(project):
    rows = [{"conversations": [human(f"Q{n:02}")]} for n in range(20)]
    assert questions(run(project, rows)) != [f"Q{n:02}" for n in range(20)]


def test_json_jsonl_and_parquet_give_the_same_prompts(project):
    rows = [
        {"conversations": [system("S"), human("Q1"), gpt("A")], "source": "x"},
        {"conversations": [human("Q2")], "source": None},
        {"messages": [{"role": "user", "content": "Q3"}]},
        {"conversations": [{"role": "user", "content": "Q4"}]},
        {"conversations": []},
    ]
    kept, reports = [], []
    for suffix in (".jsonl", ".json", ".parquet"):
        kept.append(run(project, rows, SOURCE.with_suffix(suffix)))
        reports.append(project.report("prompts"))
    assert len(kept[0]) == 4
    assert kept[0] == kept[1] == kept[2]
    assert reports[0] == reports[1] == reports[2]


def test_the_source_column_is_kept_and_the_file_stands_in_for_it(project):
    rows = [{"conversations": [human("Q1")], "source": "math"}, {"conversations": [human("Q2")]}]
    kept = run(project, rows)
    assert {row["messages"][0]["content"]: row["source"] for row in kept} == {
        "Q1": "math",
        "Q2": "questions",
    }
    assert project.report("prompts")["source"] == {"math": 1, "questions": 1}


def test_several_sources_are_one_pool(project):
    other = Path("data/raw/other.json")
    other.parent.mkdir(parents=True)
    other.write_text(json.dumps([{"conversations": [human("Q1")]}, {"conversations": []}]))
    rows = [{"conversations": [human("Q1")]}, {"conversations": [human("Q2")]}]
    kept = run(project, rows, sources=[str(SOURCE), str(other)])
    assert sorted(questions(kept)) == ["Q1", "Q2"]
    rejected = project.rows("data/prompts/rejected.jsonl")
    assert [(row["file"], row["row"], row["reason"]) for row in rejected] == [
        (str(other), 1, "duplicate"),
        (str(other), 2, "no_conversation"),
    ]


def test_two_runs_write_the_same_bytes(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(9)]
    run(project, rows)
    first = project.bytes("data/prompts/*", "reports/*")
    run(project, rows)
    assert project.bytes("data/prompts/*", "reports/*") == first


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.jsonl", None, "gone.jsonl"),
        ("questions.csv", b"Q", ".csv"),
        ("questions", b"Q", "no suffix"),
        ("broken.json", b"[1, 2", "broken.json"),
        ("object.json", b'{"rows": []}', "list"),
        ("broken.parquet", b"PAR1 not really", "broken.parquet"),
        ("empty.jsonl", b"", "empty.jsonl"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(project, name, content, said):
    path = Path("data/raw") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    project.set(**{"prompts.sources": [str(path)]})
    with pytest.raises(DataError, match=said):
        prompts.main()


def test_too_few_questions_to_train_on_is_an_error_that_names_the_parameter(project):
    rows = [{"conversations": [human(f"Q{n}")]} for n in range(3)]
    with pytest.raises(DataError, match=r"prompts\.num_held_out 3 .* smaller, num_held_out too"):
        run(project, rows, num_held_out=3)
    with pytest.raises(DataError, match=r"3 questions, 0 rows .* sample_cap to at most 2"):
        run(project, rows, num_held_out=1, sample_cap=3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
TURN = st.fixed_dictionaries(
    {},
    optional={
        "from": st.sampled_from(["human", "gpt", "system", "tool", "x"]) | JSON,
        "role": st.sampled_from(["user", "assistant"]) | JSON,
        "value": JSON,
        "content": JSON,
    },
)


@given(
    row=JSON | st.fixed_dictionaries({"conversations": st.lists(TURN | JSON)}),
    turns=st.sampled_from(["first", "all"]),
)
def test_no_row_whatsoever_breaks_the_run(row, turns):
    try:
        question = prompts.question_of(row, "questions", turns)
    except prompts.Rejected:
        return
    assert question.messages[-1]["role"] == "user"
    assert all(text.strip() for text in [question.messages[-1]["content"], *question.later_turns])


def test_a_byte_order_mark_costs_no_row(tmp_path):
    row = b'{"conversations":[{"from":"human","value":"Q"}]}'
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + row + b"\n")
    [read] = prompts.read_rows(tmp_path / "a.jsonl")
    assert read == {"conversations": [human("Q")]}


@pytest.mark.parametrize(
    ("name", "content"), [("a.json", b"[" * 200_000), ("a.json", b"{"), ("a.parquet", b"PAR1")]
)
def test_a_source_that_cannot_be_read_is_one_clear_error(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} cannot be read as"):
        list(prompts.read_rows(tmp_path / name))
