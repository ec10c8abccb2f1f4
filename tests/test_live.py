"""What is said of a run: while it runs (the line, the status file), and of its cuts afterwards."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import live
from pipeline.generate import truncation
from pipeline.live import Live
from pipeline.params import load_params
from pipeline.reasoning import Cause, Verdict
from pipeline.records import Status
from pipeline.traces import JOURNAL, Place, Stored

STATUS_FILE = Path("logs/generate.status.json")


@pytest.fixture
def clock(tmp_path, monkeypatch):
    """`clock.now` is what time.monotonic says in pipeline.live."""
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(live, "time", clock)
    return clock


def verdict(status: str, cause: str | None = None, tokens: int = 0, reasoning: int = 0) -> Verdict:
    return Verdict(Status(status), Cause(cause) if cause else None, 9, tokens, reasoning)


@pytest.fixture
def watched(clock) -> Live:
    """Nine of ten questions sent, eight back, four seconds gone."""
    run = Live(10)
    run.sent = 9
    for each in (
        verdict("ok", None, 100, 60),
        verdict("ok", "short", 20, 2),
        verdict("empty_reasoning", "not_thinking", 30, 0),
        verdict("ok", "no_parser", 50, 40),
        verdict("truncated_in_reasoning", "cut", 512, 511),
        verdict("aborted", "aborted", 10, 9),
        verdict("rejected_by_server"),
        verdict("failed"),
    ):
        run.add(each)
    clock.now += 4
    return run


def test_the_facts_of_a_run(watched):
    assert watched.facts() == {
        "total": 10,
        "done": 8,
        "in_flight": 1,
        "seconds": 4.0,
        "seconds_left": 1.0,  # half a second each, two to come
        "tokens_per_s": 180.5,  # (100 + 20 + 30 + 50 + 512 + 10) / 4
        "empty_reasoning_fraction": 0.4,  # of the five that were answered
        "truncated_fraction": 0.2,
        "mean_reasoning_tokens": 122.6,  # (60 + 2 + 0 + 40 + 511) / 5
        "failures": {"aborted": 1, "failed": 1, "rejected_by_server": 1},
    }


def test_the_line_says_the_same(watched):
    assert str(watched) == (
        "180 tok/s, 1 in flight, 40.0% empty, 20.0% cut, 123 reasoning tokens, 1 aborted, "
        "1 failed, 1 rejected_by_server"
    )


def test_a_run_that_only_starts_divides_by_nothing(clock):
    assert Live(5).facts() == {
        "total": 5,
        "done": 0,
        "in_flight": 0,
        "seconds": 0.0,
        "seconds_left": 0.0,
        "tokens_per_s": 0.0,
        "empty_reasoning_fraction": 0.0,
        "truncated_fraction": 0.0,
        "mean_reasoning_tokens": 0.0,
        "failures": {},
    }


def test_a_run_of_failures_alone_has_no_fractions(clock):
    run = Live(2)
    run.sent = 2
    run.add(verdict("timed_out"))
    run.add(verdict("timed_out"))
    facts = run.facts()
    assert facts["failures"] == {"timed_out": 2}
    assert facts["empty_reasoning_fraction"] == facts["truncated_fraction"] == 0.0
    assert "2 timed_out" in str(run)


def test_more_to_ask_is_more_to_wait_for(watched):
    watched.total += 2
    facts = watched.facts()
    assert (facts["total"], facts["seconds_left"]) == (12, 2.0)


LOOKS_EMPTY = {"thinking_off", "not_thinking", "no_parser", "field_renamed", "reasoning_hidden"}


@pytest.mark.parametrize("cause", [*Cause, None])
def test_empty_is_what_a_person_would_see_as_empty(clock, cause):
    run = Live(1)
    run.add(verdict("ok", cause))
    assert run.facts()["empty_reasoning_fraction"] == (1.0 if cause in LOOKS_EMPTY else 0.0)


@pytest.mark.parametrize("status", Status)
def test_cut_is_what_max_tokens_cut(clock, status):
    run = Live(1)
    run.add(verdict(status))
    is_cut = status in {"truncated_in_reasoning", "truncated_in_answer"}
    assert run.facts()["truncated_fraction"] == (1.0 if is_cut else 0.0)


# the status file


def written() -> dict:
    """The status file, which must be whole whenever one looks."""
    return json.loads(STATUS_FILE.read_bytes())


def test_the_file_holds_the_facts_and_the_state(watched):
    watched.write("asking")
    assert written() == {"state": "asking", **watched.facts()}
    assert [path.name for path in Path("logs").iterdir()] == ["generate.status.json"]


def test_the_folder_is_made_when_no_server_of_our_own_made_it(clock):
    Path("logs").rmdir()
    Live(1).write("asking")
    assert written()["total"] == 1


def test_while_asking_the_file_is_written_twice_a_second_at_most(clock):
    run = Live(10)
    seen = []
    for after in (0.0, 0.25, 0.25, 0.25, 0.25, 0.125, 5.0):
        clock.now += after
        run.add(verdict("ok"))
        run.write("asking")
        seen.append(written()["done"])
    assert seen == [1, 1, 3, 3, 5, 5, 7]


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_the_end_is_always_written(clock, state):
    run = Live(10)
    run.write("asking")
    run.add(verdict("ok"))
    run.write(state)
    assert (written()["state"], written()["done"]) == (state, 1)


def test_a_reader_never_sees_half_a_file(clock, monkeypatch):
    run = Live(10)
    run.write("asking")
    replace = os.replace

    def looking(source, target):
        assert written()["done"] == 0  # the earlier one stays until the next one is whole
        assert json.loads(Path(source).read_bytes())["done"] == 1
        assert Path(source).parent == STATUS_FILE.parent  # a rename across disks is a copy
        replace(source, target)

    monkeypatch.setattr(os, "replace", looking)
    run.add(verdict("ok"))
    run.write("done")
    assert written()["done"] == 1


# cuts, in reports/generate.json


def answer(status: str, source: str, num_tokens: int, max_tokens: int = 512) -> Stored:
    place = Place(JOURNAL, 0, 1)
    judged = verdict(status, None, num_tokens)
    return Stored(place, judged, "Q_gen0", source, "length", max_tokens, 1024, "", True)


def test_cuts_are_counted_by_phase_source_and_length(project):
    answers = [
        answer("truncated_in_reasoning", "math", 512),
        answer("truncated_in_reasoning", "math", 513, max_tokens=768),
        answer("truncated_in_answer", "chat", 512),
        answer("ok", "chat", 129),
        answer("ok", "chat", 128, max_tokens=513),
        answer("ok", "math", 100, max_tokens=100),
        answer("looping", "code", 512),  # cut too, but for a reason of its own
        answer("empty_reasoning", "code", 2),
        answer("ok", "code", 1),
        answer("failed", "code", 0),
    ]
    assert truncation(answers, load_params().generate) == {
        "reasoning": 2,
        "answer": 1,
        "asked_with_more": 2,  # than generate.max_tokens, 512
        "by_source": {
            "chat": {"rows": 3, "truncated": 1},
            "code": {"rows": 4, "truncated": 0},
            "math": {"rows": 3, "truncated": 2},
        },
        "by_length": {
            "up_to_000001": {"rows": 2, "truncated": 0},
            "up_to_000002": {"rows": 1, "truncated": 0},
            "up_to_000128": {"rows": 2, "truncated": 0},
            "up_to_000256": {"rows": 1, "truncated": 0},
            "up_to_000512": {"rows": 3, "truncated": 2},
            "up_to_001024": {"rows": 1, "truncated": 1},
        },
    }


@pytest.mark.parametrize(
    ("num_tokens", "name"),
    [
        *((1, "000001"), (2, "000002"), (3, "000004"), (4, "000004"), (5, "000008")),
        *((65, "000128"), (128, "000128"), (129, "000256"), (131072, "131072")),
    ],
)
def test_lengths_are_binned_by_powers_of_two(project, num_tokens, name):
    counted = truncation([answer("ok", "math", num_tokens)], load_params().generate)
    assert counted["by_length"] == {f"up_to_{name}": {"rows": 1, "truncated": 0}}


def test_the_bins_are_in_order_of_length_and_the_sources_in_theirs(project):
    answers = [answer("ok", source, n) for source, n in [("b", 9000), ("c", 90), ("a", 900)]]
    counted = truncation(answers, load_params().generate)
    assert list(counted["by_length"]) == ["up_to_000128", "up_to_001024", "up_to_016384"]
    assert list(counted["by_source"]) == ["a", "b", "c"]


def test_no_answers_are_no_cuts(project):
    assert truncation([], load_params().generate) == {
        "reasoning": 0,
        "answer": 0,
        "asked_with_more": 0,
        "by_source": {},
        "by_length": {},
    }
