"""The reasoning gate: stops a run whose answers lack reasoning.

Of the first `num_samples` answers of a run, and of all at its end, `min_reasoning_fraction` must
speak for it. In between any `num_samples` in a row may hold half as many: a healthy run has its
bad stretches, and one in which the verifier stops thinking has no good ones (docs/decisions.md).
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pipeline.params import Generate
from pipeline.reasoning import NOT_JUDGED, Cause, Verdict
from pipeline.records import Trace


@dataclass(frozen=True)
class Evidence:
    """What speaks against a run; pipeline.diagnosis puts it into words."""

    causes: Counter[Cause]
    num_judged: int
    examples: list[Trace]

    @property
    def main_cause(self) -> Cause:
        return self.causes.most_common(1)[0][0]


class Tripped(Exception):
    """The gate has seen enough."""

    def __init__(self, evidence: Evidence) -> None:
        super().__init__(evidence)
        self.evidence = evidence


class Gate:
    """Judges the answers of one run as they come."""

    def __init__(self, params: Generate) -> None:
        self._params = params.gate
        self._window: deque[Cause | None] = deque(maxlen=params.gate.num_samples)
        self._examples: deque[Trace] = deque(maxlen=2)
        self._num_judged = self._num_good = 0

    @property
    def has_passed_first(self) -> bool:
        """Whether the first `num_samples` will pass, whatever the rest of them is like."""
        num_samples = self._params.num_samples
        return self._num_good / num_samples >= self._params.min_reasoning_fraction

    def add(self, trace: Trace, verdict: Verdict) -> None:
        """Judge the next answer of a run. Raises Tripped."""
        if verdict.status in NOT_JUDGED:
            return
        self._window.append(verdict.cause)
        self._num_judged += 1
        if verdict.cause:
            self._examples.append(trace)
        else:
            self._num_good += 1
        fraction = self._params.min_reasoning_fraction
        if self._num_judged == self._params.num_samples:
            self._require(self._window, fraction)
        elif self._num_judged > self._params.num_samples:
            self._require(self._window, fraction / 2)

    def check(self, verdicts: Iterable[Verdict]) -> None:
        """Judge answers in no order. Raises Tripped."""
        causes = [verdict.cause for verdict in verdicts if verdict.status not in NOT_JUDGED]
        self._require(causes, self._params.min_reasoning_fraction)

    def _require(self, causes: Collection[Cause | None], fraction: float) -> None:
        bad = Counter(cause for cause in causes if cause)
        # Not 1 - bad / all, which floats make less than the fraction that was written down.
        if causes and (len(causes) - bad.total()) / len(causes) < fraction:
            raise Tripped(Evidence(bad, len(causes), list(self._examples)))
