"""Fetches the questions that params.yaml names by URL, each as an import that DVC knows.

    make raw                        (python -m pipeline.raw)

Reads    prompts.sources and prompts.urls
Writes   each source that is not here, and beside it its .dvc file with URL, size and hash
"""

import subprocess
import sys
from pathlib import Path

from pipeline.errors import ParamsError
from pipeline.params import load_params


def main() -> None:
    try:
        params = load_params().prompts
    except ParamsError as error:
        sys.exit(f"raw: {error}")
    if not params.urls:
        print("prompts.urls is empty: prompts.sources are files that are here")
    for source, url in zip(params.sources, params.urls, strict=bool(params.urls)):
        known = Path(f"{source}.dvc")
        if Path(source).exists():
            newer = f"; `dvc update {known}` looks for a newer one" if known.exists() else ""
            print(f"{source} is here{newer}")
            continue
        if known.exists():
            sys.exit(
                f"raw: {known} pins {source}: `dvc pull {known}` brings those bytes from a remote, "
                f"`dvc update {known}` what the URL gives now"
            )
        Path(source).parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "dvc", "import-url", "--", url, source]
        if code := subprocess.run(command).returncode:
            print(
                f"raw: {source} did not come from {url}; check prompts.urls, or run it again",
                file=sys.stderr,
            )
            sys.exit(code)


if __name__ == "__main__":
    main()
