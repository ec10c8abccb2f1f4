"""What a run of `generate` or `extract` looks like while it runs.

One line beside the progress bar, and the same facts in logs/<stage>.status.json for other views
(at most twice a second, written atomically, so that a reader never sees half of it).
"""

import json
import os
import shutil
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.reasoning import Cause, Verdict
from pipeline.records import NO_ANSWER, TRUNCATED
from pipeline.resume import TEMP_SUFFIX
from pipeline.stage import LOGS

SECONDS_BETWEEN_WRITES = 0.5
# Causes that a person would see as `"reasoning": ""`.
EMPTY = frozenset(
    {
        *(Cause.THINKING_OFF, Cause.NOT_THINKING, Cause.NO_PARSER),
        *(Cause.FIELD_RENAMED, Cause.REASONING_HIDDEN),
    }
)


class _Run:
    """What any run of requests tells, and its status file."""

    def __init__(self, stage: str, total: int) -> None:
        self.total = total  # requests this run may have to send
        self.sent = self.done = 0
        self._started = time.monotonic()
        self._written = 0.0
        self._path = LOGS / f"{stage}.status.json"

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)

    def facts(self) -> dict[str, Any]:
        raise NotImplementedError

    def write(self, state: str) -> None:
        """`state`: probing, asking, done or stopped. `asking` is skipped when it comes too soon."""
        now = time.monotonic()
        if state == "asking" and now - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = now
        temp = self._path.with_suffix(TEMP_SUFFIX)
        with suppress(OSError):  # nor may a mere view end the run, or hide what does
            LOGS.mkdir(exist_ok=True)
            temp.write_text(json.dumps({"state": state, **self.facts()}), encoding="utf-8")
            os.replace(temp, self._path)  # no fsync: it would hold up every answer


class Live(_Run):
    """Speed and, before all, quality of the answers of one run of `generate`."""

    def __init__(self, total: int) -> None:
        super().__init__("generate", total)
        self._tokens = self._reasoning_tokens = self._answered = self._empty = self._cut = 0
        self._failures: Counter[str] = Counter()

    def add(self, verdict: Verdict) -> None:
        self.done += 1
        self._tokens += verdict.generated_tokens
        if verdict.status in NO_ANSWER:
            self._failures[verdict.status.value] += 1
            return
        self._answered += 1
        self._reasoning_tokens += verdict.reasoning_tokens
        self._empty += verdict.cause in EMPTY
        self._cut += verdict.status in TRUNCATED

    def facts(self) -> dict[str, Any]:
        """What is known now; fractions are of the answers that came."""
        seconds = self.seconds
        answered = max(self._answered, 1)
        return {
            "total": self.total,
            "done": self.done,
            "in_flight": self.sent - self.done,
            "seconds": round(seconds, 1),
            "seconds_left": round(seconds * (self.total - self.done) / max(self.done, 1), 1),
            "tokens_per_s": round(self._tokens / seconds, 1),
            "empty_reasoning_fraction": round(self._empty / answered, 4),
            "truncated_fraction": round(self._cut / answered, 4),
            "mean_reasoning_tokens": round(self._reasoning_tokens / answered, 1),
            "failures": dict(sorted(self._failures.items())),
        }

    def __str__(self) -> str:
        facts = self.facts()
        parts = [
            f"{facts['tokens_per_s']:.0f} tok/s",
            f"{facts['in_flight']} in flight",
            f"{facts['empty_reasoning_fraction']:.1%} empty",
            f"{facts['truncated_fraction']:.1%} cut",
            f"{facts['mean_reasoning_tokens']:.0f} reasoning tokens",
            *(f"{count} {kind}" for kind, count in facts["failures"].items()),
        ]
        return ", ".join(parts)


class LiveStates(_Run):
    """Speed and room of one run of `extract`."""

    def __init__(self, total: int, total_tokens: int, shards: int, folder: Path) -> None:
        """`folder` is where the shards go."""
        super().__init__("extract", total)
        self.tokens = 0  # of sequences that have their states
        self.shards_written = self.bytes_written = 0
        self._total_tokens, self._shards, self._folder = total_tokens, shards, folder
        self._settled_tokens = 0  # rejected sequences too
        self._rejected: Counter[str] = Counter()
        self._free = shutil.disk_usage(folder).free

    def add(self, num_tokens: int, rejected: str | None = None) -> None:
        self.done += 1
        self._settled_tokens += num_tokens
        if rejected:
            self._rejected[rejected] += 1
        else:
            self.tokens += num_tokens

    def wrote(self, num_bytes: int) -> None:
        self.shards_written += 1
        self.bytes_written += num_bytes
        self._free = shutil.disk_usage(self._folder).free

    def facts(self) -> dict[str, Any]:
        """What is known now; the time left goes by tokens, for long sequences come first."""
        seconds = self.seconds
        left = (self._total_tokens - self._settled_tokens) / max(self._settled_tokens, 1)
        return {
            "total": self.total,
            "done": self.done,
            "in_flight": self.sent - self.done,
            "seconds": round(seconds, 1),
            "seconds_left": round(seconds * left, 1),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens / seconds, 1),
            "shards": self._shards,
            "shards_written": self.shards_written,
            "bytes_written": self.bytes_written,
            "bytes_free": self._free,
            "rejected": dict(sorted(self._rejected.items())),
        }

    def __str__(self) -> str:
        facts = self.facts()
        parts = [
            f"{facts['tokens_per_s']:,.0f} tok/s",
            f"{facts['bytes_written'] / 1e9:,.2f} GB written",
            f"{facts['bytes_free'] / 1e9:,.0f} GB free",
            *(f"{count} {reason}" for reason, count in facts["rejected"].items()),
        ]
        return ", ".join(parts)
