"""What an answer is, by its ids, by its text where there are none, and what speaks against it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.params import load_params
from pipeline.reasoning import (
    Cause,
    Verdict,
    cause_of,
    is_closed_by_prompt,
    is_prefilled,
    judge,
    loop_period,
    num_reasoning_tokens,
    spans_of,
    split_content,
    verdict_of,
)
from pipeline.records import Status
from tests.fake_server import ASSISTANT, END, THINK, THINK_END, USER, ids

QUESTION = [USER, *ids("Q"), END, ASSISTANT]
PREFILLED = [*QUESTION, THINK]
LONG = ids("abcdefghijklmnopqrstuvwxyz")


def turn(reasoning: str, answer: str) -> list[int]:
    return [THINK, *ids(reasoning), THINK_END, *ids(answer), END]


# spans: offsets are those of the prompt and the answer together


def test_spans_of_a_block_that_the_verifier_opened(verifier):
    spans = spans_of(QUESTION, turn("abc", "xy"), verifier)  # 4 prompt tokens, the opening is 4
    assert (spans.reasoning, spans.answer) == ((5, 8), (9, 11))
    assert spans.ends_turn
    assert spans.num_starts == 1


def test_spans_of_a_block_that_the_template_opened(verifier):
    spans = spans_of(PREFILLED, turn("abc", "xy")[1:], verifier)
    assert (spans.reasoning, spans.answer) == ((5, 8), (9, 11))
    assert spans.num_starts == 1


def test_spans_of_a_block_that_never_closes(verifier):
    spans = spans_of(QUESTION, [THINK, *ids("abc")], verifier)
    assert (spans.reasoning, spans.answer) == ((5, 8), None)
    assert not spans.ends_turn


def test_spans_of_an_answer_without_a_block(verifier):
    spans = spans_of(QUESTION, [*ids("xy"), END], verifier)
    assert (spans.reasoning, spans.answer) == (None, (4, 6))
    assert spans.num_starts == 0


def test_the_first_closing_token_closes_the_block(verifier):
    spans = spans_of(QUESTION, [THINK, *ids("abc"), THINK_END, 65, THINK_END, 66, END], verifier)
    assert (spans.reasoning, spans.answer) == ((5, 8), (9, 12))


def test_text_before_the_block_is_no_reasoning(verifier):
    spans = spans_of(QUESTION, [*ids("\n"), *turn("abc", "xy")], verifier)
    assert (spans.reasoning, spans.answer) == ((6, 9), (10, 12))


def test_nothing_but_an_end_of_turn(verifier):
    spans = spans_of(QUESTION, [END], verifier)
    assert (spans.reasoning, spans.answer) == (None, (4, 4))


@given(
    tokens=st.lists(st.sampled_from([65, 66, 10, THINK, THINK_END, END]), max_size=12),
    prefilled=st.booleans(),
)
def test_spans_lie_in_order_inside_the_generated_turn(tokens, prefilled):
    from pipeline.verifier import VerifierIdentity
    from tests.conftest import verifier_json

    prompt = PREFILLED if prefilled else QUESTION
    spans = spans_of(prompt, tokens, VerifierIdentity.model_validate(verifier_json()))
    length = len(prompt) + len(tokens)
    everything = [*prompt, *tokens]
    if spans.reasoning:
        start, end = spans.reasoning
        assert len(prompt) <= start <= end <= length
        assert everything[start - 1] == THINK
        assert THINK_END not in everything[start:end]
    if spans.answer:
        start, end = spans.answer
        assert len(prompt) <= start <= end <= length
        assert spans.ends_turn == (end < length)
        if spans.reasoning:
            assert start == spans.reasoning[1] + 1
            assert everything[start - 1] == THINK_END


# prefilled


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (QUESTION, False),
        (PREFILLED, True),
        ([*PREFILLED, *ids("\n")], True),  # DeepSeek-R1: "<think>\n"
        ([*PREFILLED, THINK_END], False),  # an empty block: thinking is off
        ([*PREFILLED, *ids("\n\n"), THINK_END, *ids("\n\n")], False),
        ([USER, *ids("what is "), THINK, END, ASSISTANT], False),  # the user typed it
        ([USER, *ids("what is "), THINK, END, ASSISTANT, THINK], True),
        (
            [USER, 65, END, ASSISTANT, THINK, 66, THINK_END, 67, END, USER, 68, END, ASSISTANT],
            False,
        ),
        ([], False),
    ],
)
def test_only_the_generation_prompt_opens_a_block(verifier, prompt, expected):
    assert is_prefilled(prompt, verifier) is expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([*PREFILLED, THINK_END], True),  # DeepSeek-V3.1 without its switch
        ([*PREFILLED, *ids("\n\n"), THINK_END, *ids("\n\n")], True),  # Qwen3, switched off
        ([*QUESTION, THINK_END], True),
        (PREFILLED, False),
        (QUESTION, False),
        ([USER, THINK, 65, THINK_END, END, ASSISTANT], False),  # the user typed both
        ([USER, 65, END, ASSISTANT, THINK, 66, THINK_END, 67, END, USER, 68, END, ASSISTANT],
         False),
        ([], False),
    ],
)  # fmt: skip
def test_only_the_generation_prompt_closes_a_block(verifier, prompt, expected):
    assert is_closed_by_prompt(prompt, verifier) is expected


# judge


def judged(trace, verifier, thinking=True):
    return judge(trace, verifier, thinking=thinking)


@pytest.mark.parametrize(
    ("prompt", "token_ids", "finish", "expected"),
    [
        # good ones
        (QUESTION, turn("because", "42"), "stop", "ok"),
        (PREFILLED, turn("because", "42")[1:], "stop", "ok"),
        (QUESTION, turn("\nbecause\n", "\n\n42"), "stop", "ok"),
        (QUESTION, turn("b", "4"), "stop", "ok"),
        # the tag is the topic (A14): as an id in the answer, spelt in the reasoning
        (QUESTION, [*turn("because", "close with ")[:-1], THINK_END, END], "stop", "ok"),
        (QUESTION, turn("the marker </think> closes", "42"), "stop", "ok"),
        (QUESTION, turn("because", "first <think>, then </think>"), "stop", "ok"),
        # the user typed a think-start, the verifier thought all the same
        ([USER, THINK, *ids("?"), END, ASSISTANT], turn("because", "42"), "stop", "ok"),
        # empty reasoning: no block, an empty one, white space in it
        (QUESTION, [*ids("42"), END], "stop", "empty_reasoning"),
        (QUESTION, turn("", "42"), "stop", "empty_reasoning"),
        (QUESTION, turn("\n\n", "42"), "stop", "empty_reasoning"),
        (QUESTION, turn(" \t\r\n", "42"), "stop", "empty_reasoning"),
        (PREFILLED, [THINK_END, *ids("42"), END], "stop", "empty_reasoning"),
        ([*PREFILLED, THINK_END], [*ids("42"), END], "stop", "empty_reasoning"),
        ([USER, THINK, *ids("?"), END, ASSISTANT], [*ids("42"), END], "stop", "empty_reasoning"),
        (QUESTION, ids("an answer without a block, cut"), "length", "empty_reasoning"),
        # cut (A6): also a block with nothing in it yet
        (QUESTION, [THINK, *LONG], "length", "truncated_in_reasoning"),
        (PREFILLED, LONG, "length", "truncated_in_reasoning"),
        (QUESTION, [THINK], "length", "truncated_in_reasoning"),
        (QUESTION, [THINK, *ids("\n\n")], "length", "truncated_in_reasoning"),
        (QUESTION, turn("because", "forty")[:-1], "length", "truncated_in_answer"),
        (QUESTION, [THINK, *ids("because"), THINK_END], "length", "truncated_in_answer"),
        # stopped by itself without closing
        (QUESTION, [THINK, *ids("because"), END], "stop", "unclosed_reasoning"),
        (PREFILLED, [*ids("because"), END], "stop", "unclosed_reasoning"),
        # no answer (A11)
        (QUESTION, turn("because", ""), "stop", "empty_answer"),
        (QUESTION, turn("because", "\n\n"), "stop", "empty_answer"),
        # ids and finish_reason contradict each other
        (QUESTION, turn("because", "42")[:-1], "stop", "parser_conflict"),
        (QUESTION, turn("because", "42"), "length", "parser_conflict"),
        (QUESTION, [THINK, THINK, *ids("because"), THINK_END, *ids("4"), END], "stop",
         "parser_conflict"),
        (PREFILLED, turn("because", "42"), "stop", "parser_conflict"),
        # it closes what nobody opened: neither template nor verifier
        (QUESTION, turn("because", "42")[1:], "stop", "parser_conflict"),
        (QUESTION, turn("", "42")[1:], "stop", "parser_conflict"),
        (QUESTION, turn("because", "forty")[1:-1], "length", "parser_conflict"),
        # repetition
        (QUESTION, [THINK, *ids("wait, " * 20)], "length", "looping"),
        (QUESTION, [THINK, *ids("no" * 24)], "length", "looping"),
        (QUESTION, [THINK, *ids("!" * 60)], "length", "garbage"),
        (QUESTION, [*ids("!" * 60)], "length", "garbage"),
        (QUESTION, turn("wait, " * 20, "42"), "stop", "ok"),  # it found its way out
        (QUESTION, [THINK, *ids("no" * 10)], "length", "truncated_in_reasoning"),
        # every other finish_reason (D6)
        (QUESTION, [THINK, *ids("because")], "abort", "aborted"),
        (QUESTION, [], "abort", "aborted"),
        (QUESTION, [THINK, *ids("x x x x")], "repetition", "aborted"),
        (QUESTION, turn("because", "42"), None, "aborted"),
        (QUESTION, turn("because", "42"), "error", "aborted"),
        (QUESTION, turn("because", "42"), "content_filter", "aborted"),
        (QUESTION, turn("because", "{}"), "tool_calls", "tool_call"),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_its_ids(verifier, trace_of, prompt, token_ids, finish, expected):
    assert judged(trace_of("Q", token_ids, finish, prompt=prompt), verifier) == expected


@pytest.mark.parametrize(
    "text",
    [
        {"reasoning": None, "content": "because</think>42"},  # no parser (A4)
        {"reasoning": None, "content": "<think>because</think>42"},  # no parser (A5)
        {"reasoning": "the marker ", "content": " closes</think>42"},  # spelt marker splits text
        {"reasoning": "", "content": ""},
        {"reasoning": "because42", "content": None},
    ],
)
def test_text_cannot_make_a_good_answer_bad(verifier, trace_of, text):
    assert judged(trace_of("Q", turn("because", "42"), **text), verifier) == "ok"


@pytest.mark.parametrize(
    "text",
    [
        {"reasoning": None, "content": "R without end"},  # the old qwen3 parser (A6)
        {"reasoning": "R without end", "content": None},
    ],
)
def test_both_text_shapes_of_a_cut_answer_are_truncated_reasoning(verifier, trace_of, text):
    trace = trace_of("Q", [THINK, *ids("R without end")], "length", **text)
    assert judged(trace, verifier) == "truncated_in_reasoning"


@pytest.mark.parametrize("text", [{"reasoning": "a lot"}, {"reasoning": "\n\n"}])
def test_text_cannot_make_an_empty_block_good(verifier, trace_of, text):
    assert judged(trace_of("Q", turn("", "42"), **text), verifier) == "empty_reasoning"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Say hi /no_think", "thinking_off_by_user"),
        ("Say hi /nothink", "thinking_off_by_user"),
        ("/no_think\nSay hi", "thinking_off_by_user"),
        ("Say hi /think", "empty_reasoning"),
        ("What does /no_thinking mean", "empty_reasoning"),
        ("Say hi no_think", "empty_reasoning"),
    ],
)
@pytest.mark.parametrize("token_ids", [turn("\n\n", "hi"), [*ids("hi"), END]])
def test_a_question_that_switches_thinking_off_is_told_apart(
    verifier, trace_of, question, expected, token_ids
):
    assert judged(trace_of(question, token_ids), verifier) == expected


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("system", "thinking_off_by_user"),
        ("user", "thinking_off_by_user"),
        ("assistant", "empty_reasoning"),  # its own earlier answer: nobody asked for it
    ],
)
@pytest.mark.parametrize(
    "answer", [{}, {"token_ids": [], "reasoning": None}], ids=["by_ids", "by_text"]
)
def test_a_soft_switch_counts_in_what_the_verifier_was_told(
    verifier, trace_of, role, expected, answer
):
    said = [{"role": role, "content": "/no_think is a switch"}, {"role": "user", "content": "Q"}]
    trace = trace_of("Q", turn("", "42"), messages=said) | answer
    assert judged(trace, verifier) == expected


@pytest.mark.parametrize("finish", ["stop", "length", "tool_calls"])
@pytest.mark.parametrize("token_ids", [turn("because", "x"), []], ids=["by_ids", "by_text"])
def test_a_tool_call_is_one_whatever_stands_beside_it(verifier, trace_of, finish, token_ids):
    """C17: Kimi says "(no content)" beside its tool calls."""
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": "{}"}}
    beside = {"content": "(no content)", "tool_calls": [call]}
    assert judged(trace_of("Q", token_ids, finish, **beside), verifier) == "tool_call"


def test_a_soft_switch_that_the_verifier_ignores_is_no_fault(verifier, trace_of):
    assert judged(trace_of("Q /no_think", turn("because", "42")), verifier) == "ok"


@pytest.mark.parametrize(
    ("prompt", "token_ids", "finish", "expected"),
    [
        ([*PREFILLED, THINK_END], [*ids("42"), END], "stop", "ok"),
        (QUESTION, [*ids("42"), END], "stop", "ok"),
        (QUESTION, turn("", "42"), "stop", "ok"),
        (QUESTION, ids("forty-"), "length", "truncated_in_answer"),
        (QUESTION, [END], "stop", "empty_answer"),
        (QUESTION, [*ids(" \n"), END], "stop", "empty_answer"),
        (QUESTION, ids("42"), "stop", "parser_conflict"),
        (QUESTION, ids("42"), "abort", "aborted"),
        (QUESTION, ids("!" * 60), "length", "garbage"),
    ],
)
def test_without_thinking_an_answer_needs_no_reasoning(
    verifier, trace_of, prompt, token_ids, finish, expected
):
    trace = trace_of("Q", token_ids, finish, prompt=prompt)
    assert judged(trace, verifier, thinking=False) == expected


def test_several_end_ids_all_end_a_turn(verifier, trace_of):
    other = verifier.model_copy(update={"end_ids": [END, 210]})
    assert judged(trace_of("Q", [*turn("because", "42")[:-1], 210]), other) == "ok"


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        (ids("a" * 48), 1),
        (ids("a" * 47), 0),
        (ids("begin" + "ab" * 24), 2),
        (ids("abc" * 16), 3),
        (ids("ab" * 24 + "c"), 0),
        (list(range(64)) * 4, 64),
        (list(range(64)) * 3, 0),
        (list(range(65)) * 5, 0),
        ([], 0),
    ],
)
def test_a_loop_is_its_shortest_period_repeated_to_the_end(tokens, period):
    assert loop_period(tokens) == period


def test_reasoning_tokens_are_those_between_the_markers(verifier, trace_of):
    assert num_reasoning_tokens(trace_of("Q", turn("abcde", "42")), verifier) == 5
    assert num_reasoning_tokens(trace_of("Q", [THINK, *ids("abc")], "length"), verifier) == 3
    assert num_reasoning_tokens(trace_of("Q", [*ids("42"), END]), verifier) == 0


# judge, without ids


def by_text(trace_of, reasoning, content, finish="stop", question="Q"):
    texts = {"reasoning": reasoning, "content": content}
    texts = {name: text for name, text in texts.items() if text != "absent"}
    trace = trace_of(question, [], finish, prompt=[])
    del trace["reasoning"], trace["content"]
    return trace | texts


@pytest.mark.parametrize(
    ("reasoning", "content", "finish", "expected"),
    [
        ("R", "A", "stop", "ok"),  # A1
        ("\nR\n", "\n\nA", "stop", "ok"),  # A5, split
        ("I must explain the tag", "close it with </think> when done", "stop", "ok"),  # A14
        # A3: three ways to hold none
        ("", "A", "stop", "empty_reasoning"),
        (None, "A", "stop", "empty_reasoning"),
        ("absent", "A", "stop", "empty_reasoning"),
        ("\n\n", "A", "stop", "empty_reasoning"),
        # A6: both shapes of a reasoning that was cut
        ("R without end", None, "length", "truncated_in_reasoning"),
        (None, "R without end", "length", "truncated_in_reasoning"),
        ("R without end", "", "length", "truncated_in_reasoning"),
        ("absent", "R without end", "length", "truncated_in_reasoning"),
        (" ", None, "length", "truncated_in_reasoning"),
        ("R", "A half", "length", "truncated_in_answer"),
        # A11: nothing anywhere
        (None, None, "stop", "parser_conflict"),
        ("", "", "stop", "parser_conflict"),
        ("absent", "absent", "stop", "parser_conflict"),
        # all in `reasoning`: unclosed, or of another parser; the text cannot tell
        ("R and A", None, "stop", "parser_conflict"),
        ("R and A", " \n", "stop", "parser_conflict"),
        # repetition, in either field, up to the cut
        ("wait, " * 20, None, "length", "looping"),
        (None, "wait, " * 20, "length", "looping"),
        ("R", "A and " * 20, "length", "looping"),
        ("!" * 60, None, "length", "garbage"),
        ("R", "!" * 60, "length", "garbage"),
        ("wait, " * 20, "A", "stop", "ok"),
        ("wait, " * 20, "A half", "length", "truncated_in_answer"),  # it found its way out
        # D6
        ("R half", None, "abort", "aborted"),
        ("x x x x", None, "repetition", "aborted"),
        ("R", "A", None, "aborted"),
    ],
)
def test_without_ids_an_answer_is_judged_by_its_text(
    verifier, trace_of, reasoning, content, finish, expected
):
    trace = by_text(trace_of, reasoning, content, finish)
    assert judged(trace, verifier) == expected


@pytest.mark.parametrize(
    ("reasoning", "content", "finish", "expected"),
    [
        (None, "A", "stop", "ok"),
        ("", "A", "stop", "ok"),
        (None, None, "stop", "empty_answer"),
        (None, " \n", "stop", "empty_answer"),
        (None, "A half", "length", "truncated_in_answer"),
        (None, "!" * 60, "length", "garbage"),
        (None, "A", "abort", "aborted"),
        # it thinks although it was told not to
        ("R", "A", "stop", "parser_conflict"),
        ("R", None, "stop", "parser_conflict"),
        ("R half", None, "length", "parser_conflict"),
        ("R", "A half", "length", "parser_conflict"),
    ],
)
def test_without_ids_and_thinking_an_answer_needs_no_reasoning(
    verifier, trace_of, reasoning, content, finish, expected
):
    trace = by_text(trace_of, reasoning, content, finish)
    assert judged(trace, verifier, thinking=False) == expected


def test_an_answer_with_prompt_ids_alone_is_judged_by_its_text(verifier, trace_of):
    trace = by_text(trace_of, "R", "A") | {"prompt_token_ids": QUESTION}
    assert judged(trace, verifier) == "ok"


@pytest.mark.parametrize("token_ids", [turn("R", "A"), turn("R", "A")[1:]])
def test_an_answer_without_prompt_ids_is_judged_by_its_text(verifier, trace_of, token_ids):
    """Nobody knows whether the prompt opened the think block."""
    trace = by_text(trace_of, "R", "A") | {"token_ids": token_ids}
    assert judged(trace, verifier) == "ok"
    assert judged(trace | {"reasoning": None}, verifier) == "empty_reasoning"
    assert num_reasoning_tokens(trace, verifier) == 0


# one text that no parser split


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (" R </think> A", (" R ", " A")),  # A4
        ("<think>\nR\n</think>\n\nA", ("\nR\n", "\n\nA")),  # A5
        ("\n<think>R</think>A", ("R", "A")),
        ("I <think> so</think>A", ("I <think> so", "A")),  # the opening tag was only spoken of
        ("R</think>close it with </think>", ("R", "close it with </think>")),  # the first one
        ("</think>A", ("", "A")),
        ("R</think>", ("R", "")),
    ],
)
@pytest.mark.parametrize(
    "token_ids", [[], turn("R", "A"), turn("R", "A")[1:]], ids=["no_ids", "qwen", "prefilled"]
)
def test_the_first_closing_tag_splits_and_white_space_stays(
    verifier, trace_of, content, expected, token_ids
):
    trace = trace_of("Q", token_ids, reasoning=None, content=content)
    assert split_content(trace, verifier) == expected


@pytest.mark.parametrize(
    ("token_ids", "reasoning", "content"),
    [
        ([], "I must explain the tag", "close it with </think> when done"),  # A14
        (turn("R", "A"), "I must explain the tag", "close it with </think> when done"),
        ([*ids("close it with </think>"), END], None, "close it with </think>"),  # not generated
        ([THINK, *ids("R </think>")], None, "R </think>"),
        ([], None, "A"),
        ([], None, "<think>R half"),
        ([], None, ""),
        ([], None, None),
        (turn("R", "A"), None, "RA"),  # special tokens were dropped from the text
    ],
)
def test_what_is_not_to_be_split(verifier, trace_of, token_ids, reasoning, content):
    trace = trace_of("Q", token_ids, reasoning=reasoning, content=content)
    assert split_content(trace, verifier) is None


def test_absent_content_is_not_split(verifier, trace_of):
    assert split_content(by_text(trace_of, None, "absent"), verifier) is None


def test_other_tags_split_at_theirs(verifier, trace_of):
    kimi = verifier.model_copy(update={"think_start": "◁think▷", "think_end": "◁/think▷"})
    trace = by_text(trace_of, None, "◁think▷R</think>◁/think▷A")
    assert split_content(trace, kimi) == ("R</think>", "A")


# the verdict


@pytest.fixture
def params(project):
    """`params("text", thinking=False)`: reassemble.source, and generate.* with these values."""

    def load(source: str = "ids", **values: object):
        project.set(**{f"generate.{key}": value for key, value in values.items()})
        project.set(**{"reassemble.source": source})
        return load_params()

    return load


def test_a_verdict_counts_by_ids(verifier, params, trace_of):
    billed = {"prompt_tokens": 1000, "completion_tokens": 1000, "reasoning_tokens": 1000}
    trace = trace_of("Q", turn("because", "42"), prompt=QUESTION, usage=billed)
    # THINK, 7 characters, THINK_END, 2 characters, END
    assert verdict_of(trace, verifier, params()) == Verdict(Status.OK, None, 4, 12, 7)


def test_a_verdict_without_ids_counts_as_billed(verifier, params, trace_of):
    billed = {"prompt_tokens": 10, "completion_tokens": 30, "reasoning_tokens": 20}
    trace = by_text(trace_of, "R", "A") | {"usage": billed, "imported": True}
    assert verdict_of(trace, verifier, params()) == Verdict(Status.OK, None, 10, 30, 20)


def test_a_verdict_without_ids_and_bill_counts_nothing(verifier, params, trace_of):
    trace = by_text(trace_of, "R", "A") | {"usage": {}, "imported": True}
    assert verdict_of(trace, verifier, params()) == Verdict(Status.OK, None, 0, 0, 0)


@pytest.mark.parametrize("status", ["failed", "timed_out", "rejected_by_server"])
def test_an_answer_that_never_came_keeps_its_status(verifier, params, trace_of, status):
    trace = by_text(trace_of, "absent", "absent", None) | {"status": status, "usage": {}}
    assert verdict_of(trace, verifier, params()) == Verdict(Status(status), None, 0, 0, 0)


@pytest.mark.parametrize(
    ("thinking", "token_ids", "expected"),
    [
        (True, turn("", "42"), "empty_reasoning"),
        (False, turn("", "42"), "ok"),
        (True, turn("because", "42"), "ok"),
        (False, turn("because", "42"), "parser_conflict"),
    ],
)
def test_a_verdict_is_that_of_the_present_params(
    verifier, params, trace_of, thinking, token_ids, expected
):
    trace = trace_of("Q", token_ids, status="looping")  # whatever was stored
    assert verdict_of(trace, verifier, params(thinking=thinking)).status == expected


def test_an_abort_before_the_first_token_is_an_abort(verifier, params, trace_of):
    trace = by_text(trace_of, None, None, "abort") | {"status": "ok"}
    assert verdict_of(trace, verifier, params()).status == "aborted"


# why an answer speaks against its run; generate.gate.min_reasoning_tokens is 3

CLOSED = [*PREFILLED, THINK_END]
BECAUSE = turn("because", "42")
NO_IDS = {"token_ids": [], "prompt_token_ids": []}
BILLED = {"usage": {"prompt_tokens": 4, "completion_tokens": 12, "reasoning_tokens": 7}}
CALL = {"tool_calls": [{"id": "functions.f:0"}], "content": None, "reasoning": None}


@pytest.mark.parametrize(
    ("cause", "prompt", "token_ids", "finish", "changes"),
    [
        ("thinking_off", CLOSED, [*ids("42"), END], "stop", {}),
        ("thinking_off", [*CLOSED, *ids("\n\n")], [*ids("42"), END], "stop", {}),
        ("not_thinking", QUESTION, [*ids("42"), END], "stop", {}),
        ("not_thinking", QUESTION, turn("\n\n", "42"), "stop", {}),
        ("not_thinking", PREFILLED, [THINK_END, *ids("42"), END], "stop", {}),
        ("short", QUESTION, turn("ab", "42"), "stop", {}),
        ("short", QUESTION, turn("ab", "forty")[:-1], "length", {}),
        ("cut", QUESTION, [THINK, *LONG], "length", {}),
        ("unclosed", QUESTION, [THINK, *ids("because"), END], "stop", {}),
        ("no_answer", QUESTION, turn("because", ""), "stop", {}),
        ("looping", QUESTION, [THINK, *ids("wait, " * 20)], "length", {}),
        ("garbage", QUESTION, [THINK, *ids("!" * 60)], "length", {}),
        ("conflict", QUESTION, BECAUSE[:-1], "stop", {}),
        ("conflict", QUESTION, BECAUSE[1:], "stop", {}),
        ("aborted", QUESTION, [THINK, *ids("x x x x")], "repetition", {}),
        ("aborted", QUESTION, BECAUSE, None, {}),
        ("aborted", QUESTION, [], "abort", {"content": None, "reasoning": None}),
        ("tool_call", QUESTION, BECAUSE, "tool_calls", {}),
        ("tool_call", QUESTION, BECAUSE, "stop", CALL),
        ("tool_call", QUESTION, BECAUSE, "tool_calls", CALL | NO_IDS),
        # the server left out the ids it was asked for
        ("no_token_ids", QUESTION, BECAUSE, "stop", NO_IDS),
        ("no_token_ids", QUESTION, BECAUSE, "stop", NO_IDS | {"reasoning": None}),
        ("no_token_ids", QUESTION, BECAUSE, "length",
         NO_IDS | {"reasoning": None, "content": "R without end"}),  # A6, the old qwen3 parser
        ("no_token_ids", QUESTION, BECAUSE, "length",
         NO_IDS | {"reasoning": "R without end", "content": None}),
        # no reasoning parser: A4 and A5, after splitting, and with the tags dropped from the text
        ("no_parser", PREFILLED, BECAUSE[1:], "stop", {"unsplit": True}),
        ("no_parser", QUESTION, BECAUSE, "stop", {"unsplit": True}),
        ("no_parser", QUESTION, BECAUSE, "stop", NO_IDS | {"unsplit": True}),
        ("no_parser", QUESTION, BECAUSE[:-1], "length", {"unsplit": True}),
        ("no_parser", QUESTION, BECAUSE, "stop", {"reasoning": None, "content": "because42"}),
        # the parser of another model
        ("wrong_parser", QUESTION, BECAUSE, "stop", {"reasoning": "because42", "content": None}),
        ("wrong_parser", QUESTION, BECAUSE, "stop", {"reasoning": "because42", "content": " "}),
        ("wrong_parser", QUESTION, BECAUSE, "stop",
         NO_IDS | {"reasoning": "because42", "content": None}),
        # A1: the next new name
        ("field_renamed", QUESTION, BECAUSE, "stop", {"reasoning": None, "other_fields": ["x"]}),
        ("field_renamed", QUESTION, BECAUSE, "stop",
         NO_IDS | {"reasoning": None, "other_fields": ["x"]}),
        ("field_renamed", QUESTION, BECAUSE, "stop",
         {"reasoning": None, "other_fields": ["x"]} | BILLED),
        # include_reasoning: false
        ("reasoning_hidden", QUESTION, BECAUSE, "stop", {"reasoning": None} | BILLED),
        ("reasoning_hidden", QUESTION, BECAUSE, "stop", {"reasoning": ""} | BILLED),
        ("reasoning_hidden", QUESTION, BECAUSE, "stop", NO_IDS | {"reasoning": None} | BILLED),
        # A11: paid for, and nothing to show for it
        ("reasoning_hidden", QUESTION, BECAUSE, "stop", {"reasoning": None, "content": None}),
        ("reasoning_hidden", QUESTION, BECAUSE, "stop",
         NO_IDS | {"reasoning": None, "content": None}),
    ],
)  # fmt: skip
def test_each_cause_by_an_answer_that_shows_it(
    verifier, params, trace_of, cause, prompt, token_ids, finish, changes
):
    trace = trace_of("Q", token_ids, finish, prompt=prompt) | changes
    assert verdict_of(trace, verifier, params()).cause == cause


@pytest.mark.parametrize(
    ("cause", "token_ids", "finish"),
    [
        ("thinks_anyway", BECAUSE, "stop"),
        ("thinks_anyway", [THINK, *LONG], "length"),
        ("no_answer", [END], "stop"),
        ("aborted", ids("42"), "abort"),
        ("conflict", ids("42"), "stop"),  # no end token: nothing was thought
        ("conflict", [*ids("42"), END], "length"),
        (None, [*ids("42"), END], "stop"),
        (None, turn("", "42"), "stop"),
        (None, ids("forty-"), "length"),
    ],
)
def test_each_cause_of_a_run_without_thinking(verifier, params, trace_of, cause, token_ids, finish):
    trace = trace_of("Q", token_ids, finish, prompt=QUESTION)
    assert verdict_of(trace, verifier, params(thinking=False)).cause == cause


def test_every_cause_has_an_example_above():
    """So that a new one gets one too."""
    marks = (
        test_each_cause_by_an_answer_that_shows_it.pytestmark,
        test_each_cause_of_a_run_without_thinking.pytestmark,
    )
    shown = {row[0] for [mark] in marks for row in mark.args[1]}
    assert shown - {None} == set(Cause)


@pytest.mark.parametrize(
    ("prompt", "token_ids", "finish", "changes"),
    [
        (QUESTION, turn("abc", "42"), "stop", {}),  # as short as it may be
        (PREFILLED, turn("abc", "42")[1:], "stop", {}),
        (QUESTION, turn("abc", "forty")[:-1], "length", {}),
        (QUESTION, [THINK, *ids("because"), THINK_END], "length", {"content": None}),
        (QUESTION, BECAUSE, "stop", {"other_fields": ["refusal_text"]}),  # reasoning is there
        # imported: neither ids nor a bill are to be had any more
        (QUESTION, [], "stop", {"imported": True, "reasoning": "R", "content": "A"}),
        (QUESTION, [], "length", {"imported": True, "reasoning": "R", "content": "A half"}),
        (QUESTION, [], "stop",
         {"imported": True, "reasoning": "R", "content": "A", "unsplit": True}),
        (QUESTION, turn("ab", "42"), "stop", {"imported": True}),
    ],
)  # fmt: skip
def test_nothing_speaks_against_a_good_answer(
    verifier, params, trace_of, prompt, token_ids, finish, changes
):
    trace = trace_of("Q", token_ids, finish, prompt=prompt) | changes
    assert verdict_of(trace, verifier, params()).cause is None


@pytest.mark.parametrize(
    ("reasoning", "content", "finish", "cause"),
    [
        (None, "A", "stop", "not_thinking"),
        ("R without end", None, "length", "cut"),
        ("R", None, "stop", "conflict"),
        ("!" * 60, None, "length", "garbage"),
    ],
)
def test_an_imported_answer_without_reasoning_speaks_against_the_run(
    verifier, params, trace_of, reasoning, content, finish, cause
):
    trace = by_text(trace_of, reasoning, content, finish) | {"imported": True}
    assert verdict_of(trace, verifier, params()).cause == cause


@pytest.mark.parametrize(
    "status", ["thinking_off_by_user", "rejected_by_server", "timed_out", "failed"]
)
def test_what_says_nothing_about_thinking_has_no_cause(verifier, params, trace_of, status):
    trace = trace_of("Q", [], None, prompt=[], reasoning=None, content=None)
    assert cause_of(trace, Status(status), verifier, params()) is None


# the same where reassemble.source lets text do

BY_TEXT = pytest.mark.parametrize("source", ["text", "ids_else_text"])
WITHOUT_IDS = {  # what speaks against an answer without ids where they are needed
    *("no_token_ids", "no_parser", "wrong_parser", "field_renamed", "reasoning_hidden"),
    *("aborted", "tool_call"),
}


def billed(num_reasoning: int) -> dict:
    usage = {"prompt_tokens": 4, "completion_tokens": 12, "reasoning_tokens": num_reasoning}
    return {"usage": usage}


@BY_TEXT
@pytest.mark.parametrize(
    ("cause", "reasoning", "content", "finish", "changes"),
    [
        (None, "R", "A", "stop", {}),
        (None, "R", "A half", "length", {}),
        (None, "R", "A", "stop", {"other_fields": ["refusal_text"]}),
        # only a bill can tell that it is short, and 0 is none: some servers do not count them
        (None, "R", "A", "stop", billed(3)),
        (None, "R", "A", "stop", billed(0)),
        ("short", "R", "A", "stop", billed(2)),
        ("short", "R", "A half", "length", billed(2)),
        # one half of the ids is none
        (None, "R", "A", "stop", {"prompt_token_ids": QUESTION}),
        (None, "because", "42", "stop", {"token_ids": BECAUSE}),
        (None, "because", "42", "stop", {"token_ids": BECAUSE[1:]}),
        ("not_thinking", None, "A", "stop", {}),
        ("not_thinking", "absent", "A", "stop", {}),
        ("not_thinking", "\n\n", "A", "stop", {}),
        ("not_thinking", None, "A", "stop", {"prompt_token_ids": PREFILLED}),
        ("not_thinking", None, "42", "stop", {"token_ids": [*ids("42"), END]}),
        ("thinking_off", None, "A", "stop", {"prompt_token_ids": CLOSED}),
        ("no_parser", "R", "A", "stop", {"unsplit": True}),
        ("no_parser", "R", "A half", "length", {"unsplit": True}),
        ("no_parser", "", "A", "stop", {"unsplit": True}),
        ("no_parser", "R", "", "stop", {"unsplit": True}),
        ("wrong_parser", "R and A", None, "stop", {}),
        ("wrong_parser", "R and A", " ", "stop", billed(7)),
        ("field_renamed", None, "A", "stop", {"other_fields": ["x"]}),
        ("field_renamed", "absent", "A", "stop", {"other_fields": ["x"]} | billed(7)),
        ("field_renamed", None, None, "stop", {"other_fields": ["x"]}),
        ("reasoning_hidden", None, "A", "stop", billed(7)),
        ("reasoning_hidden", "absent", "A", "stop", billed(7)),
        ("reasoning_hidden", None, None, "stop", {}),
        ("cut", "R without end", None, "length", {}),
        ("cut", None, "R without end", "length", {}),  # A6, the old qwen3 parser
        ("cut", None, None, "length", {}),  # after one token
        ("looping", "wait, " * 20, None, "length", {}),
        ("garbage", "R", "!" * 60, "length", {}),
        ("aborted", "R half", None, "abort", {}),
        ("aborted", "R", "A", None, {"status": "aborted"}),
        ("tool_call", "R", "A", "tool_calls", {}),
    ],
)
def test_where_text_is_to_do_it_is_judged_as_ids_would_be(
    verifier, params, trace_of, source, cause, reasoning, content, finish, changes
):
    trace = by_text(trace_of, reasoning, content, finish) | changes
    assert verdict_of(trace, verifier, params(source)).cause == cause
    # With ids as the source nothing of it would do.
    assert verdict_of(trace, verifier, params()).cause in WITHOUT_IDS


@BY_TEXT
@pytest.mark.parametrize(
    ("cause", "reasoning", "content", "finish"),
    [
        (None, None, "A", "stop"),
        (None, "\n", "A half", "length"),
        ("no_answer", None, None, "stop"),
        ("thinks_anyway", "R", "A", "stop"),
        ("thinks_anyway", "R", None, "length"),
        ("garbage", None, "!" * 60, "length"),
        ("aborted", None, "A", "abort"),
    ],
)
def test_where_text_is_to_do_a_run_without_thinking_is_judged_too(
    verifier, params, trace_of, source, cause, reasoning, content, finish
):
    trace = by_text(trace_of, reasoning, content, finish)
    assert verdict_of(trace, verifier, params(source, thinking=False)).cause == cause


@BY_TEXT
def test_where_there_are_ids_they_decide_whatever_else_would_do(verifier, params, trace_of, source):
    [mark] = test_each_cause_by_an_answer_that_shows_it.pytestmark
    shown = [row for row in mark.args[1] if row[2] and "token_ids" not in row[4]]
    assert len(shown) > 20
    for cause, prompt, token_ids, finish, changes in shown:
        trace = trace_of("Q", token_ids, finish, prompt=prompt) | changes
        assert verdict_of(trace, verifier, params(source)).cause == cause


@BY_TEXT
def test_where_text_is_to_do_imports_are_judged_as_ever(verifier, params, trace_of, source):
    imported = {"imported": True, "unsplit": True}
    trace = by_text(trace_of, "R", "A") | imported | billed(1)
    assert verdict_of(trace, verifier, params(source)) == (Status.OK, None, 4, 12, 1)
    trace = by_text(trace_of, None, "A") | imported | billed(7)
    assert verdict_of(trace, verifier, params(source)).cause == "not_thinking"


@BY_TEXT
def test_where_text_is_to_do_a_soft_switch_speaks_against_nobody(
    verifier, params, trace_of, source
):
    trace = by_text(trace_of, None, "hi", question="Say hi /no_think")
    assert verdict_of(trace, verifier, params(source))[:2] == (Status.THINKING_OFF_BY_USER, None)


def test_a_question_that_switches_thinking_off_speaks_against_nobody(verifier, params, trace_of):
    trace = trace_of("Q /no_think", turn("", "42"))
    assert verdict_of(trace, verifier, params())[:2] == (Status.THINKING_OFF_BY_USER, None)


def test_reasoning_tokens_without_ids_are_those_billed(verifier, trace_of):
    billed = by_text(trace_of, "R", "A") | {"usage": {"reasoning_tokens": 20}}
    assert num_reasoning_tokens(billed, verifier) == 20
    assert num_reasoning_tokens(billed | {"usage": {}}, verifier) == 0
