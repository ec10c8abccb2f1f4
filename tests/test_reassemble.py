"""The stage: each answer is a sequence or has its reason, the same on every run, one row at a time.

What becomes of one answer is in test_assembly.py.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError, ParamsError, UserError, VerifierError
from pipeline.records import Rejected, SequenceRejection, Status
from pipeline.resume import file_sha256, jsonl, one_writer, write_bytes
from tests.conftest import ROOT
from tests.fake_server import (
    ASSISTANT,
    END,
    THINK,
    THINK_END,
    USER,
    VOCAB_SIZE,
    ids,
    prompt_ids,
    written,
)
from tests.fake_tokenizer import FAMILY

pytestmark = pytest.mark.timeout(120)  # the first import of speculators takes its time
CUT, CUT_LATE = "truncated_in_reasoning", "truncated_in_answer"
BOS = 2


def turn(reasoning: str, answer: str) -> list[int]:
    return [THINK, *ids(reasoning), THINK_END, *ids(answer), END]


def reassemble() -> None:
    from pipeline import reassemble

    reassemble.main()


def store(rows: list[dict[str, Any]], part: int = 0) -> None:
    write_bytes(Path(f"data/traces/part-{part:05}.jsonl"), jsonl(rows))


def but_zeros(counts: dict[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if n}


@pytest.fixture
def traces(project, trace_of):
    """Six answers as `generate` leaves them: Q1 held out, Q4 without reasoning, Q5 cut."""
    rows = [trace_of(f"Q{n}", key=f"k{n}") for n in range(1, 7)]
    rows[3] = trace_of("Q4", turn("", "42"), key="k4", status="empty_reasoning")
    rows[4] = trace_of("Q5", [THINK, *ids("\nand so on")], "length", key="k5", status=CUT)
    store(rows)
    return rows


# rows


def test_rows_in_are_rows_out_and_rows_rejected(project, traces):
    reassemble()
    report = project.report("reassemble")
    assert (report["rows_in"], report["held_out"], report["train"]) == (6, 1, 4)
    assert but_zeros(report["rejected"]) == {"empty_reasoning": 1}
    assert but_zeros(report["kept_by_status"]) == {"ok": 4, CUT: 1}
    rejected = project.rows("data/sequences/rejected.jsonl")
    assert rejected == [{"sample_id": "Q4_gen0", "reason": "empty_reasoning"}]
    # "\nI recall Q?\n" is 13 characters, Q5's thought 10; "\n\nIt is ?Q" is 10.
    assert report["reasoning_tokens"] == {"mean": 12.4, "p50": 13.0, "p95": 13.0, "max": 13}
    assert report["answer_tokens"] == {"mean": 8.0, "p50": 10.0, "p95": 10.0, "max": 10}
    assert report["supervised_tokens"] == 4 * len(written("Q1")) + 11
    assert report["tokens"] == report["supervised_tokens"] + 5 * len(
        prompt_ids([{"role": "user", "content": "Q1"}])
    )


def test_dropped_cut_answers_are_counted_too(project, traces):
    project.set(**{"reassemble.truncated": "drop"})
    reassemble()
    report = project.report("reassemble")
    assert report["rejected"]["truncated"] == 1
    assert report["rows_in"] == report["held_out"] + report["train"] + 2


def test_a_text_without_token_ids_is_counted(project, traces, trace_of):
    traces[1] = trace_of("Q2", [], prompt=[], key="k2", usage={})
    store(traces)
    reassemble()
    rejected = project.report("reassemble")["rejected"]
    assert but_zeros(rejected) == {"empty_reasoning": 1, "no_token_ids": 1}


# What a question's answer must be for each reason, under params that leave room for it.
BROKEN: dict[str, tuple[list[int], dict[str, Any]]] = {
    "think_start": ([*ids("xy"), END], {}),
    "think_end": ([THINK, *ids("abc"), END], {}),
    "no_answer": ([THINK, *ids("abc"), THINK_END, END], {}),
    "end_of_turn": (turn("abc", "xy")[:-1], {}),
    "control_token": ([THINK, 97, USER, 98, THINK_END, 120, END], {}),
    "usage": (turn("abc", "xy"), {"usage": {"prompt_tokens": 4, "completion_tokens": 1}}),
    "bos": (turn("abc", "xy"), {"prompt": [BOS, USER, *ids("Q"), END, ASSISTANT]}),
    "control_text": (turn("abc", "xy"), {"prompt": [USER, THINK, END, ASSISTANT]}),
    "other_template": (turn("abc", "xy"), {"prompt": ids("Q")}),
    "unknown_id": ([THINK, 97, THINK_END, VOCAB_SIZE, END], {"reasoning": "", "content": ""}),
    "no_token_ids": ([], {"prompt": [], "usage": {}}),
    "truncated": ([THINK, *ids("abc")], {"finish": "length", "status": CUT}),
    "too_long": (turn("abc" * 30, "xy"), {}),
    "text_not_exact": ([], {"prompt": [], "usage": {}, "reasoning": "a<|end|>"}),
    "nothing_to_learn": ([THINK, *ids("abc")], {"finish": "length", "status": CUT}),
}
OTHER_PARAMS = {
    "text_not_exact": {"reassemble.source": "ids_else_text"},
    "nothing_to_learn": {"reassemble.train_on": "answer"},
}


@pytest.mark.parametrize(
    "reasons",
    [[r for r in BROKEN if r not in OTHER_PARAMS], ["text_not_exact"], ["nothing_to_learn"]],
    ids=["most of them", "text_not_exact", "nothing_to_learn"],
)
def test_each_reason_is_counted_and_named_for_each_row(project, trace_of, reasons):
    assert set(BROKEN) == set(SequenceRejection)
    project.identity(bos_id=BOS, control_ids=[BOS, END, 203, 204, 205])
    project.set(
        **{
            "reassemble.truncated": "keep" if "nothing_to_learn" in reasons else "drop",
            "reassemble.on_too_long": "drop",
            "reassemble.max_tokens": 64,
        },
        **OTHER_PARAMS.get(reasons[0], {}),
    )
    project.ask("held out", *reasons, "good")
    rows = [trace_of(name, key=name) for name in ("held out", "good")]
    rows[1:1] = [
        trace_of(reason, BROKEN[reason][0], key=reason, **BROKEN[reason][1]) for reason in reasons
    ]
    store(rows)
    reassemble()
    assert project.rows("data/sequences/rejected.jsonl") == [
        {"sample_id": f"{reason}_gen0", "reason": reason} for reason in reasons
    ]
    report = project.report("reassemble")
    assert but_zeros(report["rejected"]) == dict.fromkeys(reasons, 1)
    assert report["rows_in"] == report["train"] + report["held_out"] + len(reasons)


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("usage", None, "usage is of another type"),
        ("token_ids", "12", "token_ids is of another type"),
        ("token_ids", [1, "2"], "token ids that are no integers"),
        ("status", "fine", "no status 'fine'"),
    ],
)
def test_a_row_that_is_no_trace_is_named_with_its_line(project, traces, field, value, what):
    traces[2][field] = value
    store(traces)
    with pytest.raises(DataError, match=rf"part-00000\.jsonl:3 is no trace: {what}"):
        reassemble()


def test_a_field_that_is_missing_is_named(project, traces):
    del traces[2]["usage"]
    store(traces)
    with pytest.raises(DataError, match=r"part-00000\.jsonl:3 is no trace: usage is missing"):
        reassemble()


def test_a_second_run_at_the_same_time_is_told(project, traces):
    with one_writer(Path("data/sequences")), pytest.raises(UserError, match="being written by"):
        reassemble()


def test_a_draft_vocabulary_that_does_not_fit_changes_nothing(project, traces):
    reassemble()
    before = project.bytes("data/sequences/**/*", "reports/*")
    project.set(**{"reassemble.draft_vocab_size": 2, "reassemble.train_on": "answer"})
    with pytest.raises(ParamsError, match="no room"):
        reassemble()
    assert project.bytes("data/sequences/**/*", "reports/*") == before


def test_the_report_names_every_reason_and_status_whatever_the_rows(project, traces):
    """So that two runs have the same names to compare."""
    reassemble()
    report = project.report("reassemble")
    trained_on = {"ok", CUT, CUT_LATE}
    assert set(report["rejected"]) == set(SequenceRejection) | set(Status) - trained_on
    assert set(report["kept_by_status"]) == set(Status)


def test_the_report_is_strict_json_of_plain_counts(project, traces):
    def fail(constant: str) -> None:
        raise AssertionError(constant)

    reassemble()
    text = Path("reports/reassemble.json").read_text()
    report = json.loads(text, parse_constant=fail)
    assert text == json.dumps(report, indent=2, sort_keys=True) + "\n"
    counts = ["rows_in", "train", "held_out", "tokens", "supervised_tokens", "rebuilt", "ablated"]
    counts += ["with_control_text", "think_ends_in_answers", "cut_in_reasoning", "cut_in_answer"]
    assert {type(report[name]) for name in counts} == {int}


def test_what_is_odd_about_kept_rows_is_counted(project, trace_of):
    project.set(
        **{
            "reassemble.source": "ids_else_text",
            "reassemble.on_control_text": "keep",
            "reassemble.max_tokens": 40,
        }
    )
    three_ends = [THINK, 97, THINK_END, 120, THINK_END, 121, THINK_END, END]
    spelt = [USER, *ids("Q"), END, *ids("5"), END, ASSISTANT]
    store(
        [
            trace_of("Q1", turn("abc", "xy"), key="k1", prompt=[USER, END, END, ASSISTANT]),
            trace_of("Q2", three_ends, key="k2"),
            trace_of("Q3", turn("a" * 40, "xy"), key="k3"),
            trace_of("Q4", turn("abc", "x" * 40), key="k4"),
            trace_of("Q5", turn("abc", "xy"), key="k5", prompt=spelt),
            trace_of("Q6", [], key="k6", prompt=[], reasoning="abc", content="xy", usage={}),
        ]
    )
    reassemble()
    report = project.report("reassemble")
    assert report["think_ends_in_answers"] == 2
    assert (report["cut_in_reasoning"], report["cut_in_answer"]) == (1, 1)
    assert (report["with_control_text"], report["rebuilt"], report["ablated"]) == (2, 1, 0)
    assert but_zeros(report["rejected"]) == {}
    rows = {row["sample_id"]: row for row in sequences("train")}
    assert [name for name, row in rows.items() if row["control_text"]] == ["Q5_gen0"]
    assert [name for name, row in rows.items() if row["rebuilt"]] == ["Q6_gen0"]
    cuts = {name: row["cut_in"] for name, row in rows.items() if row["seq_len"] == 40}
    assert cuts == {"Q3_gen0": "reasoning", "Q4_gen0": "answer"}


@pytest.mark.parametrize(
    ("reasoning", "ablation", "num_tokens"),
    [("drop", "reasoning_dropped", 0), ("empty", "reasoning_empty", 2)],
)
def test_an_ablation_is_marked_in_every_row_and_said(
    project, traces, capsys, reasoning, ablation, num_tokens
):
    project.set(**{"reassemble.reasoning": reasoning})
    reassemble()
    report = project.report("reassemble")
    assert report["ablated"] == report["train"] + report["held_out"] == 4
    assert report["reasoning_tokens"]["max"] == 0
    assert report["tokens"] == 4 * (len("UQ1EA") + num_tokens + len("\n\nIt is 1QE"))
    assert but_zeros(report["rejected"]) == {"empty_reasoning": 1, "no_answer": 1}
    rows = [*sequences("train"), *sequences("held_out")]
    assert {row["ablation"] for row in rows} == {ablation}
    assert f"an ablation: {ablation}" in capsys.readouterr().out


def test_what_is_not_ablated_says_nothing_of_it(project, traces, capsys):
    reassemble()
    assert project.report("reassemble")["ablated"] == 0
    assert "ablation" not in capsys.readouterr().out


# the folders


def sequences(split: str) -> list[dict[str, Any]]:
    from pipeline.sequences import load_split

    return list(load_split(Path(f"data/sequences/{split}")))


def test_both_folders_load_with_datasets_and_hold_the_ids(project, traces):
    import datasets

    reassemble()
    train = datasets.load_from_disk("data/sequences/train").with_format(None)
    held_out = datasets.load_from_disk("data/sequences/held_out").with_format(None)
    assert train["sample_id"][:] == ["Q2_gen0", "Q3_gen0", "Q5_gen0", "Q6_gen0"]
    assert held_out["sample_id"][:] == ["Q1_gen0"]
    expected = prompt_ids([{"role": "user", "content": "Q2"}]) + written("Q2")
    assert train[0]["input_ids"] == expected
    assert train[0]["seq_len"] == len(expected)
    assert sum(train[0]["loss_mask"]) == len(written("Q2"))


def test_speculators_takes_both_folders_as_they_are(project, traces):
    from speculators.train.data import ArrowDataset

    reassemble()
    for split, num in (("train", 4), ("held_out", 1)):
        dataset = ArrowDataset(512, f"data/sequences/{split}", on_missing="skip")
        assert len(dataset) == num


def test_the_vocabulary_counts_generated_tokens_of_the_training_set_alone(project, traces):
    import numpy as np

    project.set(**{"reassemble.draft_vocab_size": 8})
    traces[0] = traces[0] | {"token_ids": turn("zzzzzzzzzzzzzz", "z")}
    traces[0]["usage"] = {"prompt_tokens": 5, "completion_tokens": 18}
    store(traces)
    reassemble()
    t2d = np.load("data/sequences/t2d.npy")
    d2t = np.load("data/sequences/d2t.npy")
    assert t2d.shape == (VOCAB_SIZE,)
    assert t2d.sum() == len(d2t) == 8
    assert t2d[[THINK, THINK_END, END]].all()
    # Space occurs most in what was generated; "z" was held out, USER is in prompts alone.
    assert t2d[ord(" ")]
    assert not t2d[ord("z")]
    assert not t2d[USER]
    report = project.report("reassemble")
    assert report["held_out_vocabulary"] == {
        "reasoning": {"tokens": 14, "outside": 14, "fraction": 0.0},
        "answer": {"tokens": 1, "outside": 1, "fraction": 0.0},
        "end": {"tokens": 1, "outside": 0, "fraction": 1.0},
    }
    assert report["vocabulary_sha256"] == file_sha256(Path("data/sequences/d2t.npy"))


def test_what_is_not_learnt_is_not_in_the_vocabulary(project, traces):
    import numpy as np

    project.set(**{"reassemble.draft_vocab_size": 20, "reassemble.train_on": "answer"})
    reassemble()
    t2d = np.load("data/sequences/t2d.npy")
    assert t2d[ids("It s")].all()
    assert not t2d[ids("recal")].any()


def test_two_runs_write_the_same_bytes(project, traces):
    reassemble()
    first = project.bytes("data/sequences/**/*", "reports/*")
    assert len(first) >= 8
    shutil.rmtree("data/sequences")
    reassemble()
    assert project.bytes("data/sequences/**/*", "reports/*") == first


def test_a_second_run_over_an_old_output_leaves_nothing_of_it(project, traces):
    reassemble()
    first = project.bytes("data/sequences/**/*")
    reassemble()
    assert project.bytes("data/sequences/**/*") == first
    assert set(first) == {
        f"data/sequences/{name}"
        for name in (
            *("d2t.npy", "t2d.npy", "rejected.jsonl", "disagreements.jsonl"),
            *("train/data-00000-of-00001.arrow", "train/dataset_info.json", "train/state.json"),
            *("held_out/data-00000-of-00001.arrow", "held_out/dataset_info.json"),
            "held_out/state.json",
        )
    }


def test_a_run_that_fails_leaves_the_last_one_as_it_was(project, traces):
    reassemble()
    first = project.bytes("data/sequences/**/*", "reports/*")
    store(traces[:-1])
    with pytest.raises(DataError):
        reassemble()
    assert project.bytes("data/sequences/**/*", "reports/*") == first


# what the stage cannot work with


@pytest.mark.parametrize("change", ["one missing", "one more", "other order"])
def test_traces_that_do_not_answer_the_prompts_are_an_error(project, traces, trace_of, change):
    rows = {
        "one missing": traces[:-1],
        "one more": [*traces, trace_of("Q7")],
        "other order": traces[::-1],
    }[change]
    store(rows)
    with pytest.raises(DataError, match=r"dvc repro generate"):
        reassemble()


def test_nothing_left_to_train_on_is_an_error_with_the_reasons(project, traces, trace_of):
    rows = [trace_of("Q1")] + [trace_of(f"Q{n}", status="empty_reasoning") for n in range(2, 7)]
    store(rows)
    with pytest.raises(DataError, match=r"no train sequence.*5 empty_reasoning"):
        reassemble()
    assert list(Path("data/sequences").iterdir()) == []


def test_nothing_left_to_hold_out_is_an_error_with_the_reasons(project, traces, trace_of):
    store([trace_of("Q1", status="looping"), *traces[1:]])
    with pytest.raises(DataError, match=r"no held_out sequence.*1 looping"):
        reassemble()


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused(project, traces):
    project.set(**{"reassemble.draft_vocab_size": VOCAB_SIZE + 1})
    with pytest.raises(ParamsError, match=f"{VOCAB_SIZE + 1}, more than the verifier's"):
        reassemble()


def test_another_chat_template_than_identify_saw_stops_the_stage(project, traces):
    """B14: verifier.json, which knows template and tokenizer by their hashes, is a dependency; a
    template that changed under the same name is noticed."""
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert "data/verifier.json" in stages["reassemble"]["deps"]
    template = Path("models/verifier/chat_template.jinja")
    known = {"name": template.name, "size_bytes": template.stat().st_size}
    project.identity(small_files=[known | {"sha256": file_sha256(template)}])
    reassemble()
    template.write_text(template.read_text().replace("<|end|>", "<|END|>"))
    with pytest.raises(VerifierError, match=r"verifier changed: .*chat_template\.jinja"):
        reassemble()


# conversations


@pytest.fixture
def conversations(project):
    """`conversations(A=2, B=0)` writes prompts of so many later turns; A is held out."""

    def write(**later_turns: int) -> None:
        prompts = [
            {
                "index": index,
                "split": "train" if index else "held_out",
                "key": name * 64,
                "sample_id": f"{name}_gen0",
                "source": "test",
                "messages": [{"role": "user", "content": name}],
                "later_turns": [f"more {n}" for n in range(num_later)],
            }
            for index, (name, num_later) in enumerate(later_turns.items())
        ]
        write_bytes(Path("data/prompts/prompts.jsonl"), jsonl(prompts))

    return write


@pytest.fixture
def answers(trace_of):
    """`answers("A0", "A1")` writes the traces A_gen0 and A_gen1, all good."""

    def write(*names: str) -> None:
        store([trace_of(name, sample_id=f"{name[0]}_gen{name[1:]}", key=name) for name in names])

    return write


def turns_of(split: str) -> list[tuple[int, str]]:
    return [(row["prompt_index"], row["sample_id"]) for row in sequences(split)]


def test_each_turn_is_a_sequence_of_its_conversations_side(project, conversations, answers):
    conversations(A=2, B=0, C=11)
    answers("A0", "A1", "A2", "B0", *(f"C{n}" for n in range(12)))
    reassemble()
    assert turns_of("held_out") == [(0, "A_gen0"), (0, "A_gen1"), (0, "A_gen2")]
    assert turns_of("train") == [(1, "B_gen0"), *((2, f"C_gen{n}") for n in range(12))]
    report = project.report("reassemble")
    assert (report["rows_in"], report["held_out"], report["train"]) == (16, 3, 13)


def test_each_turn_has_the_prompt_that_the_server_saw(conversations, trace_of):
    """B21: n turns, n rows, and the second one's history is without reasoning."""
    conversations(A=0, c7=1)
    first = [{"role": "user", "content": "Q1"}]
    then = [
        *first,
        {"role": "assistant", "content": "the answer"},
        {"role": "user", "content": "Q2"},
    ]
    asked = {"c7_gen0": first, "c7_gen1": then}
    rows = [
        trace_of(
            "Q",
            turn("a thought", "the answer"),
            key=name,
            sample_id=name,
            messages=messages,
            prompt=prompt_ids(messages),
        )
        for name, messages in asked.items()
    ]
    store([trace_of("A", key="A"), *rows])
    reassemble()
    one, two = sequences("train")
    assert (one["sample_id"], two["sample_id"]) == ("c7_gen0", "c7_gen1")
    assert bytes_of(one).count(b"a thought") == bytes_of(two).count(b"a thought") == 1
    assert bytes_of(two).count(b"the answer") == 2
    assert two["input_ids"][: two["generated_start"]] == [
        *(USER, *ids("Q1"), END, ASSISTANT, *ids("the answer"), END),
        *(USER, *ids("Q2"), END, ASSISTANT),
    ]
    assert sum(two["loss_mask"]) == len(turn("a thought", "the answer"))


def bytes_of(row: dict[str, Any]) -> bytes:
    return bytes(row["input_ids"])


def test_a_rejected_turn_takes_no_other_along(project, conversations, answers, trace_of):
    conversations(A=0, B=2)
    rows = [trace_of("B", key=f"B{n}", sample_id=f"B_gen{n}") for n in range(3)]
    rows[1]["status"] = "looping"
    store([trace_of("A", key="A"), *rows])
    reassemble()
    assert turns_of("train") == [(1, "B_gen0"), (1, "B_gen2")]
    rejected = project.rows("data/sequences/rejected.jsonl")
    assert rejected == [{"sample_id": "B_gen1", "reason": "looping"}]


def test_a_conversation_may_stop_before_its_last_turn(conversations, answers):
    conversations(A=2, B=2)
    answers("A0", "B0", "B1")
    reassemble()
    assert turns_of("held_out") == [(0, "A_gen0")]
    assert turns_of("train") == [(1, "B_gen0"), (1, "B_gen1")]


def test_traces_go_on_in_the_next_part(conversations, answers, trace_of):
    conversations(A=1, B=1)
    answers("A0", "A1")
    store([trace_of("B", sample_id=f"B_gen{n}", key=f"B{n}") for n in range(2)], part=1)
    reassemble()
    assert turns_of("train") == [(1, "B_gen0"), (1, "B_gen1")]


def test_a_conversation_may_go_on_in_the_next_part(conversations, answers, trace_of):
    conversations(A=1, B=1)
    answers("A0", "A1", "B0")
    store([trace_of("B", sample_id="B_gen1", key="B1")], part=1)
    reassemble()
    assert turns_of("train") == [(1, "B_gen0"), (1, "B_gen1")]


@pytest.mark.parametrize(
    "names",
    [
        ["A0", "A1", "B0", "B1", "B2"],  # a turn that nobody asked
        ["A1", "B0"],  # the first turn is missing
        ["A0", "B0", "B2"],
        ["A0", "B1", "B0"],
        ["A0", "A0", "B0"],
        ["A0", "B0", "A1"],  # torn apart
        ["B0", "A0"],
        ["A0"],
        ["B0"],
        ["A0", "C0", "B0"],
        ["A0", "B0", "C0"],
        [],
    ],
)
def test_turns_that_do_not_answer_the_prompts_are_an_error(conversations, answers, names):
    conversations(A=1, B=1)
    answers(*names)
    with pytest.raises(DataError, match=r"data/traces does not answer .*dvc repro generate"):
        reassemble()


def test_rows_are_read_one_by_one(project, traces):
    """What comes later is not even looked at, so memory does not grow with it."""
    from pipeline.reassemble import prompts_and_traces

    with Path("data/traces/part-00000.jsonl").open("ab") as file:
        file.write(b"torn")
    pairs = prompts_and_traces()
    for n in range(1, 6):
        prompt, found = next(pairs)
        assert (prompt["sample_id"], found) == (f"Q{n}_gen0", [traces[n - 1]])
    with pytest.raises(DataError, match=r"part-00000\.jsonl:7 is no JSON"):
        next(pairs)


# the other way: the same answers from their text


def test_texts_that_give_their_ids_back_agree(project, traces):
    store([trace | {"status": "ok"} if trace is traces[3] else trace for trace in traces])
    reassemble()
    agreement = project.report("reassemble")["text_agreement"]
    assert agreement == {
        "compared": 6,
        "share": round(5 / 6, 4),
        "exact": 5,
        "stripped_exact": 5,
        "whitespace": 1,  # Q4, whose tags have no newlines next to them
        "retokenized": 0,
        "other": 0,
    }


def test_each_kind_of_disagreement_is_counted_and_shown(project, trace_of, capsys):
    store(
        [
            trace_of("Q1", key="a"),
            trace_of("Q2", turn("\nabc", "\n\nxy"), key="b"),
            # 150 is no token of the tokenizer: it decodes to nothing.
            trace_of("Q3", [*turn("\nabc\n", "\n\nxy")[:-1], 150, END], key="c", content="\n\nxy"),
            trace_of("Q4", turn("\nabc\n", "\n\nxy"), key="d", content="\n\nxyz"),
            trace_of("Q5", turn("\na<|end|>\n", "\n\nxy"), key="e"),
            trace_of("Q6", turn("\nabc\n", "\n\nxy"), key="f", status="empty_reasoning"),
        ]
    )
    reassemble()
    agreement = project.report("reassemble")["text_agreement"]
    counts = {"exact": 1, "whitespace": 1, "retokenized": 1, "other": 2}
    assert agreement == {"compared": 5, "share": 0.2, "stripped_exact": 1, **counts}
    assert project.rows("data/sequences/disagreements.jsonl") == [
        {
            "sample_id": "Q2_gen0",
            "kind": "whitespace",
            "position": 10,
            "generated": [10, *ids("abc"), THINK_END, *ids("\n\nxy"), END],
            "rebuilt": [10, *ids("abc\n"), THINK_END, *ids("\n\nxy"), END],
        },
        {
            "sample_id": "Q3_gen0",
            "kind": "retokenized",
            "position": 16,
            "generated": [*ids("\n\nxy"), 150, END],
            "rebuilt": [*ids("\n\nxy"), END],
        },
        {
            "sample_id": "Q4_gen0",
            "kind": "other",
            "position": 16,
            "generated": [*ids("\n\nxy"), END],
            "rebuilt": [*ids("\n\nxyz"), END],
        },
        {"sample_id": "Q5_gen0", "kind": "other", "reason": "text_not_exact"},
    ]
    assert "of 5 compared, 20.0% of the texts give their ids back" in capsys.readouterr().out


def test_the_same_ids_on_the_other_side_of_the_prompts_end_are_a_disagreement(
    project, traces, trace_of
):
    """The server's prompt held the think-start, which this template leaves to the verifier."""
    prompt = [USER, *ids("Q2"), END, ASSISTANT, THINK]
    token_ids = turn("\nabc\n", "\n\nxy")[1:]
    texts = {"reasoning": "\nabc\n", "content": "\n\nxy"}
    traces[1] = trace_of("Q2", token_ids, prompt=prompt, key="k2", **texts)
    store(traces)
    reassemble()
    [shown] = [
        r for r in project.rows("data/sequences/disagreements.jsonl") if r["sample_id"] == "Q2_gen0"
    ]
    assert (shown["kind"], shown["position"]) == ("other", len(prompt) - 1)


def test_examples_of_disagreement_are_few(project, trace_of):
    names = [f"Q{n:02}" for n in range(30)]
    project.ask(*names)
    store([trace_of(name, turn("abc", "xy"), key=name) for name in names])
    reassemble()
    agreement = project.report("reassemble")["text_agreement"]
    assert (agreement["compared"], agreement["whitespace"], agreement["share"]) == (30, 30, 0.0)
    shown = project.rows("data/sequences/disagreements.jsonl")
    assert [row["sample_id"] for row in shown] == [f"{name}_gen0" for name in names[:10]]


def test_the_familys_white_space_is_proved_on_texts_without_it(project, trace_of):
    """The server gives its texts with their newlines, so a wrong family would agree as well."""
    names = ["Q1", "Q2", "Q3"]
    project.ask(*names)
    store([trace_of(name, turn("\nabc\n", "\n\nxy"), key=name) for name in names])
    reassemble()
    agreement = project.report("reassemble")["text_agreement"]
    assert (agreement["exact"], agreement["stripped_exact"]) == (3, 3)
    project.set(**{"family.custom": FAMILY | {"after_think_end": "\n"}})
    reassemble()
    agreement = project.report("reassemble")["text_agreement"]
    assert (agreement["exact"], agreement["stripped_exact"]) == (3, 0)


def test_answers_without_ids_alone_name_the_way_out(project, trace_of):
    store([trace_of(f"Q{n}", [], prompt=[], usage={}, key=f"{n}") for n in range(1, 7)])
    with pytest.raises(DataError, match=r"6 no_token_ids; reassemble\.source: ids_else_text"):
        reassemble()


def test_rows_without_ids_are_not_compared(project, traces, trace_of):
    project.set(**{"reassemble.source": "ids_else_text"})
    for place in (0, 1):
        name = f"Q{place + 1}"
        traces[place] = trace_of(
            name, [], prompt=[], usage={}, key=name, reasoning="a", content="b"
        )
    store(traces)
    reassemble()
    report = project.report("reassemble")
    assert (report["rebuilt"], report["text_agreement"]["compared"]) == (2, 3)


def test_nothing_to_compare_is_no_share_of_nothing(project, trace_of):
    project.set(**{"reassemble.source": "text"})
    store(
        [
            trace_of(f"Q{n}", [], prompt=[], usage={}, key=f"{n}", reasoning="a", content="b")
            for n in range(1, 7)
        ]
    )
    reassemble()
    report = project.report("reassemble")
    assert (report["rebuilt"], report["rows_in"], report["train"]) == (6, 6, 5)
    counts = {"exact": 0, "whitespace": 0, "retokenized": 0, "other": 0}
    nothing = {"compared": 0, "share": None, "stripped_exact": 0}
    assert report["text_agreement"] == {**nothing, **counts}
    assert Path("data/sequences/disagreements.jsonl").read_bytes() == b""


class Refuses:
    """A rebuilder to which no text is exact, so that each answer compared is an example."""

    def rebuild(self, trace: dict[str, Any]) -> None:
        raise Rejected(SequenceRejection.TEXT_NOT_EXACT)


def compared(rows: list[dict[str, Any]], max_tokens: int) -> list[str]:
    """The answers that are chosen for comparison."""
    from pipeline.agreement import ComparisonSample

    sample = ComparisonSample(max_tokens)
    for row in rows:
        sample.add(row)
    shares, examples = sample.judge(Refuses())
    assert shares["compared"] == shares["other"] == len(examples)
    return [example["sample_id"] for example in examples]


def answer(key: str, num_tokens: int = 10, **changes: Any) -> dict[str, Any]:
    ids = {"prompt_token_ids": [1] * 4, "token_ids": [2] * (num_tokens - 4)}
    return {"sample_id": key[0], "key": key, "status": "ok", **ids, **changes}


@settings(deadline=None)
@given(order=st.permutations("abcdefgh"), max_tokens=st.integers(10, 100))
def test_the_smallest_keys_are_compared_up_to_so_many_tokens(order, max_tokens):
    chosen = compared([answer(key * 64) for key in order], max_tokens)
    assert chosen == list("abcdefgh"[: max_tokens // 10])


@given(order=st.permutations([("a", 50), ("b", 100), ("c", 150), ("d", 20)]))
def test_a_short_answer_takes_no_place_from_a_smaller_key(order):
    assert compared([answer(key, num_tokens) for key, num_tokens in order], 200) == ["a", "b"]


def test_two_answers_may_have_one_key():
    assert compared([answer("a"), answer("a")], 100) == ["a", "a"]


def test_one_answer_is_compared_however_long_it_is():
    assert compared([answer("a", 500)], 10) == ["a"]
    assert compared([answer("b", 500), answer("a", 500), answer("c", 500)], 10) == ["a"]


def test_what_cannot_train_or_has_no_ids_is_not_compared():
    rows = [
        answer("a", status="looping"),
        answer("b", status="failed"),
        answer("c", token_ids=[]),
        answer("d", prompt_token_ids=[]),
        answer("e", status=CUT),
        answer("f", status=CUT_LATE),
    ]
    assert compared(rows, 1000) == ["e", "f"]
