"""`dvc push`, unless it would put hundreds of megabytes into git.

    make push                     (python -m pipeline.push [OUTPUT …])

Reads    dvc.lock, the DVC configuration
Writes   the default remote

The remote that ships with the project is a folder in git, which is there so that a clone can be
looked at without any account. It is meant for what `make share` puts there, a few megabytes.
"""

import os
import sys
from pathlib import Path

from dvc.repo import Repo

MAX_BYTES_IN_GIT = 20_000_000


def main() -> None:
    targets = sys.argv[1:]
    with Repo() as repo:
        url, num_bytes = default_remote(repo), bytes_of(repo, targets)
    if url is None:
        sys.exit("push: there is no default remote: `dvc remote add -d mine s3://bucket/path`")
    if Path(url).is_relative_to(Path.cwd()) and num_bytes > MAX_BYTES_IN_GIT:
        sys.exit(
            f"push: {num_bytes / 1e6:,.0f} MB are too much for {Path(url).name}/, which is in git; "
            "name a remote of your own: `dvc remote add -d mine s3://bucket/path` (docs/dvc.md)"
        )
    os.execvp("dvc", ["dvc", "push", *targets])


def default_remote(repo: Repo) -> str | None:
    """Its URL; of a folder the absolute path."""
    name = repo.config["core"].get("remote")
    return str(repo.config["remote"][name]["url"]) if name else None


def bytes_of(repo: Repo, targets: list[str]) -> int:
    """Of the outputs that DVC caches, or of those named, as dvc.lock has them."""
    return sum(
        out.meta.size or 0
        for out in repo.index.outs
        if out.use_cache and (not targets or out.def_path in targets)
    )


if __name__ == "__main__":
    main()
