"""Progress without a terminal: short lines, none for a moment's work."""

import pytest

from pipeline import progress


@pytest.fixture
def clock(monkeypatch):
    """`clock.now` is the time that progress sees."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(progress.time, "monotonic", lambda: Clock.now)
    return Clock


def test_a_moments_work_says_nothing(clock, capsys):
    with progress.progress_bar("reading", 3, "rows") as bar:
        for _ in range(3):
            bar.advance()
    assert capsys.readouterr().out == ""


def test_long_work_says_a_line_now_and_then_and_one_at_the_end(clock, capsys):
    with progress.progress_bar("asking", 100, "questions") as bar:
        for _ in range(100):
            clock.now += 0.25
            bar.advance(1, "9 tok/s")
    assert capsys.readouterr().out.splitlines() == [
        "asking: 40/100 questions, 4.0/s, 15 s left, 9 tok/s",
        "asking: 80/100 questions, 4.0/s, 5 s left, 9 tok/s",
        "asking: 100/100 questions, 4.0/s, in 25 s, 9 tok/s",
    ]


def test_what_was_done_before_says_nothing_about_the_rate(clock, capsys):
    with progress.progress_bar("training", 120, "steps") as bar:
        bar.begin_at(80)
        for _ in range(40):
            clock.now += 0.5
            bar.advance()
    assert capsys.readouterr().out.splitlines() == [
        "training: 100/120 steps, 2.0/s, 10 s left",
        "training: 120/120 steps, 2.0/s, in 20 s",
    ]


def test_waiting_says_what_for_and_how_long_it_took(clock, capsys):
    with progress.waiting("starting vLLM"):
        clock.now += 31
    assert capsys.readouterr().out.splitlines() == [
        "starting vLLM …",
        "starting vLLM: done in 31 s",
    ]
