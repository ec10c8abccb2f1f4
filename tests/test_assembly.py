"""One answer as a sequence: ids as served, phases, what is learnt, a reason for each row left out.

A sequence is written in letters, "|" where the verifier went on: "UQEA|TabCxyE" is the question
"Q" and the answer "xy" after the thought "ab". U, A, S open a user's, the assistant's and the
system's turn, E ends one, T and C are think-start and think-end, B is BOS; all else is text.

Numbers like B8 are the cases of reassembly that this project collected from reports elsewhere.
"""

import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.assembly import Assembler, Phased, cut, loss_mask, without_reasoning
from pipeline.params import Params, Reassemble
from pipeline.reasoning import judge
from pipeline.records import SEQUENCE_COLUMNS, Rejected
from pipeline.verifier import VerifierIdentity, load_tokenizer
from tests.conftest import SMALL, shipped_params, verifier_json
from tests.fake_server import ASSISTANT, END, SYSTEM, THINK, THINK_END, USER
from tests.fake_tokenizer import TEMPLATE, write_tokenizer

pytestmark = pytest.mark.timeout(120)  # the first import of transformers takes its time
many = settings(max_examples=300, deadline=None)
BOS, OTHER_END = 206, 207
LETTERS = {"U": USER, "A": ASSISTANT, "S": SYSTEM, "E": END, "T": THINK, "C": THINK_END, "B": BOS}
PROMPT = {"index": 7, "split": "train", "source": "test"}
SPANS = ("reasoning_start", "reasoning_end", "answer_start", "answer_end")
CUT, CUT_LATE = "truncated_in_reasoning", "truncated_in_answer"
WHOLE = "UQEA|TabcCxyE"
# Variants of the fake's template: it opens the think block, and goes on to the line's end; it knows
# no switch; it writes a BOS.
PREFILLED = TEMPLATE.replace("{% endif %}{% endif %}", "{% else %}<think>{% endif %}{% endif %}")
PREFILLED_LINE = PREFILLED.replace("<think>{% endif %}", "<think>\n{% endif %}")
NO_SWITCH = TEMPLATE.replace("<think></think>", "")
WITH_BOS = "<s>" + TEMPLATE
TEMPLATES = {"UQEA": TEMPLATE, "UQEAT": PREFILLED, "UQEAT\n": PREFILLED_LINE}


def tokens(letters: str) -> list[int]:
    return [LETTERS.get(letter, ord(letter)) for letter in letters if letter != "|"]


def bits(mask: str) -> list[int]:
    """A mask, written in groups."""
    return [int(bit) for bit in mask.replace(" ", "")]


@cache
def fake_verifier() -> VerifierIdentity:
    return VerifierIdentity.model_validate(verifier_json())


@cache
def verifier_with_bos() -> VerifierIdentity:
    changes = {"bos_id": BOS, "control_ids": [*verifier_json()["control_ids"], BOS]}
    return VerifierIdentity.model_validate(verifier_json() | changes)


@cache
def tokenizer(template: str = TEMPLATE) -> Any:
    """The fake's, with another template. It would put a BOS before every text, as many do."""
    from tokenizers.processors import TemplateProcessing

    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        loaded = load_tokenizer(Path(folder), trust_remote_code=False)
    loaded.chat_template = template
    loaded.add_special_tokens({"bos_token": "<s>"})
    loaded.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return loaded


@cache
def small_params() -> Params:
    """params.yaml with the values of the fake's world."""
    values = {name: dict(section) for name, section in shipped_params().items()}
    values["generate"]["gate"] = dict(values["generate"]["gate"])
    for key, value in SMALL.items():
        section, *between, name = key.split(".")
        (values[section][between[0]] if between else values[section])[name] = value
    return Params.model_validate(values)


def params_of(*, thinking: bool = True, **changes: Any) -> Params:
    """`params_of(truncated="drop")`: changes are of params.reassemble."""
    params = small_params()
    reassemble = Reassemble.model_validate(params.reassemble.model_dump() | changes)
    generate = params.generate.model_copy(update={"thinking": thinking})
    return params.model_copy(update={"reassemble": reassemble, "generate": generate})


def told(letters: str, **changes: Any) -> dict[str, Any]:
    """The trace of a sequence in letters, with the status that `generate` gives it."""
    asked, written = (tokens(part) for part in letters.split("|"))
    trace = {
        "sample_id": "q_gen0",
        "key": "k",
        "messages": [{"role": "user", "content": "Q"}],
        "finish_reason": "stop" if written[-1:] == [END] else "length",
        "prompt_token_ids": asked,
        "token_ids": written,
        "usage": {"prompt_tokens": len(asked), "completion_tokens": len(written)},
    }
    thinking = asked[-2:] != [THINK, THINK_END]
    status = judge(trace, fake_verifier(), thinking=thinking)
    return trace | {"status": status.value} | changes


def text(reasoning: str | None, content: str | None, **changes: Any) -> dict[str, Any]:
    """The trace of an answer without ids to the question "Q"."""
    trace = {"reasoning": reasoning, "content": content, "status": "ok", "usage": {}}
    return told("|") | trace | {"finish_reason": "stop"} | changes


def row(
    trace: dict[str, Any] | str,
    *,
    template: str = "",
    thinking: bool | None = None,
    verifier: VerifierIdentity | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """The row of a trace, with lists for arrays. How its prompt ends tells the template and whether
    thinking is on, unless they are given; `changes` are of params.reassemble."""
    trace = told(trace) if isinstance(trace, str) else trace
    asked = trace["prompt_token_ids"]
    if thinking is None:
        thinking = asked[-2:] != [THINK, THINK_END]
    line = asked[-2:] == [THINK, 10]
    fits = PREFILLED_LINE if line else PREFILLED if asked[-1:] == [THINK] else TEMPLATE
    params = params_of(thinking=thinking, **changes)
    assembler = Assembler(params, verifier or fake_verifier(), tokenizer(template or fits))
    made = assembler.row(PROMPT, {"source": "test", **trace})
    return made | {name: made[name].tolist() for name in ("input_ids", "loss_mask")}


def reason(trace: dict[str, Any] | str, **how: Any) -> str:
    with pytest.raises(Rejected) as caught:
        row(trace, **how)
    return str(caught.value.reason)


def spans(made: dict[str, Any]) -> tuple[int, ...]:
    return tuple(made[name] for name in SPANS)


# one row


def test_a_sequence_is_the_prompts_ids_and_the_generated_ones():
    assert row("UQEA|TabcCxyE") == {
        "input_ids": [USER, 81, END, ASSISTANT, THINK, 97, 98, 99, THINK_END, 120, 121, END],
        "loss_mask": [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
        "seq_len": 12,
        "sample_id": "q_gen0",
        "key": "k",
        "prompt_index": 7,
        "source": "test",
        "status": "ok",
        "generated_start": 4,
        "reasoning_start": 5,
        "reasoning_end": 8,
        "answer_start": 9,
        "answer_end": 11,
        "rebuilt": False,
        "control_text": False,
        "cut_in": "none",
        "ablation": "none",
    }


def test_a_row_has_the_columns_and_types_of_data_sequences():
    made = Assembler(params_of(), fake_verifier(), tokenizer()).row(PROMPT, told(WHOLE))
    assert tuple(made) == SEQUENCE_COLUMNS
    assert (made["input_ids"].dtype, made["loss_mask"].dtype) == ("int64", "int8")


@pytest.mark.parametrize(
    ("letters", "mask", "expected"),
    [
        ("UQEAT|abcCxyE", "00000 111 1 11 1", (5, 8, 9, 11)),
        # DeepSeek-R1, MiniMax-M2: the prompt ends with "<think>" and a newline.
        ("UQEAT\n|abcCxyE", "000000 111 1 11 1", (6, 9, 10, 12)),
        # GLM-4.5 writes a newline itself, and then the think-start.
        ("UQEA|\nTabcCxyE", "0000 1 1 111 1 11 1", (6, 9, 10, 12)),
    ],
)
def test_what_the_prompt_opens_is_not_supervised_and_what_is_generated_is(letters, mask, expected):
    made = row(letters)
    assert made["input_ids"] == tokens(letters)
    assert made["loss_mask"] == bits(mask)
    assert made["generated_start"] == letters.index("|")
    assert spans(made) == expected


@pytest.mark.parametrize(
    ("letters", "status", "expected"),
    [
        ("UQEA|T", CUT, (5, 5, 5, 5)),
        ("UQEA|Tabc", CUT, (5, 8, 8, 8)),
        ("UQEAT|abc", CUT, (5, 8, 8, 8)),
        ("UQEA|TabcC", CUT_LATE, (5, 8, 9, 9)),
        ("UQEA|TabcCx", CUT_LATE, (5, 8, 9, 10)),
    ],
)
def test_a_cut_answer_is_kept_as_it_is_or_dropped(letters, status, expected):
    made = row(letters)
    assert made["input_ids"] == tokens(letters)  # no </think>, no end of turn put in
    assert spans(made) == expected
    # The verifier ended here, and not reassemble.max_tokens.
    assert (made["status"], made["cut_in"]) == (status, "none")
    assert reason(letters, truncated="drop") == "truncated"


def test_dropping_cut_answers_keeps_finished_ones():
    assert row(WHOLE, truncated="drop")["status"] == "ok"


def test_without_thinking_there_is_an_answer_and_an_empty_reasoning():
    made = row("UQEATC|xyE")
    assert spans(made) == (6, 6, 6, 8)
    assert made["loss_mask"] == bits("000000 11 1")


def test_the_think_tokens_of_a_thought_are_not_adjacent():
    """B1: a template would have dropped the reasoning of a finished turn."""
    found = row("UQEA|Tr1Ca1E")["input_ids"]
    assert found[5:7] == tokens("r1")
    assert (THINK, THINK_END) not in pairwise(found)


@pytest.mark.parametrize(
    "read",
    [
        {"reasoning": None, "content": "a1"},
        {"reasoning": "", "content": "a1"},
        {"reasoning": None, "content": "a1", "other_fields": ["thinking"]},
        {"reasoning": "something else", "content": None},
        {"reasoning": None, "content": "<think>r1</think>a1", "unsplit": True},
    ],
)
def test_text_is_never_used_where_there_are_ids(read):
    """B2, B3: whatever field a server puts the reasoning in, the ids are the same."""
    assert row(told("UQEA|Tr1Ca1E", **read)) == row("UQEA|Tr1Ca1E")


def test_text_that_would_give_other_ids_changes_nothing():
    """B10: decoded and encoded again, the spelt marker is one token and \x96 (150) is none."""
    made = row(told("UQEA|Ta</think>b\x96CxyE", reasoning="a", content="bxy"))
    assert made["input_ids"] == tokens("UQEATa</think>b\x96CxyE")
    assert spans(made) == (5, 16, 17, 19)


@pytest.mark.parametrize(
    ("letters", "how"),
    [
        ("UQEA|TabcCxyE", {}),
        ("UQEAT|abcCxyE", {}),
        ("UQEATC|xyE", {}),
        ("UQEA|TCxyE", {"thinking": False, "template": NO_SWITCH}),
    ],
    ids=["reasoning", "prefilled", "thinking off", "an empty block of its own"],
)
def test_as_many_tokens_are_learnt_as_were_generated(letters, how):
    """B17: the mask comes from where generation began, not from a pattern in text."""
    asked, written = letters.split("|")
    trace = told(letters, status="ok")
    assert row(trace, **how)["loss_mask"] == [0] * len(asked) + [1] * len(written)


def test_decoding_the_ids_gives_prompt_and_answer():
    """B22: the readable twin is the ids decoded, so it cannot differ from them."""
    decoded = tokenizer().decode(row(WHOLE)["input_ids"], skip_special_tokens=False)
    assert decoded == "<|user|>Q<|end|><|assistant|><think>abc</think>xy<|end|>"


def test_a_later_turn_has_no_reasoning_of_an_earlier_one():
    """B21: the same turn has other tokens as history than as it was generated."""
    roles = ["user", "assistant", "user"]
    messages = [{"role": role, "content": "x"} for role in roles]
    one = told("Uq1EA|Tr1Ca1E", sample_id="c7_gen0", messages=messages[:1])
    two = told("Uq1EAa1EUq2EA|Tr2Ca2E", sample_id="c7_gen1", messages=messages)
    assert row(one)["sample_id"] == "c7_gen0"
    made = row(two)
    assert made["sample_id"] == "c7_gen1"
    assert made["input_ids"] == tokens("Uq1EAa1EUq2EATr2Ca2E")
    assert made["loss_mask"] == [0] * 13 + [1] * 7
    assert spans(made) == (14, 16, 17, 19)


TEXT_IDS = st.integers(0, 255).filter(lambda token: token not in fake_verifier().markers)


@many
@given(
    reasoning=st.lists(TEXT_IDS, max_size=30),
    answer=st.lists(TEXT_IDS, min_size=1, max_size=30),
    ahead=st.lists(TEXT_IDS, max_size=2),
    prompt=st.sampled_from(sorted(TEMPLATES)),
)
def test_mask_and_phases_account_for_every_token(reasoning, answer, ahead, prompt):
    start = [*ahead, THINK] if prompt == "UQEA" else []
    written = [*start, *reasoning, THINK_END, *answer, END]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(written)}
    trace = told(f"{prompt}|E", status="ok", token_ids=written, usage=usage)
    made = row(trace, template=TEMPLATES[prompt])
    found, (begin, end, answer_start, answer_end) = made["input_ids"], spans(made)
    assert found[: made["generated_start"]] == tokens(prompt)
    assert found[made["generated_start"] : begin] == start
    assert found[begin:end] == reasoning
    assert found[end:answer_start] == [THINK_END]
    assert found[answer_start:answer_end] == answer
    assert found[answer_end:] == [END]
    assert made["loss_mask"] == [0] * len(prompt) + [1] * len(written)
    assert made["seq_len"] == len(found)


# what a user wrote into the question


# What a question spells, and what a server makes of it.
SPELT = [
    ("Print <think> now", "print T now"),
    ("Print </think> now", "print C now"),
    ("<|user|>", "U"),
    ("Ignore<|end|>", "ignoreE"),
    ("a<|end|><|assistant|><think>b", "aEATb"),
    ("<think>a</think>", "TaC"),
]


@pytest.mark.parametrize(("question", "served"), SPELT)
@pytest.mark.parametrize(("ahead", "written"), [("A", "TabcCxyE"), ("AT", "abcCxyE")])
def test_control_tokens_of_a_question_are_the_prompts_own(question, served, ahead, written):
    """B8: rejected, or kept as the server took them, marked, with nothing of it learnt; an end of
    turn among them ends no turn."""
    asked = f"U{served}E{ahead}"
    trace = told(f"{asked}|{written}", messages=[{"role": "user", "content": question}])
    assert reason(trace) == "control_text"
    made = row(trace, on_control_text="keep")
    assert made["control_text"]
    assert made["input_ids"] == tokens(asked + written)
    assert made["loss_mask"] == [0] * len(asked) + [1] * len(written)
    begin = len(asked) + written.index("a")
    assert spans(made) == (begin, begin + 3, begin + 4, begin + 6)


@pytest.mark.parametrize("asked", ["SsCEEUqEAaEUqEA", "SsEUqCEEAaEUqEA", "SsEUqEAaCEEUqEA"])
def test_control_tokens_are_found_in_every_turn(asked):
    """B8. The verifier's own earlier answer, with a think-end in it, is a message like any."""
    messages = [{"role": r, "content": "x"} for r in ("system", "user", "assistant", "user")]
    trace = told(f"{asked}|TabcCxyE", messages=messages)
    assert reason(trace) == "control_text"
    made = row(trace, on_control_text="keep")
    assert made["control_text"]
    assert made["loss_mask"] == [0] * len(asked) + [1] * 8
    assert spans(made) == (16, 19, 20, 22)


def test_the_markers_of_earlier_turns_are_no_control_text():
    messages = [{"role": r, "content": "x"} for r in ("system", "user", "assistant", "user")]
    assert not row(told("SsEUqEAaEUqEA|TabcCxyE", messages=messages))["control_text"]


def test_a_marker_in_ordinary_tokens_is_text():
    """B8: a server may well take "<think>" in a question for seven characters."""
    made = row("Uprint <think></think>EA|TabcCxyE")
    assert not made["control_text"]
    assert made["input_ids"] == tokens("Uprint <think></think>EATabcCxyE")


@pytest.mark.parametrize("on_control_text", ["reject", "keep"])
@pytest.mark.parametrize("asked", ["Q", "QEA", "UQA", "UQE", "UQAE", "UUUU"])
def test_a_prompt_without_the_templates_markers_is_another_templates(asked, on_control_text):
    trace = told(f"{asked}|TabcCxyE")
    assert reason(trace, on_control_text=on_control_text) == "other_template"


def test_a_prompt_without_the_think_start_of_its_template_is_another_templates():
    """B14: public copies of one template differ in it."""
    assert reason(WHOLE, template=PREFILLED) == "other_template"


@pytest.mark.parametrize("asked", ["UQEAT", "UQEAU", "UQTEAT"])
def test_nobody_writes_behind_the_last_message_but_the_template(asked):
    """B14: a server whose template opens the think block, where ours does not."""
    turn = "abcCxyE" if asked.endswith("T") else "TabcCxyE"
    how = {"template": TEMPLATE, "on_control_text": "keep"}
    assert reason(f"{asked}|{turn}", **how) == "other_template"


# BOS


@pytest.mark.parametrize(
    ("asked", "template"),
    [("BBUQEA", WITH_BOS), ("UQEA", WITH_BOS), ("BUQBEA", WITH_BOS), ("BUQEA", TEMPLATE)],
    ids=["double", "none", "in the question", "not the template's"],
)
@pytest.mark.parametrize("on_control_text", ["reject", "keep"])
def test_another_number_of_bos_than_the_templates_is_rejected(asked, template, on_control_text):
    """B11: at most one, and none where the template writes none (Kimi)."""
    how = {"template": template, "on_control_text": on_control_text}
    assert reason(f"{asked}|TabcCxyE", verifier=verifier_with_bos(), **how) == "bos"


def test_a_bos_that_is_not_at_the_beginning_is_another_templates():
    """B11"""
    how = {"template": WITH_BOS, "on_control_text": "keep", "verifier": verifier_with_bos()}
    assert reason("UBQEA|TabcCxyE", **how) == "other_template"


@pytest.mark.parametrize(("asked", "template"), [("BUQEA", WITH_BOS), ("UQEA", TEMPLATE)])
def test_as_many_bos_as_the_template_writes_is_right(asked, template):
    """B11"""
    made = row(f"{asked}|TabcCxyE", template=template, verifier=verifier_with_bos())
    assert made["input_ids"] == tokens(f"{asked}TabcCxyE")
    assert not made["control_text"]


def test_control_text_is_found_beside_a_bos():
    how = {"template": WITH_BOS, "verifier": verifier_with_bos()}
    assert reason("BUQTEA|TabcCxyE", **how) == "control_text"
    assert row("BUQTEA|TabcCxyE", **how, on_control_text="keep")["control_text"]


def test_a_bos_that_also_ends_turns_is_control_text():
    verifier = VerifierIdentity.model_validate(verifier_json() | {"bos_id": END})
    assert reason("UQEEA|TabcCxyE", verifier=verifier) == "control_text"


def test_a_bos_in_the_answer_is_a_control_token():
    assert reason("UQEA|TabcCxBE", verifier=verifier_with_bos()) == "control_token"


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
def test_a_status_that_is_no_finished_thought_is_the_reason(status):
    assert reason(told(WHOLE, status=status)) == status


@pytest.mark.parametrize(
    ("letters", "finish", "status", "expected"),
    [
        ("UQEA|xyE", "stop", "ok", "think_start"),
        ("UQEA|TTaCxE", "stop", "ok", "think_start"),
        ("UQEA|TaCTxE", "stop", "ok", "think_start"),
        ("UQEA|TaCxT", "length", CUT_LATE, "think_start"),
        ("UQEA|TaT", "length", CUT, "think_start"),
        ("UQEAT|TaCxE", "stop", "ok", "think_start"),
        ("UQEA|TabcE", "stop", "ok", "think_end"),
        ("UQEA|Tabc", "length", CUT_LATE, "think_end"),
        ("UQEA|TaCx", "length", CUT, "think_end"),
        ("UQEA|TaCE", "stop", "ok", "no_answer"),
        ("UQEA|TabcCxy", "stop", "ok", "end_of_turn"),
        ("UQEA|TabcCxyE", "length", CUT_LATE, "end_of_turn"),
        ("UQEA|TaUbCxE", "stop", "ok", "control_token"),
        ("UQEA|TaCxEE", "stop", "ok", "control_token"),
        ("UQEA|TaEbCxE", "stop", "ok", "control_token"),
        ("UQEA|TaCxAE", "stop", "ok", "control_token"),
        ("UQEA|UTabcCxyE", "stop", "ok", "control_token"),
        ("UQEA|TaS", "length", CUT, "control_token"),
    ],
)
def test_ids_that_break_an_invariant_are_rejected(letters, finish, status, expected):
    trace = told(letters, finish_reason=finish, status=status)
    assert reason(trace) == expected
    # An ablation is made of rows that pass, so it hides nothing.
    assert reason(trace, reasoning="drop") == expected


@pytest.mark.parametrize("end", [END, OTHER_END])
def test_any_end_id_of_the_verifier_ends_a_turn(end):
    two_ends = VerifierIdentity.model_validate(verifier_json() | {"end_ids": [END, OTHER_END]})
    trace = told("UQEA|TabcCxyE")
    made = row(trace | {"token_ids": [*trace["token_ids"][:-1], end]}, verifier=two_ends)
    assert made["input_ids"][-1] == end
    assert made["answer_end"] == 11
    inside = trace | {"token_ids": [*tokens("TabcCx"), end, END]}
    assert reason(inside, verifier=two_ends) == "control_token"


@pytest.mark.parametrize("answer", ["C", "Cx", "xCC"])
def test_a_further_think_end_in_the_answer_stays_where_it_was_generated(answer):
    made = row(told(f"UQEA|TabcC{answer}E", status="ok"))
    assert made["input_ids"] == tokens(f"UQEATabcC{answer}E")
    assert spans(made) == (5, 8, 9, 9 + len(answer))
    assert sum(made["loss_mask"]) == 6 + len(answer)


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 4, "completion_tokens": 9},
        {"prompt_tokens": 5, "completion_tokens": 8},
        {"prompt_tokens": 5, "completion_tokens": 7},
        {"prompt_tokens": 4},
        {},
    ],
)
def test_counts_that_differ_from_what_was_billed_are_rejected(usage):
    assert reason(told("UQEA|TabcCxyE", usage=usage)) == "usage"
    billed = {"prompt_tokens": 4, "completion_tokens": 8}
    assert row(told("UQEA|TabcCxyE", usage=billed))["seq_len"] == 12


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ("ok", "no_token_ids"),
        (CUT, "no_token_ids"),
        (CUT_LATE, "no_token_ids"),
        ("empty_reasoning", "empty_reasoning"),
        ("parser_conflict", "parser_conflict"),
        ("rejected_by_server", "rejected_by_server"),
        ("failed", "failed"),
    ],
)
@pytest.mark.parametrize("truncated", ["keep", "drop"])
def test_a_text_without_token_ids_is_no_sequence(truncated, status, expected):
    assert reason(text("abc", "xy", status=status), truncated=truncated) == expected


@pytest.mark.parametrize("letters", ["UQEA|", "UQEAT|", "UQEATC|", "|TabcCxyE"])
def test_ids_of_one_part_alone_are_no_token_ids(letters):
    assert reason(told(letters, status="ok")) == "no_token_ids"


@pytest.mark.parametrize(
    ("status", "how"),
    [(CUT, {"template": PREFILLED_LINE}), (CUT_LATE, {"thinking": False})],
)
def test_a_turn_of_no_tokens_would_end_with_a_generation_prompt(status, how):
    """B7"""
    trace = text("", "", status=status, finish_reason="length")
    assert reason(trace, source="text", **how) == "no_answer"


@many
@given(
    written=st.text(st.sampled_from("ababTCEU"), min_size=1, max_size=10),
    finish=st.sampled_from(["stop", "length"]),
    prompt=st.sampled_from(sorted(TEMPLATES)),
)
def test_a_turn_is_kept_exactly_if_it_has_the_right_form(written, finish, prompt):
    trace = told(f"{prompt}|{written}", finish_reason=finish)
    trace["status"] = judge(trace, fake_verifier(), thinking=True)
    form = {"stop": "[ab]+C[abC]+E", "length": "([ab]*|[ab]+C[abC]*)"}[finish]
    is_right = re.fullmatch(("[ab]*T" if prompt == "UQEA" else "") + form, written)
    try:
        made = row(trace)
    except Rejected:
        assert not is_right
        return
    assert is_right
    begin, end, answer_start, answer_end = spans(made)
    assert made["generated_start"] <= begin <= end <= answer_start <= answer_end
    assert made["loss_mask"].count(1) == len(written)


# what is learnt


@pytest.mark.parametrize(
    ("letters", "everything", "reasoning", "answer"),
    [
        ("UQEA|TabCxyE", "0000 1 11 1 11 1", "0000 1 11 1 00 1", "0000 0 00 1 11 1"),
        ("UQEAT|abCxyE", "00000 11 1 11 1", "00000 11 1 00 1", "00000 00 1 11 1"),
        ("UQEAT\n|abCxyE", "000000 11 1 11 1", "000000 11 1 00 1", "000000 00 1 11 1"),
        ("UQEA|\nTabCxyE", "0000 11 11 1 11 1", "0000 11 11 1 00 1", "0000 00 00 1 11 1"),
        ("UQEA|TabCxCE", "0000 1 11 1 11 1", "0000 1 11 1 00 1", "0000 0 00 1 11 1"),
        ("UQEA|Tab", "0000 1 11", "0000 1 11", None),
        ("UQEAT|ab", "00000 11", "00000 11", None),
        ("UQEA|TabC", "0000 1 11 1", "0000 1 11 1", "0000 0 00 1"),
        ("UQEA|TabCx", "0000 1 11 1 1", "0000 1 11 1 0", "0000 0 00 1 1"),
        ("UQEATC|xyE", "000000 11 1", "000000 00 1", "000000 11 1"),
        ("UQEATC|xy", "000000 11", None, "000000 11"),
    ],
)
def test_what_is_learnt(letters, everything, reasoning, answer):
    """The think-end and the end of the turn always are, where there are any."""
    masks = {"all_generated": everything, "reasoning": reasoning, "answer": answer}
    for train_on, mask in masks.items():
        if mask is None:
            assert reason(letters, train_on=train_on) == "nothing_to_learn"
        else:
            made = row(letters, train_on=train_on)
            assert (made["input_ids"], made["loss_mask"]) == (tokens(letters), bits(mask))


# the reasoning taken out


@pytest.mark.parametrize(
    ("letters", "left", "mask", "expected"),
    [
        ("UQEA|TabCxyE", "UQEA|xyE", "0000 11 1", (4, 4, 4, 6)),
        ("UQEAT|abCxyE", "UQEA|xyE", "0000 11 1", (4, 4, 4, 6)),
        ("UQEAT\n|abCxyE", "UQEA|xyE", "0000 11 1", (4, 4, 4, 6)),
        ("UQEA|\nTabCxyE", "UQEA|\nxyE", "0000 1 11 1", (5, 5, 5, 7)),
        ("UQEA|TabCxCE", "UQEA|xCE", "0000 11 1", (4, 4, 4, 6)),
        ("UQEA|TabCx", "UQEA|x", "0000 1", (4, 4, 4, 5)),
    ],
)
def test_a_dropped_reasoning_takes_its_think_tokens_along(letters, left, mask, expected):
    made = row(letters, reasoning="drop")
    assert made["input_ids"] == tokens(left)
    assert made["seq_len"] == len(tokens(left))
    assert made["generated_start"] == left.index("|")
    assert spans(made) == expected
    assert made["loss_mask"] == bits(mask)
    assert made["ablation"] == "reasoning_dropped"


@pytest.mark.parametrize(
    ("letters", "left", "mask", "expected"),
    [
        ("UQEA|TabCxyE", "UQEA|TCxyE", "0000 1 1 11 1", (5, 5, 6, 8)),
        ("UQEAT|abCxyE", "UQEAT|CxyE", "00000 1 11 1", (5, 5, 6, 8)),
        ("UQEAT\n|abCxyE", "UQEAT\n|CxyE", "000000 1 11 1", (6, 6, 7, 9)),
        ("UQEA|\nTabCxyE", "UQEA|\nTCxyE", "0000 1 1 1 11 1", (6, 6, 7, 9)),
        ("UQEA|TabCx", "UQEA|TCx", "0000 1 1 1", (5, 5, 6, 7)),
        ("UQEA|TabC", "UQEA|TC", "0000 1 1", (5, 5, 6, 6)),
    ],
)
def test_an_emptied_reasoning_leaves_its_think_tokens(letters, left, mask, expected):
    made = row(letters, reasoning="empty")
    assert made["input_ids"] == tokens(left)
    assert made["seq_len"] == len(tokens(left))
    assert made["generated_start"] == left.index("|")
    assert spans(made) == expected
    assert made["loss_mask"] == bits(mask)
    assert made["ablation"] == "reasoning_empty"


@pytest.mark.parametrize("reasoning", ["drop", "empty"])
@pytest.mark.parametrize("letters", ["UQEA|T", "UQEA|Tabc", "UQEAT|abc"])
def test_of_an_answer_that_was_cut_in_its_reasoning_nothing_would_be_left(letters, reasoning):
    assert reason(letters, reasoning=reasoning) == "no_answer"


def test_of_an_answer_that_was_cut_behind_its_reasoning_only_think_tokens_are_left():
    assert row("UQEA|TabC", reasoning="empty")["status"] == CUT_LATE
    assert reason("UQEA|TabC", reasoning="drop") == "nothing_to_learn"


@pytest.mark.parametrize(
    ("reasoning", "ablation"), [("drop", "reasoning_dropped"), ("empty", "reasoning_empty")]
)
def test_without_thinking_there_is_no_reasoning_to_take_out(reasoning, ablation):
    made = row("UQEATC|xyE", reasoning=reasoning)
    assert made == row("UQEATC|xyE") | {"ablation": ablation}


@pytest.mark.parametrize(
    ("reasoning", "train_on", "mask"),
    [
        ("drop", "answer", "0000 11 1"),
        ("empty", "answer", "0000 0 1 11 1"),
    ],
)
def test_of_an_ablated_row_too_only_what_is_wanted_is_learnt(reasoning, train_on, mask):
    made = row("UQEA|TabCxyE", reasoning=reasoning, train_on=train_on)
    assert made["loss_mask"] == bits(mask)


def test_a_users_think_start_is_not_where_the_block_begins():
    """B8: the last think-start of the prompt opens it."""
    how = {"on_control_text": "keep", "reasoning": "drop"}
    assert row("UTQEAT|abCxyE", **how)["input_ids"] == tokens("UTQEAxyE")


# length


@pytest.mark.parametrize(
    ("max_tokens", "expected", "num_learnt", "cut_in"),
    [
        (5, (5, 5, 5, 5), 1, "reasoning"),
        (7, (5, 7, 7, 7), 3, "reasoning"),
        (8, (5, 8, 8, 8), 4, "reasoning"),  # the think-end is the first token that is gone
        (9, (5, 8, 9, 9), 5, "answer"),
        (10, (5, 8, 9, 10), 6, "answer"),
        (11, (5, 8, 9, 11), 7, "answer"),  # only the end of the turn is gone
        (12, (5, 8, 9, 11), 8, "none"),
        (13, (5, 8, 9, 11), 8, "none"),
    ],
)
def test_a_sequence_that_is_too_long_is_cut(max_tokens, expected, num_learnt, cut_in):
    made = row("UQEA|TabcCxyE", max_tokens=max_tokens)
    assert made["input_ids"] == tokens("UQEATabcCxyE")[:max_tokens]
    assert made["seq_len"] == len(made["input_ids"])
    assert made["generated_start"] == 4
    assert spans(made) == expected
    assert made["loss_mask"] == [0] * 4 + [1] * num_learnt
    assert (made["cut_in"], made["status"]) == (cut_in, "ok")


@pytest.mark.parametrize("max_tokens", [1, 3, 4])
@pytest.mark.parametrize("on_too_long", ["drop", "cut"])
def test_a_cut_in_the_prompt_leaves_nothing_to_learn(max_tokens, on_too_long):
    assert reason(WHOLE, max_tokens=max_tokens, on_too_long=on_too_long) == "too_long"


@pytest.mark.parametrize("max_tokens", [5, 9, 11])
def test_a_sequence_that_is_too_long_can_be_dropped(max_tokens):
    assert reason(WHOLE, max_tokens=max_tokens, on_too_long="drop") == "too_long"
    assert row(WHOLE, max_tokens=12, on_too_long="drop")["seq_len"] == 12


@pytest.mark.parametrize(
    ("letters", "status", "cut_in"),
    [
        ("UQEA|Tabc", CUT, "reasoning"),
        ("UQEA|TabC", CUT_LATE, "reasoning"),
        ("UQEA|TaCx", CUT_LATE, "answer"),
        ("UQEATC|xy", CUT_LATE, "answer"),
    ],
)
def test_what_the_verifier_left_unfinished_can_be_cut_shorter(letters, status, cut_in):
    made = row(letters, max_tokens=7)
    assert (made["status"], made["cut_in"], made["seq_len"]) == (status, cut_in, 7)


@pytest.mark.parametrize(
    ("train_on", "max_tokens", "mask"),
    [
        ("answer", 8, None),
        ("answer", 9, "0000 0000 1"),
        ("answer", 10, "0000 0000 1 1"),
        ("reasoning", 5, "0000 1"),
        ("reasoning", 11, "0000 1111 1 00"),
    ],
)
def test_of_a_cut_sequence_too_only_what_is_wanted_is_learnt(train_on, max_tokens, mask):
    how = {"train_on": train_on, "max_tokens": max_tokens}
    if mask is None:
        assert reason("UQEA|TabcCxyE", **how) == "too_long"
    else:
        assert row("UQEA|TabcCxyE", **how)["loss_mask"] == bits(mask)


def test_the_length_is_that_of_what_is_left_without_reasoning():
    trace = told("UQEA|Ta long thoughtCxyE")
    assert reason(trace, max_tokens=7, on_too_long="drop") == "too_long"
    made = row(trace, max_tokens=7, on_too_long="drop", reasoning="drop")
    assert (made["seq_len"], made["cut_in"]) == (7, "none")
    assert row(trace, max_tokens=6, reasoning="drop")["cut_in"] == "answer"


@many
@given(
    num_reasoning=st.integers(0, 6),
    num_answer=st.integers(0, 6),
    end=st.sampled_from(["E", ""]),
    max_tokens=st.integers(1, 24),
    prompt=st.sampled_from(sorted(TEMPLATES)),
    train_on=st.sampled_from(["all_generated", "reasoning", "answer"]),
    reasoning=st.sampled_from(["keep", "drop", "empty"]),
)
def test_a_cut_leaves_a_beginning_with_something_to_learn(
    num_reasoning, num_answer, end, max_tokens, prompt, train_on, reasoning
):
    """…or nothing: no row has a mask of zeros, and none has a span beyond its end."""
    assume(train_on != "reasoning" or reasoning == "keep")
    start = "T" if prompt == "UQEA" else ""
    written = f"{start}{'r' * num_reasoning}C{'a' * num_answer}{end}"
    trace = told(f"{prompt}|{written}", status="ok" if end else CUT_LATE)
    how = {"train_on": train_on, "reasoning": reasoning}
    try:
        whole = row(trace, **how)
    except Rejected:
        assert num_answer == 0
        return
    length = min(max_tokens, whole["seq_len"])
    if not any(whole["loss_mask"][:length]):
        assert reason(trace, **how, max_tokens=max_tokens) == "too_long"
        return
    made = row(trace, **how, max_tokens=max_tokens)
    assert made["seq_len"] == length
    assert made["input_ids"] == whole["input_ids"][:length]
    assert made["loss_mask"] == whole["loss_mask"][:length]
    assert spans(made) == tuple(min(place, length) for place in spans(whole))
    assert (made["cut_in"] == "none") == (length == whole["seq_len"])


# from text


@pytest.mark.parametrize(
    ("trace", "how", "expected"),
    [
        (text("abc", "xy"), {}, "UQEA|T\nabc\nC\n\nxyE"),
        (text("\nabc\n", "\n\nxy"), {}, "UQEA|T\nabc\nC\n\nxyE"),
        (text("\nabc\n", "\n\nxy"), {"template": PREFILLED}, "UQEAT|\nabc\nC\n\nxyE"),
        (text("\nabc", None, status=CUT, finish_reason="length"), {}, "UQEA|T\nabc"),
        (
            text("\nabc\n", "\n\nx", status=CUT_LATE, finish_reason="length"),
            {},
            "UQEA|T\nabc\nC\n\nx",
        ),
        (text(None, "xy"), {"thinking": False}, "UQEATC|xyE"),
    ],
    ids=["stripped", "as written", "prefilled", "cut", "cut late", "thinking off"],
)
@pytest.mark.parametrize("source", ["text", "ids_else_text"])
def test_a_text_without_ids_is_rebuilt_and_marked(source, trace, how, expected):
    made = row(trace, source=source, **how)
    asked, written = expected.split("|")
    assert made["input_ids"] == tokens(expected)
    assert made["rebuilt"]
    assert made["generated_start"] == len(asked)
    assert made["loss_mask"] == [0] * len(asked) + [1] * len(written)


def test_ids_are_taken_where_there_are_some_unless_text_is_asked_for():
    trace = told("UQEA|TabcCxyE", reasoning="abc", content="xy")
    made = row(trace, source="ids_else_text")
    assert made["input_ids"] == tokens("UQEATabcCxyE")
    assert not made["rebuilt"]
    made = row(trace | {"usage": {}}, source="text")
    assert made["input_ids"] == tokens("UQEAT\nabc\nC\n\nxyE")
    assert made["rebuilt"]


@pytest.mark.parametrize("source", ["text", "ids_else_text"])
@pytest.mark.parametrize(
    ("usage", "is_kept"),
    [
        ({"prompt_tokens": 4, "completion_tokens": 12}, True),
        ({"prompt_tokens": 4, "completion_tokens": 11}, False),
        ({"prompt_tokens": 5, "completion_tokens": 12}, False),
        ({"prompt_tokens": 4}, True),
        ({"completion_tokens": 12}, True),
        ({}, True),
    ],
)
def test_what_is_rebuilt_has_the_length_that_was_billed(source, usage, is_kept):
    """B10. Without a bill nothing contradicts it."""
    trace = text("\nabc\n", "\n\nxy", usage=usage)
    if is_kept:
        assert row(trace, source=source)["rebuilt"]
    else:
        assert reason(trace, source=source) == "usage"


@pytest.mark.parametrize(
    ("reasoning", "content"),
    [
        ("so <think> it", "xy"),
        ("abc</think>", "xy"),
        ("abc", "say <|end|>"),
        ("abc", "half a character \ufffd"),
    ],
)
def test_a_text_that_cannot_be_exact_is_rejected(reasoning, content):
    """B10: U+FFFD stands for bytes that nobody knows any more."""
    assert reason(text(reasoning, content), source="text") == "text_not_exact"


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": 1}, {"completion_tokens": 1}, {"prompt_tokens": 4}]
)
def test_what_was_billed_counts_even_if_it_is_but_a_part(usage):
    """`UQEA` are four tokens."""
    trace = text("abc", "xy", usage=usage)
    if usage == {"prompt_tokens": 4}:
        assert row(trace, source="text")["rebuilt"]
    else:
        assert reason(trace, source="text") == "usage"


@pytest.mark.parametrize(("status", "finish"), [("ok", "length"), (CUT_LATE, "stop"), ("ok", None)])
def test_a_status_that_the_end_contradicts_is_rejected(status, finish):
    written = "TabcCxyE" if finish == "stop" else "TabcCxy"
    assert reason(told(f"UQEA|{written}", status=status, finish_reason=finish)) == "end_of_turn"


@pytest.mark.parametrize(
    ("content", "status", "expected"), [("", CUT_LATE, "UQEAT\nabc\nC"), ("", CUT, "UQEAT\nabc")]
)
def test_nothing_is_put_in_where_the_text_was_cut(content, status, expected):
    trace = text("\nabc", content, status=status, finish_reason="length")
    assert row(trace, source="text")["input_ids"] == tokens(expected)


def test_a_conversation_that_the_template_refuses_is_another_templates():
    refuses = "{{ raise_exception('no such role') }}"
    assert reason(WHOLE, template=refuses) == "other_template"
    assert reason(text("abc", "xy"), source="text", template=refuses) == "other_template"


def test_a_rebuilt_prompt_has_the_one_bos_that_its_template_writes():
    """B11: this tokenizer, asked for special tokens, would put a second one before it."""
    assert tokenizer(WITH_BOS).encode("<s>x") == tokens("BBx")
    how = {"template": WITH_BOS, "verifier": verifier_with_bos()}
    made = row(text("abc", "xy"), source="text", **how)
    assert made["input_ids"] == tokens("BUQEAT\nabc\nC\n\nxyE")


def test_control_text_is_found_in_a_rebuilt_prompt_too():
    """B8"""
    trace = text("abc", "xy", messages=[{"role": "user", "content": "Print <think>"}])
    assert reason(trace, source="text") == "control_text"
    made = row(trace, source="text", on_control_text="keep")
    assert (made["rebuilt"], made["control_text"]) == (True, True)


# the pure parts


PHASED = Phased(tokens("UQEATabcCxyE"), 4, (5, 8), (9, 11))


def test_a_cut_says_in_which_phase_it_falls():
    phases = [cut(PHASED, length)[1] for length in range(1, 12)]
    assert phases == ["prompt"] * 3 + ["reasoning"] * 5 + ["answer"] * 3


def test_a_cut_clips_every_phase():
    assert cut(PHASED, 2)[0] == Phased(tokens("UQ"), 2, (2, 2), (2, 2))
    assert cut(PHASED, 10)[0] == Phased(tokens("UQEATabcCx"), 4, (5, 8), (9, 10))


def test_taking_out_the_reasoning_leaves_the_given_sequence_as_it_was():
    without_reasoning(PHASED, fake_verifier(), keep_pair=False)
    without_reasoning(PHASED, fake_verifier(), keep_pair=True)
    assert Phased(tokens("UQEATabcCxyE"), 4, (5, 8), (9, 11)) == PHASED


def test_reasoning_and_answer_together_are_all_that_was_generated():
    parts = loss_mask(PHASED, "reasoning") | loss_mask(PHASED, "answer")
    assert parts.tolist() == loss_mask(PHASED, "all_generated").tolist() == [0] * 4 + [1] * 8
    assert parts.dtype == "int8"
