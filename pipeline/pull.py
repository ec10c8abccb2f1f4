"""`dvc pull`, with a mark for as long as something that was asked for has not come.

    make pull                     (python -m pipeline.pull OUTPUT …)

Reads    dvc.yaml, dvc.lock, the default remote
Writes   the outputs, .cache/pull-unfinished

What does not come, the next `dvc repro` would compute, and somebody may have paid for it. So the
mark names what is still to come, an output a line, and `make repro` stops at it; what another pull
brings takes nothing but its own lines away.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from dvc.exceptions import DvcException
from dvc.repo import Repo

from pipeline.records import HIDDEN_STATES
from pipeline.resume import write_bytes

UNFINISHED = Path(".cache/pull-unfinished")


def main() -> None:
    targets = sys.argv[1:]
    try:
        with Repo() as repo:
            asked_for = outputs_of(repo, targets)
    except DvcException as error:
        sys.exit(f"pull: {error}")
    expect({*expected(), *asked_for})
    try:
        code = subprocess.run([sys.executable, "-m", "dvc", "pull", *targets]).returncode
    except KeyboardInterrupt:  # DVC has had it too, and says so
        code = 130
    if code:
        print(
            "pull: what did not come would be computed anew, so `make repro` stops until `make "
            f'pull TARGETS="{" ".join(expected())}"` has brought it, or until you '
            f"`rm {UNFINISHED}` (docs/dvc.md)",
            file=sys.stderr,
        )
        sys.exit(code)
    expect(name for name in expected() if not is_within(name, asked_for))
    if not HIDDEN_STATES.exists():
        print(
            f"{HIDDEN_STATES} did not come with it: what needs it asks the verifier for all of it, "
            f"unless `make pull TARGETS={HIDDEN_STATES}` brings it from a remote that has it"
        )


def outputs_of(repo: Repo, targets: Iterable[str]) -> list[str]:
    """Outputs and parts of outputs as they were named, of a stage all that it has in the cache.
    Raises DvcException for what is neither."""
    found: list[str] = []
    for target in targets:
        outputs = [out.def_path for out in repo.index.targets_view([target]).outs if out.use_cache]
        path = PurePosixPath(target).as_posix()
        found += [path] if is_within(path, outputs) else outputs
    return found


def is_within(path: str, folders: Iterable[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def expected() -> list[str]:
    """What earlier pulls were to bring and did not."""
    return UNFINISHED.read_text().splitlines() if UNFINISHED.exists() else []


def expect(names: Iterable[str]) -> None:
    if lines := "".join(f"{name}\n" for name in sorted(names)):
        write_bytes(UNFINISHED, lines.encode())
    else:
        UNFINISHED.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
