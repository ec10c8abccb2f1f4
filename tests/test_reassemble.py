"""Exact sequences: ids as served, mask on what was generated, a reason for each row left out."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import DataError, ParamsError
from pipeline.params import Reassemble
from pipeline.resume import jsonl, write_bytes
from tests.fake_server import (
    ASSISTANT,
    END,
    SYSTEM,
    THINK,
    THINK_END,
    USER,
    VOCAB_SIZE,
    ids,
    prompt_ids,
    written,
)

pytestmark = pytest.mark.timeout(120)  # the first import of speculators takes its time
QUESTION = [USER, *ids("Q"), END, ASSISTANT]
KEEP = Reassemble(truncated="keep", draft_vocab_size=64)
DROP = Reassemble(truncated="drop", draft_vocab_size=64)


def turn(reasoning: str, answer: str) -> list[int]:
    return [THINK, *ids(reasoning), THINK_END, *ids(answer), END]


def sequence(trace: dict, verifier, params: Reassemble = KEEP, *, thinking: bool = True) -> dict:
    from pipeline.reassemble import sequence_of

    prompt = {"index": 7, "split": "train", "source": "test"}
    return sequence_of(prompt, trace, verifier, params, thinking=thinking)


def reason(trace: dict, verifier, params: Reassemble = KEEP, *, thinking: bool = True) -> str:
    from pipeline.reassemble import Rejected

    with pytest.raises(Rejected) as caught:
        sequence(trace, verifier, params, thinking=thinking)
    return str(caught.value.reason)


# one row


def test_a_sequence_is_the_prompts_ids_and_the_generated_ones(verifier, trace_of):
    row = sequence(trace_of("Q", turn("abc", "xy")), verifier)
    assert row == {
        "input_ids": [USER, 81, END, ASSISTANT, THINK, 97, 98, 99, THINK_END, 120, 121, END],
        "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        "seq_len": 12,
        "sample_id": "Q_gen0",
        "key": "k",
        "prompt_index": 7,
        "source": "test",
        "status": "ok",
        "reasoning_start": 5,
        "reasoning_end": 8,
        "answer_start": 9,
        "answer_end": 11,
    }


def test_a_prefilled_think_token_is_not_supervised(verifier, trace_of):
    trace = trace_of("Q", turn("abc", "xy")[1:], prompt=[*QUESTION, THINK])
    row = sequence(trace, verifier)
    assert row["input_ids"] == [*QUESTION, *turn("abc", "xy")]
    assert row["loss_mask"] == [0] * 5 + [1] * 7
    assert (row["reasoning_start"], row["reasoning_end"]) == (5, 8)


@pytest.mark.parametrize(
    ("token_ids", "status", "spans"),
    [
        ([THINK, *ids("abc")], "truncated_in_reasoning", (5, 8, 8, 8)),
        ([THINK, *ids("abc"), THINK_END, *ids("x")], "truncated_in_answer", (5, 8, 9, 10)),
        ([THINK, *ids("abc"), THINK_END], "truncated_in_answer", (5, 8, 9, 9)),
    ],
)
def test_a_cut_answer_is_kept_as_it_is_or_dropped(verifier, trace_of, token_ids, status, spans):
    trace = trace_of("Q", token_ids, "length", status=status)
    row = sequence(trace, verifier)
    assert row["input_ids"] == [*QUESTION, *token_ids]  # no </think>, no end of turn put in
    names = ("reasoning_start", "reasoning_end", "answer_start", "answer_end")
    assert tuple(row[name] for name in names) == spans
    assert reason(trace, verifier, DROP) == "truncated"


def test_dropping_cut_answers_keeps_finished_ones(verifier, trace_of):
    assert sequence(trace_of(), verifier, DROP)["status"] == "ok"


def test_a_closing_token_in_the_answer_stays_where_it_was_generated(verifier, trace_of):
    token_ids = [*turn("abc", "close with ")[:-1], THINK_END, END]
    row = sequence(trace_of("Q", token_ids), verifier)
    assert row["input_ids"][-2:] == [THINK_END, END]
    assert row["reasoning_end"] == 8
    assert row["answer_end"] == row["seq_len"] - 1


def test_text_is_never_used(verifier, trace_of):
    """Re-encoding would give other ids (B10), and the marker is spelt in the reasoning."""
    token_ids = turn("a</think>b", "xy")
    trace = trace_of("Q", token_ids, reasoning=None, content="something else")
    assert sequence(trace, verifier)["input_ids"] == [*QUESTION, *token_ids]


def test_without_thinking_there_is_an_answer_and_an_empty_reasoning(verifier, trace_of):
    prompt = [*QUESTION, THINK, THINK_END]
    trace = trace_of("Q", [*ids("xy"), END], prompt=prompt)
    row = sequence(trace, verifier, thinking=False)
    assert (row["reasoning_start"], row["reasoning_end"]) == (6, 6)
    assert (row["answer_start"], row["answer_end"]) == (6, 8)
    assert sum(row["loss_mask"]) == 3


def test_special_tokens_in_the_prompt_are_the_prompts_own(verifier, trace_of):
    """A user typed them; the server's ids say so, and nothing of it is supervised."""
    prompt = [SYSTEM, 83, END, USER, THINK, THINK_END, END, ASSISTANT]
    row = sequence(trace_of("Q", turn("abc", "xy"), prompt=prompt), verifier)
    assert row["loss_mask"] == [0] * 8 + [1] * 8
    assert row["reasoning_start"] == 9


@given(
    reasoning=st.lists(st.integers(65, 122), min_size=1, max_size=30),
    answer=st.lists(st.integers(65, 122), min_size=1, max_size=30),
    prefilled=st.booleans(),
)
def test_mask_and_spans_account_for_every_token(reasoning, answer, prefilled):
    from pipeline.verifier import VerifierIdentity
    from tests.conftest import verifier_json

    prompt = [*QUESTION, THINK] if prefilled else QUESTION
    generated = [*([] if prefilled else [THINK]), *reasoning, THINK_END, *answer, END]
    trace = {
        "sample_id": "s",
        "key": "k",
        "status": "ok",
        "source": "x",
        "messages": [],
        "finish_reason": "stop",
        "prompt_token_ids": prompt,
        "token_ids": generated,
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(generated)},
    }
    row = sequence(trace, VerifierIdentity.model_validate(verifier_json()))
    assert sum(row["loss_mask"]) == len(generated)
    assert row["input_ids"][row["reasoning_start"] : row["reasoning_end"]] == reasoning
    assert row["input_ids"][row["answer_start"] : row["answer_end"]] == answer
    assert len(row["input_ids"]) == len(row["loss_mask"]) == row["seq_len"]


# rejections


@pytest.mark.parametrize(
    "status",
    [
        "empty_reasoning",
        "empty_answer",
        "unclosed_reasoning",
        "parser_conflict",
        "looping",
        "garbage",
        "aborted",
        "tool_call",
        "thinking_off_by_user",
        "rejected_by_server",
        "timed_out",
        "failed",
    ],
)
def test_a_status_that_is_no_finished_thought_is_the_reason(verifier, trace_of, status):
    assert reason(trace_of(status=status), verifier) == status


CUT = "truncated_in_reasoning"


@pytest.mark.parametrize(
    ("token_ids", "finish", "status", "expected"),
    [
        ([*ids("xy"), END], "stop", "ok", "think_start"),
        ([THINK, THINK, *ids("a"), THINK_END, *ids("x"), END], "stop", "ok", "think_start"),
        ([THINK, *ids("abc"), END], "stop", "ok", "think_end"),
        ([THINK, *ids("a"), THINK_END, *ids("x")], "length", CUT, "think_end"),
        ([THINK, *ids("a"), THINK_END, END], "stop", "ok", "no_answer"),
        (turn("abc", "xy")[:-1], "stop", "ok", "end_of_turn"),
        (turn("abc", "xy"), "length", "truncated_in_answer", "end_of_turn"),
        ([THINK, 97, USER, 98, THINK_END, *ids("x"), END], "stop", "ok", "control_token"),
        ([THINK, *ids("a"), THINK_END, *ids("x"), END, END], "stop", "ok", "control_token"),
        ([THINK, *ids("a"), THINK_END, 120, ASSISTANT, END], "stop", "ok", "control_token"),
        ([THINK, *ids("a"), SYSTEM], "length", CUT, "control_token"),
    ],
)
def test_ids_that_break_an_invariant_are_rejected(
    verifier, trace_of, token_ids, finish, status, expected
):
    assert reason(trace_of("Q", token_ids, finish, status=status), verifier) == expected


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 4, "completion_tokens": 9},
        {"prompt_tokens": 5, "completion_tokens": 8},
        {"prompt_tokens": 4},
        {},
    ],
)
def test_counts_that_differ_from_what_was_billed_are_rejected(verifier, trace_of, usage):
    trace = trace_of("Q", turn("abc", "xy"), usage=usage)
    assert reason(trace, verifier) == "usage"
    trace["usage"] = {"prompt_tokens": 4, "completion_tokens": 8}
    assert sequence(trace, verifier)["seq_len"] == 12


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("ok", "no_token_ids"),
        ("truncated_in_reasoning", "no_token_ids"),
        ("truncated_in_answer", "no_token_ids"),
        ("empty_reasoning", "empty_reasoning"),
        ("parser_conflict", "parser_conflict"),
        ("rejected_by_server", "rejected_by_server"),
        ("failed", "failed"),
    ],
)
@pytest.mark.parametrize("params", [KEEP, DROP])
def test_a_text_without_token_ids_is_no_sequence(verifier, trace_of, params, status, expected):
    trace = trace_of("Q", [], prompt=[], status=status, reasoning="abc", content="xy", usage={})
    assert reason(trace, verifier, params) == expected


def test_an_answer_of_no_tokens_is_not_one_without_token_ids(verifier, trace_of):
    trace = trace_of("Q", [], "length", status=CUT)
    assert reason(trace, verifier) == "think_start"


# the draft vocabulary


def mapping(frequency: dict[int, int], num: int, verifier, vocab_size: int = 8):
    from collections import Counter

    from pipeline.reassemble import vocabulary_mapping

    small = verifier.model_copy(
        update={"think_start_id": 5, "think_end_id": 7, "end_ids": [2], "vocab_size": vocab_size}
    )
    return vocabulary_mapping(Counter(frequency), num, small)


def test_the_mapping_is_offsets_and_a_mask(verifier):
    """Targets {0, 2, 5, 7} of 8: the known example d2t [0, 1, 3, 4]."""
    d2t, t2d = mapping({0: 9, 2: 8, 5: 7, 7: 6, 1: 1}, 4, verifier)
    assert d2t.tolist() == [0, 1, 3, 4]
    assert t2d.astype(int).tolist() == [1, 0, 1, 0, 0, 1, 0, 1]
    assert d2t.dtype == "int64"
    assert t2d.dtype == "bool"


@pytest.mark.parametrize(
    "frequency",
    [
        {},
        {0: 100, 1: 90, 3: 80, 4: 70, 6: 60},  # think and end tokens never seen
        {0: 1, 1: 1, 3: 1, 4: 1, 6: 1},
        {5: 1},
        dict.fromkeys(range(8), 3),
    ],
)
@pytest.mark.parametrize("num", [3, 4, 6, 8])
def test_think_and_end_tokens_are_always_in_and_the_size_is_exact(verifier, frequency, num):
    d2t, t2d = mapping(frequency, num, verifier)
    targets = [index + offset for index, offset in enumerate(d2t.tolist())]
    assert len(targets) == num
    assert targets == sorted(set(targets))
    assert [token for token, known in enumerate(t2d) if known] == targets
    assert {2, 5, 7} <= set(targets) <= set(range(8))


def test_the_most_frequent_tokens_get_the_places_that_are_left(verifier):
    d2t, _ = mapping({0: 1, 1: 5, 3: 9, 4: 7, 6: 2}, 5, verifier)
    assert [index + offset for index, offset in enumerate(d2t.tolist())] == [2, 3, 4, 5, 7]


def test_a_draft_vocabulary_too_small_for_the_markers_is_refused(verifier):
    with pytest.raises(ParamsError, match=r"reassemble\.draft_vocab_size 2"):
        mapping({}, 2, verifier)


# the stage


@pytest.fixture
def traces(project, trace_of):
    """Six answers as `generate` leaves them: Q1 held out, Q4 without reasoning, Q5 cut."""
    rows = [trace_of(f"Q{n}", key=f"k{n}") for n in range(1, 7)]
    rows[3] = trace_of("Q4", turn("", "42"), key="k4", status="empty_reasoning")
    rows[4] = trace_of("Q5", [THINK, *ids("and so on")], "length", key="k5", status=CUT)
    write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(rows))
    return rows


def reassemble() -> None:
    from pipeline import reassemble

    reassemble.main()


def test_rows_in_are_rows_out_and_rows_rejected(project, traces):
    reassemble()
    report = project.report("reassemble")
    assert (report["rows_in"], report["held_out"], report["train"]) == (6, 1, 4)
    assert {k: n for k, n in report["rejected"].items() if n} == {"empty_reasoning": 1}
    assert {k: n for k, n in report["kept_by_status"].items() if n} == {"ok": 4, CUT: 1}
    rejected = project.rows("data/sequences/rejected.jsonl")
    assert rejected == [{"sample_id": "Q4_gen0", "reason": "empty_reasoning"}]
    # "\nI recall Q?\n" is 13 characters, Q5's thought 9
    assert report["reasoning_tokens"]["max"] == 13
    assert report["reasoning_tokens"]["mean"] == round((4 * 13 + 9) / 5, 1)
    assert report["supervised_tokens"] == 4 * len(written("Q1")) + 10
    assert report["tokens"] == report["supervised_tokens"] + 5 * len(
        prompt_ids([{"role": "user", "content": "Q1"}])
    )


def test_dropped_cut_answers_are_counted_too(project, traces):
    project.set(**{"reassemble.truncated": "drop"})
    reassemble()
    report = project.report("reassemble")
    assert report["rejected"]["truncated"] == 1
    assert report["rows_in"] == report["held_out"] + report["train"] + 2


def test_both_folders_load_with_datasets_and_hold_the_ids(project, traces):
    import datasets

    reassemble()
    train = datasets.load_from_disk("data/sequences/train")
    held_out = datasets.load_from_disk("data/sequences/held_out")
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
    write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(traces))
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
    outside = project.report("reassemble")["held_out_tokens_outside_draft_vocabulary"]
    assert outside == {"reasoning": 14, "answer": 1}


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


@pytest.mark.parametrize("change", ["one missing", "one more", "other order"])
def test_traces_that_do_not_answer_the_prompts_are_an_error(project, traces, trace_of, change):
    rows = {
        "one missing": traces[:-1],
        "one more": [*traces, trace_of("Q7")],
        "other order": traces[::-1],
    }[change]
    write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(rows))
    with pytest.raises(DataError, match=r"dvc repro generate"):
        reassemble()


def test_nothing_left_to_train_on_is_an_error_with_the_reasons(project, traces, trace_of):
    rows = [trace_of("Q1")] + [trace_of(f"Q{n}", status="empty_reasoning") for n in range(2, 7)]
    write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(rows))
    with pytest.raises(DataError, match=r"no train sequence.*5 empty_reasoning"):
        reassemble()


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused(project, traces):
    project.set(**{"reassemble.draft_vocab_size": VOCAB_SIZE + 1})
    with pytest.raises(ParamsError, match=f"{VOCAB_SIZE + 1}, more than the verifier's"):
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
        rows = [trace_of(name, sample_id=f"{name[0]}_gen{name[1:]}", key=name) for name in names]
        write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(rows))

    return write


def sequences(split: str) -> list[tuple[int, str]]:
    import datasets

    found = datasets.load_from_disk(f"data/sequences/{split}")
    return list(zip(found["prompt_index"][:], found["sample_id"][:], strict=True))


def test_each_turn_is_a_sequence_of_its_conversations_side(project, conversations, answers):
    conversations(A=2, B=0, C=11)
    answers("A0", "A1", "A2", "B0", *(f"C{n}" for n in range(12)))
    reassemble()
    assert sequences("held_out") == [(0, "A_gen0"), (0, "A_gen1"), (0, "A_gen2")]
    assert sequences("train") == [(1, "B_gen0"), *((2, f"C_gen{n}") for n in range(12))]
    report = project.report("reassemble")
    assert (report["rows_in"], report["held_out"], report["train"]) == (16, 3, 13)


def test_a_conversation_may_stop_before_its_last_turn(conversations, answers):
    conversations(A=2, B=2)
    answers("A0", "B0", "B1")
    reassemble()
    assert sequences("held_out") == [(0, "A_gen0")]
    assert sequences("train") == [(1, "B_gen0"), (1, "B_gen1")]


def test_traces_go_on_in_the_next_part(conversations, answers, trace_of):
    conversations(A=1, B=1)
    answers("A0", "A1")
    rows = [trace_of("B", sample_id=f"B_gen{n}", key=f"B{n}") for n in range(2)]
    write_bytes(Path("data/traces/part-00001.jsonl"), jsonl(rows))
    reassemble()
    assert sequences("train") == [(1, "B_gen0"), (1, "B_gen1")]


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


def test_a_text_without_token_ids_is_counted(project, traces, trace_of):
    traces[1] = trace_of("Q2", [], prompt=[], key="k2", usage={})
    write_bytes(Path("data/traces/part-00000.jsonl"), jsonl(traces))
    reassemble()
    rejected = project.report("reassemble")["rejected"]
    assert {k: n for k, n in rejected.items() if n} == {"empty_reasoning": 1, "no_token_ids": 1}
