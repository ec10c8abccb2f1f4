"""A scratch project for one measurement: params.yaml with changes, the demo verifier, prompts.

with scratch_project({"generate.concurrency": 128}) as project:
    project.take_questions(ROOT / "data/raw")
    subprocess.run(project.stage("generate"), cwd=project.folder, env=project.env())
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pipeline.errors import UserError
from pipeline.params import load_params
from pipeline.resume import read_jsonl

ROOT = Path(__file__).resolve().parent.parent
# The clients run in the scratch folder, which is not where the modules lie, and without a network.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class Project:
    def __init__(self, folder: Path, changes: Mapping[str, Any]) -> None:
        self.folder = folder
        values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        for key, value in changes.items():
            section, name = key.split(".")
            values[section][name] = value
        (folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
        (folder / "models").mkdir()
        (folder / "models/verifier").symlink_to(ROOT / "models/verifier")
        self.params = load_params(folder / "params.yaml")

    def take_questions(self, raw: Path) -> None:
        """Run the first two stages on the questions in the folder `raw`."""
        (self.folder / "data").mkdir()
        (self.folder / "data/raw").symlink_to(raw)
        for stage in ("identify", "prompts"):
            subprocess.run(self.stage(stage), cwd=self.folder, env=self.env(), check=True)

    def borrow(self, data: Path) -> None:
        """Links to what a finished run has in its data folder, in place of those to another.
        Raises UserError when it has none."""
        (self.folder / "data").mkdir(exist_ok=True)
        for name in ("verifier.json", "sequences", "hidden_states"):
            if not (data / name).exists():
                raise UserError(f"{data / name} is not there: `make repro` first")
            link = self.folder / "data" / name
            link.unlink(missing_ok=True)
            link.symlink_to(data / name)

    @property
    def questions(self) -> list[dict[str, Any]]:
        return list(read_jsonl(self.folder / "data/prompts/prompts.jsonl"))

    def stage(self, name: str) -> list[str]:
        return [sys.executable, "-m", f"pipeline.{name}"]

    def env(self, **more: str) -> dict[str, str]:
        caches = {name: str(self.folder / "cache") for name in ("HF_HOME", "VLLM_CACHE_ROOT")}
        return {**os.environ, **ENVIRONMENT, **caches, **more}

    def forget_answers(self) -> None:
        """As if nothing had been asked yet, by any client."""
        for output in ("data/traces", "data/.stash", "out"):
            shutil.rmtree(self.folder / output, ignore_errors=True)
        (self.folder / "out").mkdir()


@contextmanager
def scratch_project(changes: Mapping[str, Any]) -> Iterator[Project]:
    with TemporaryDirectory(prefix="perf-") as folder:
        yield Project(Path(folder), changes)
