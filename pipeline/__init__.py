"""From chat questions to an EAGLE-3 draft of a reasoning model; `dvc.yaml` shows the stages."""

import os
import sys
from types import TracebackType


def _say_interrupted(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Ctrl-C while a stage still loads its libraries, before `run_stage` is there to say it."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted while starting; the next run goes on", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = _say_interrupted

# Read when torch is loaded, so set before: threads that wait for each other spin for microseconds,
# not for milliseconds, which costs little on a quiet machine and saves half the time on a busy one.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
