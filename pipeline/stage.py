"""What the process of every stage does around its work.

`run_stage(name, main)` is the last line of each stage module. The stage says which one of how many
it is, ends when DVC ends (also when DVC is killed with -9), turns SIGTERM into an orderly way out
through every `with`, and says what went wrong in one line; the traceback goes to logs/<name>.log.
"""

import ctypes
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from pipeline.errors import PipelineError

LOGS = Path("logs")
STAGES = (
    "identify",
    "prompts",
    "generate",
    "reassemble",
    "extract",
    "train",
    "evaluate",
    "benchmark",
)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def run_stage(name: str, main: Callable[[], None]) -> None:
    """Run `main` as stage `name` and exit: 0, 1 with one line, or 130/143 when interrupted."""
    end_with_parent()
    signal.signal(signal.SIGTERM, _exit_on_signal)
    out, err = Console(), Console(stderr=True)
    number = f"{STAGES.index(name) + 1}/{len(STAGES)} " if name in STAGES else ""
    out.rule(f"[bold]{number}{name}", align="left")
    try:
        main()
    except KeyboardInterrupt:
        err.print(
            f"{name}: interrupted; what is stored stays, the next run goes on", style="yellow"
        )
        sys.exit(130)
    except PipelineError as error:
        err.print(f"{name}: {error}", style="bold red", markup=False, soft_wrap=True)
        _log_traceback(name)
        sys.exit(1)
    except Exception as error:
        log = _log_traceback(name)
        what = f"unexpected {type(error).__name__}: {error} (traceback in {log})"
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            what = f"{error.strerror}; what is stored stays, make room and run again"
        err.print(f"{name}: {what}", style="bold red", markup=False, soft_wrap=True)
        sys.exit(1)


def end_with_parent(signal_number: int = signal.SIGTERM) -> None:
    """Have the kernel send `signal_number` to this process when its parent thread ends (Linux)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it ended before the call above
        os.kill(os.getpid(), signal_number)


def _exit_on_signal(signal_number: int, frame: FrameType | None) -> None:
    signal.signal(signal_number, signal.SIG_IGN)  # a second one must not break the way out
    sys.exit(128 + signal_number)


def _log_traceback(name: str) -> Path:
    path = LOGS / f"{name}.log"
    with suppress(OSError):  # a full disk must not hide what is wrong
        LOGS.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
    return path
