"""What a run of `generate` looks like while it runs: speed and, before all, quality.

One line beside the progress bar, and the same facts in logs/generate.status.json for other views
(at most twice a second, written atomically, so that a reader never sees half of it).
"""

import json
import os
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from pipeline.reasoning import Cause, Verdict
from pipeline.records import NO_ANSWER, TRUNCATED
from pipeline.resume import TEMP_SUFFIX
from pipeline.stage import LOGS

STATUS_PATH = LOGS / "generate.status.json"
SECONDS_BETWEEN_WRITES = 0.5
# Causes that a person would see as `"reasoning": ""`.
EMPTY = frozenset(
    {
        *(Cause.THINKING_OFF, Cause.NOT_THINKING, Cause.NO_PARSER),
        *(Cause.FIELD_RENAMED, Cause.REASONING_HIDDEN),
    }
)


class Live:
    """Counts over the answers of one run."""

    def __init__(self, total: int) -> None:
        self.total = total  # questions this run may have to ask
        self.sent = self.done = 0
        self._started = time.monotonic()
        self._written = 0.0
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
        seconds = max(time.monotonic() - self._started, 1e-9)
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

    def write(self, state: str) -> None:
        """`state`: probing, asking, done or stopped. `asking` is skipped when it comes too soon."""
        now = time.monotonic()
        if state == "asking" and now - self._written < SECONDS_BETWEEN_WRITES:
            return
        self._written = now
        temp = STATUS_PATH.with_suffix(TEMP_SUFFIX)
        with suppress(OSError):  # nor may a mere view end the run, or hide what does
            LOGS.mkdir(exist_ok=True)
            temp.write_text(json.dumps({"state": state, **self.facts()}), encoding="utf-8")
            os.replace(temp, STATUS_PATH)  # no fsync: it would hold up every answer
