"""The reasoning gate: which runs it stops, when, and what it says it saw."""

import pytest

from pipeline.gate import Gate, Tripped
from pipeline.params import load_params
from pipeline.reasoning import Cause, Verdict
from pipeline.records import Status

GOOD = Verdict(Status.OK, None, 4, 12, 7)
EMPTY = Verdict(Status.EMPTY_REASONING, Cause.NOT_THINKING, 4, 5, 0)
CUT = Verdict(Status.TRUNCATED_IN_REASONING, Cause.CUT, 4, 512, 511)


@pytest.fixture
def gate(project):
    """`gate(window, fraction)`"""

    def make(num_samples: int, fraction: float) -> Gate:
        values = {"num_samples": num_samples, "min_reasoning_fraction": fraction}
        project.set(**{f"generate.gate.{key}": value for key, value in values.items()})
        return Gate(load_params().generate)

    return make


@pytest.fixture
def trace(trace_of):
    return trace_of("Q")


THRESHOLDS = pytest.mark.parametrize(
    ("num_samples", "num_good", "fraction"),
    [
        *((10, 9, 0.9), (4, 2, 0.5), (100, 55, 0.55), (25, 7, 0.28), (4, 4, 1.0), (4, 0, 0.0)),
        *((25, 17, 0.68), (20, 9, 0.45), (100, 93, 0.93)),  # 1 - 8 / 25 < 0.68 in floats
    ],
)


@THRESHOLDS
def test_the_first_answers_pass_at_the_threshold_and_fail_one_below(
    gate, trace, num_samples, num_good, fraction
):
    at = gate(num_samples, fraction)
    for verdict in [GOOD] * num_good + [EMPTY] * (num_samples - num_good):
        at.add(trace, verdict)
    if num_good:
        below = gate(num_samples, fraction)
        for verdict in [GOOD] * (num_good - 1) + [EMPTY] * (num_samples - num_good):
            below.add(trace, verdict)
        with pytest.raises(Tripped):
            below.add(trace, EMPTY)


@THRESHOLDS
def test_a_whole_run_is_judged_by_the_same_threshold_in_any_order(
    gate, num_samples, num_good, fraction
):
    strict = gate(1000, fraction)
    bad = [EMPTY] * (num_samples - num_good)
    strict.check(bad + [GOOD] * num_good)
    strict.check([GOOD] * num_good + bad)
    if num_good:
        with pytest.raises(Tripped):
            strict.check([EMPTY, *bad, *[GOOD] * (num_good - 1)])


def test_the_gate_waits_until_the_window_is_full(gate, trace):
    strict = gate(4, 1.0)
    for _ in range(3):
        strict.add(trace, EMPTY)
    with pytest.raises(Tripped) as tripped:
        strict.add(trace, EMPTY)
    assert tripped.value.evidence.num_judged == 4
    assert tripped.value.evidence.causes == {Cause.NOT_THINKING: 4}


def test_a_verifier_that_stops_thinking_later_is_caught(gate, trace):
    sliding = gate(4, 1.0)  # later on half of it: two of four
    for verdict in [GOOD] * 50 + [EMPTY, EMPTY]:
        sliding.add(trace, verdict)
    with pytest.raises(Tripped) as tripped:
        sliding.add(trace, EMPTY)
    assert tripped.value.evidence.num_judged == 4
    assert tripped.value.evidence.causes == {Cause.NOT_THINKING: 3}


def test_a_bad_stretch_of_a_healthy_run_does_not_stop_it(gate, trace):
    sliding = gate(10, 0.9)
    for verdict in [GOOD] * 50 + [EMPTY] * 5 + [GOOD] * 50:
        sliding.add(trace, verdict)


def test_later_on_half_the_fraction_is_enough_and_less_is_not(gate, trace):
    sliding = gate(4, 0.5)  # two of the first four, then one of any four
    for verdict in [GOOD] * 4 + [EMPTY, EMPTY, EMPTY, GOOD] * 20 + [EMPTY] * 3:
        sliding.add(trace, verdict)
    with pytest.raises(Tripped) as tripped:
        sliding.add(trace, EMPTY)
    assert tripped.value.evidence.causes == {Cause.NOT_THINKING: 4}


def test_nothing_asked_is_nothing_to_judge(gate):
    gate(32, 0.9).check([])


@pytest.mark.parametrize(
    "status", ["thinking_off_by_user", "rejected_by_server", "timed_out", "failed"]
)
def test_what_says_nothing_about_thinking_is_not_judged(gate, trace, status):
    unjudged = Verdict(Status(status), None, 0, 0, 0)
    watching = gate(2, 1.0)
    for verdict in [GOOD, *[unjudged] * 5]:
        watching.add(trace, verdict)
    watching.check([unjudged] * 5)
    # neither for the run nor against it: the next one is the second of two
    with pytest.raises(Tripped) as tripped:
        watching.add(trace, EMPTY)
    assert tripped.value.evidence.num_judged == 2
    with pytest.raises(Tripped) as tripped:
        watching.check([GOOD, *[unjudged] * 5, EMPTY])
    assert tripped.value.evidence.num_judged == 2


@pytest.mark.parametrize("cause", Cause)
def test_any_cause_speaks_against_the_run(gate, trace, cause):
    """Also one of an answer whose status is ok: its text was lost on the way."""
    with pytest.raises(Tripped) as tripped:
        gate(1, 1.0).add(trace, Verdict(Status.OK, cause, 4, 12, 7))
    assert tripped.value.evidence.main_cause is cause


@pytest.mark.parametrize("status", ["ok", "truncated_in_answer"])
def test_an_answer_without_a_cause_speaks_for_the_run(gate, trace, status):
    gate(1, 1.0).add(trace, Verdict(Status(status), None, 4, 12, 7))


def test_the_evidence_counts_each_cause_and_names_the_most_frequent(gate, trace):
    strict = gate(6, 1.0)
    for verdict in [CUT, EMPTY, GOOD, CUT, EMPTY]:
        strict.add(trace, verdict)
    with pytest.raises(Tripped) as tripped:
        strict.add(trace, CUT)
    evidence = tripped.value.evidence
    assert evidence.causes == {Cause.CUT: 3, Cause.NOT_THINKING: 2}
    assert evidence.main_cause is Cause.CUT
    assert evidence.num_judged == 6


def test_the_evidence_shows_the_last_two_bad_answers(gate, trace_of):
    strict = gate(5, 1.0)
    for name, verdict in [("a", EMPTY), ("b", EMPTY), ("c", GOOD), ("d", EMPTY)]:
        strict.add(trace_of(name), verdict)
    with pytest.raises(Tripped) as tripped:
        strict.add(trace_of("e"), GOOD)
    shown = [trace["sample_id"] for trace in tripped.value.evidence.examples]
    assert shown == ["b_gen0", "d_gen0"]


def test_a_whole_run_shows_what_was_seen_as_it_came(gate, trace_of):
    watching = gate(3, 1.0)
    for name, verdict in [("a", EMPTY), ("b", GOOD)]:
        watching.add(trace_of(name), verdict)
    with pytest.raises(Tripped) as tripped:
        watching.check(iter([EMPTY, GOOD]))
    evidence = tripped.value.evidence
    assert [trace["sample_id"] for trace in evidence.examples] == ["a_gen0"]
    assert (evidence.num_judged, evidence.causes) == (2, {Cause.NOT_THINKING: 1})


def test_judging_a_whole_run_leaves_the_window_alone(gate, trace):
    watching = gate(2, 0.5)
    watching.add(trace, GOOD)
    watching.check([GOOD] * 10)
    with pytest.raises(Tripped):
        watching.check([EMPTY] * 10)
    watching.add(trace, EMPTY)  # the second of two: half of them are good
