"""Whether an answer holds closed reasoning, by its ids; and the gate that stops a bad run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import BadRun
from pipeline.params import load_params
from pipeline.reasoning import (
    Gate,
    is_prefilled,
    judge,
    loop_period,
    num_reasoning_tokens,
    spans_of,
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


# the gate


@pytest.fixture
def gate(project, verifier):
    """`gate(window, fraction, tokens)`"""

    def make(num_samples: int, fraction: float, min_tokens: int = 3, **more: object) -> Gate:
        keys = ("num_samples", "min_reasoning_fraction", "min_reasoning_tokens")
        values = zip(keys, (num_samples, fraction, min_tokens), strict=True)
        project.set(**{f"generate.gate.{key}": value for key, value in values})
        project.set(**{f"generate.{key}": value for key, value in more.items()})
        return Gate(load_params().generate, verifier)

    return make


@pytest.fixture
def good(trace_of):
    return trace_of("Q", turn("because", "42"))


@pytest.fixture
def empty(trace_of):
    return trace_of("Q", turn("", "42"), status="empty_reasoning", reasoning="", content="42")


THRESHOLDS = pytest.mark.parametrize(
    ("num_samples", "num_good", "fraction"),
    [(10, 9, 0.9), (4, 2, 0.5), (100, 55, 0.55), (25, 7, 0.28), (4, 4, 1.0), (4, 0, 0.0)],
)


@THRESHOLDS
def test_the_first_answers_pass_at_the_threshold_and_fail_one_below(
    gate, good, empty, num_samples, num_good, fraction
):
    at = gate(num_samples, fraction)
    for trace in [good] * num_good + [empty] * (num_samples - num_good):
        at.add(trace)
    if num_good:
        below = gate(num_samples, fraction)
        for trace in [good] * (num_good - 1) + [empty] * (num_samples - num_good):
            below.add(trace)
        with pytest.raises(BadRun):
            below.add(empty)


@THRESHOLDS
def test_a_whole_run_is_judged_by_the_same_threshold_in_any_order(
    gate, good, empty, num_samples, num_good, fraction
):
    strict = gate(1000, fraction)
    bad = [empty] * (num_samples - num_good)
    strict.check(bad + [good] * num_good)
    strict.check([good] * num_good + bad)
    if num_good:
        with pytest.raises(BadRun):
            strict.check([empty, *bad, *[good] * (num_good - 1)])


def test_the_gate_waits_until_the_window_is_full(gate, empty):
    strict = gate(4, 1.0)
    for _ in range(3):
        strict.add(empty)
    with pytest.raises(BadRun, match="4 of 4 answers"):
        strict.add(empty)


def test_a_verifier_that_stops_thinking_later_is_caught(gate, good, empty):
    sliding = gate(4, 1.0)  # later on half of it: two of four
    for trace in [good] * 50 + [empty, empty]:
        sliding.add(trace)
    with pytest.raises(BadRun, match="3 of 4 answers"):
        sliding.add(empty)


def test_a_bad_stretch_of_a_healthy_run_does_not_stop_it(gate, good, empty):
    sliding = gate(10, 0.9)
    for trace in [good] * 50 + [empty] * 5 + [good] * 50:
        sliding.add(trace)


def test_nothing_asked_is_nothing_to_judge(gate):
    gate(32, 0.9).check([])


@pytest.mark.parametrize(
    "status", ["thinking_off_by_user", "rejected_by_server", "timed_out", "failed"]
)
def test_what_says_nothing_about_thinking_is_not_judged(gate, empty, status):
    watching = gate(2, 1.0)
    for _ in range(5):
        watching.add(empty | {"status": status})
    watching.check([empty | {"status": status}] * 5)


@pytest.mark.parametrize(
    "status",
    sorted(
        set(Status)
        - {"ok", "truncated_in_answer"}
        - {"thinking_off_by_user", "rejected_by_server", "timed_out", "failed"}
    ),
)
def test_every_other_status_fails_the_gate(gate, good, status):
    with pytest.raises(BadRun):
        gate(1, 1.0).add(good | {"status": status})


@pytest.mark.parametrize("status", ["ok", "truncated_in_answer"])
def test_closed_reasoning_passes_the_gate(gate, good, status):
    gate(1, 1.0).add(good | {"status": status})


def test_too_short_reasoning_fails_the_gate(gate, trace_of):
    gate(1, 1.0, 7).add(trace_of("Q", turn("because", "42")))
    with pytest.raises(BadRun, match=r"generate\.gate\.min_reasoning_tokens 8"):
        gate(1, 1.0, 8).add(trace_of("Q", turn("because", "42")))


def test_without_thinking_the_gate_asks_for_no_reasoning(gate, empty):
    gate(1, 1.0, thinking=False).add(empty | {"status": "ok"})


def test_thinking_that_does_not_switch_off_is_named(gate, empty):
    with pytest.raises(BadRun, match=r"although generate\.thinking is false.*thinking_switch"):
        gate(1, 1.0, thinking=False).add(empty | {"status": "parser_conflict"})


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ("empty_reasoning", r"generate\.thinking_switch \(enable_thinking\)"),
        ("truncated_in_reasoning", r"generate\.max_tokens 512"),
        ("unclosed_reasoning", r"think\.end_id"),
        ("garbage", r"verifier\.dtype"),
        ("looping", r"verifier\.dtype"),
        ("parser_conflict", r"think\."),
        ("aborted", r"aborted"),
    ],
)
def test_the_diagnosis_names_the_parameter_to_change_and_shows_two_answers(
    gate, empty, status, said
):
    with pytest.raises(BadRun, match=said) as caught:
        gate(1, 1.0).add(empty | {"status": status})
    message = str(caught.value)
    assert "1 of 1 answers fail the reasoning gate" in message
    assert "\"reasoning\": ''" in message
    assert f'"status": "{status}"' in message
