"""One way to show progress: a live bar in a terminal, a line now and then anywhere else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

SECONDS_BETWEEN_LINES = 10.0
SECONDS_WORTH_A_LINE = 2.0


class Bar:
    """Counts what is done; `note` is what else to say beside it (tokens a second, rejections)."""

    def __init__(self, label: str, total: int, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.note = 0, ""
        self._begun_at = 0
        self._started = self._last_line = time.monotonic()

    def begin_at(self, done: int) -> None:
        """So many were done before, which says nothing about the rate."""
        self.done = self._begun_at = done

    def advance(self, amount: int = 1, note: str | None = None) -> None:
        self.done += amount
        if note is not None:
            self.note = note
        self._show()

    def _show(self) -> None:
        """Without a terminal: a line every ten seconds and one at the end; none for a moment."""
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES and self.done < self.total:
            return
        self._last_line = now
        if now - self._started < SECONDS_WORTH_A_LINE:
            return
        rate = (self.done - self._begun_at) / max(now - self._started, 1e-9)
        left = (self.total - self.done) / rate if rate else float("inf")
        end = f"{left:.0f} s left" if self.done < self.total else f"in {now - self._started:.0f} s"
        note = f", {self.note}" if self.note else ""
        print(
            f"{self.label}: {self.done}/{self.total} {self.unit}, {rate:.1f}/s, {end}{note}",
            flush=True,
        )


class _LiveBar(Bar):
    """The same in a terminal, drawn by Rich."""

    def __init__(self, label: str, total: int, unit: str, progress: Progress) -> None:
        super().__init__(label, total, unit)
        self._progress = progress
        self._task = progress.add_task(label, total=total, note="")

    def _show(self) -> None:
        rate = (self.done - self._begun_at) / max(time.monotonic() - self._started, 1e-9)
        note = f"{rate:.1f} {self.unit}/s" + (f", {self.note}" if self.note else "")
        self._progress.update(self._task, total=self.total, completed=self.done, note=note)


@contextmanager
def progress_bar(label: str, total: int, unit: str) -> Iterator[Bar]:
    """`with progress_bar("asking", 400, "questions") as bar: bar.advance()`."""
    if not Console().is_terminal:
        yield Bar(label, total, unit)
        return

    def fixed(**more: object) -> Column:
        return Column(no_wrap=True, **more)  # type: ignore[arg-type]

    columns = (
        TextColumn("{task.description}", table_column=fixed()),
        BarColumn(bar_width=16, table_column=fixed()),
        MofNCompleteColumn(table_column=fixed()),
        TimeRemainingColumn(elapsed_when_finished=True, table_column=fixed()),
        # Last and cut where the terminal ends.
        TextColumn(
            "{task.fields[note]}", markup=False, table_column=fixed(ratio=1, overflow="ellipsis")
        ),
    )
    with Progress(*columns, expand=True) as progress:
        yield _LiveBar(label, total, unit, progress)


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Say what takes its time when nobody can know how long (a server that loads a model)."""
    started = time.monotonic()
    if Console().is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, transient=True) as progress:
            progress.add_task(label, total=None)
            yield
    else:
        print(f"{label} …", flush=True)
        yield
    print(f"{label}: done in {time.monotonic() - started:.0f} s", flush=True)
