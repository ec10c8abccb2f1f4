"""The present run into remote/, the folder in git from which a clone pulls without an account.

    make share                    (python -m pipeline.share OUTPUT …)

Reads    dvc.lock, DVC's cache
Writes   remote/, in place of what is there; nothing when the run is not whole
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from pipeline.pull import is_within

REMOTE, NAME = Path("remote"), "shared"
BEFORE = Path(".cache/remote-before")


def main() -> None:
    targets = sys.argv[1:]
    if stale := [line for line in dvc("repro", "--dry", "--allow-missing") if "Running" in line]:
        sys.exit(f"share: `dvc repro` first, it is not one run yet: {stale[0].rstrip(':')}")
    if REMOTE.exists():  # else a share that was killed left the last one there
        shutil.rmtree(BEFORE, ignore_errors=True)
        BEFORE.parent.mkdir(exist_ok=True)
        REMOTE.rename(BEFORE)
    try:
        dvc("push", "-r", NAME, *targets)
        # A push of what the cache does not have only warns.
        [status] = dvc("data", "status", "--json", "--granular", "--not-in-remote", "-r", NAME)
        absent = json.loads(status).get("not_in_remote", [])
        if lacking := [t for t in targets if any(is_within(name, [t]) for name in absent)]:
            sys.exit(f"share: DVC's cache does not have all of {', '.join(lacking)}")
    except BaseException:
        shutil.rmtree(REMOTE, ignore_errors=True)
        if BEFORE.exists():
            BEFORE.rename(REMOTE)
        raise
    num_bytes = sum(path.stat().st_size for path in REMOTE.rglob("*") if path.is_file())
    print(
        f"{REMOTE}/ holds this run, {num_bytes / 1e6:.1f} MB: commit it with dvc.lock and reports"
    )


def dvc(*arguments: str) -> list[str]:
    """The lines that a command of DVC says. Exits with its code when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout.splitlines()


if __name__ == "__main__":
    main()
