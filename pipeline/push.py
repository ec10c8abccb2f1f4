"""`dvc push`, unless it would put hundreds of megabytes into git.

    make push                     (python -m pipeline.push [OUTPUT …])

Reads    dvc.lock, the DVC configuration
Writes   the default remote

The remote that ships with the project is a folder in git, which is there so that a clone can be
looked at without any account. It is meant for what `make share` puts there, a few megabytes.
"""

import subprocess
import sys
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.repo import Repo

MAX_BYTES_IN_GIT = 20_000_000


def main() -> None:
    targets = sys.argv[1:]
    if option := next((target for target in targets if target.startswith("-")), None):
        sys.exit(f"push: {option} is no output; `dvc push {option}` asks nothing")
    try:
        with Repo() as repo:
            folder, num_bytes = folder_in_git(repo), bytes_of(repo, targets)
    except DvcException as error:
        sys.exit(f"push: {error}")
    if folder and num_bytes > MAX_BYTES_IN_GIT:
        sys.exit(
            f"push: {num_bytes / 1e6:,.0f} MB are too much for {folder.name}/, which is in git; "
            "name a remote of your own: `dvc remote add -d mine s3://bucket/path` (docs/dvc.md)"
        )
    sys.exit(subprocess.run([sys.executable, "-m", "dvc", "push", *targets]).returncode)


def folder_in_git(repo: Repo) -> Path | None:
    """The default remote, where it is a folder of this repository that git does not ignore."""
    name = repo.config["core"].get("remote")
    url = repo.config["remote"].get(name, {}).get("url", "")
    folder, root = Path(url).resolve(), Path(repo.root_dir).resolve()
    if not url or "://" in url or not folder.is_relative_to(root):
        return None
    ignored = subprocess.run(["git", "check-ignore", "-q", folder], cwd=root, capture_output=True)
    return None if ignored.returncode == 0 else folder


def bytes_of(repo: Repo, targets: list[str]) -> int:
    """Of the outputs that DVC caches, or of those named, as dvc.lock has them. Raises DvcException
    for a name that is none."""
    outs = repo.index.targets_view(targets or None).outs
    return sum(out.meta.size or 0 for out in outs if out.use_cache)


if __name__ == "__main__":
    main()
