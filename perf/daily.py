"""DVC day by day at 10,000 samples: what `dvc repro` costs when there is little or nothing to do.

In a clone of the last commit, with questions drawn as the demo's own were, the real pipeline runs
from nothing. Its training and benchmark are cut short: they cost the same however little changed.

    noop_repro_10k_s        `dvc repro`, nothing to do
    concurrency_change_…    `dvc repro` after another `generate.concurrency`: time, questions sent
    cap_plus_10_percent_…   `dvc repro extract` after `prompts.sample_cap` grew by a tenth: its time
                            over that of the same from nothing (_cost; _less_starts: without the
                            seconds in which servers start); questions sent, the probe's too
    demo_pull_s             `make pull` in a clone of the demo

Run      python -m perf.daily                              # or, for a short trial:
         python -m perf.daily --samples 300 --rounds 1
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

from perf.project import ENVIRONMENT, ROOT
from perf.report import publish, result, sizes
from pipeline.demo_verifier.draw import make_question

COMMAND = "python -m perf.daily"
NUM_SAMPLES = 10_000
NUM_ROUNDS = 5
QUESTIONS = "data/raw/drawn.jsonl"
NUM_STEPS = 32
# Those that `prompts` may find to be the same question.
SPARE = 1.05


STARTED = re.compile(r"starting vLLM .*: done in (\d+) s")


class Taken(NamedTuple):
    """Seconds of a command, and those of them in which its servers started."""

    all_s: float
    starts_s: int

    @property
    def less_starts_s(self) -> float:
        return self.all_s - self.starts_s


class Clone:
    """Of the last commit, with the .venv of this tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run(["git", "clone", "-q", ROOT, folder], check=True)
        (folder / ".venv").symlink_to(ROOT / ".venv")

    def run(self, *command: str) -> Taken:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, **ENVIRONMENT, "PATH": path, "DVC_NO_ANALYTICS": "1"}
        start, said = time.monotonic(), []
        with subprocess.Popen(
            command, cwd=self.folder, env=env, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                said.append(line)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        starts = map(int, STARTED.findall("".join(said)))
        return Taken(time.monotonic() - start, sum(starts))

    def set_params(self, **values: object) -> None:
        """`section__key=value`."""
        path = self.folder / "params.yaml"
        params = yaml.safe_load(path.read_text(encoding="utf-8"))
        for name, value in values.items():
            section, key = name.split("__")
            params[section][key] = value
        path.write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")

    def questions_sent(self) -> int:
        """Since the last call, to the servers that its stages started."""
        logs = list((self.folder / "logs").glob("vllm-*.log"))
        sent = sum(
            log.read_text(errors="replace").count("POST /v1/chat/completions") for log in logs
        )
        for log in logs:
            log.unlink()
        return sent


def main() -> None:
    size, is_full = sizes(COMMAND, samples=NUM_SAMPLES, rounds=NUM_ROUNDS)
    with TemporaryDirectory(prefix="perf-") as folder:
        results = {
            **at_scale(Clone(Path(folder) / "large"), size.samples, size.rounds),
            "demo_pull_s": result(list(pulls(Path(folder), size.rounds)), COMMAND),
        }
    publish(results, is_full=is_full)


def at_scale(clone: Clone, num_samples: int, num_rounds: int) -> dict[str, dict[str, object]]:
    params = yaml.safe_load((clone.folder / "params.yaml").read_text(encoding="utf-8"))
    tenth = num_samples // 10
    draw_questions(clone.folder / QUESTIONS, num_samples + tenth)
    num_held_out = params["prompts"]["num_held_out"]
    clone.set_params(
        prompts__sources=[QUESTIONS],
        prompts__sample_cap=num_samples - num_held_out,
        generate__concurrency=128,
        extract__dtype="bfloat16",
        train__num_steps=NUM_STEPS,
        train__checkpoint_steps=NUM_STEPS,
        benchmark__num_prompts=8,
        benchmark__temperatures=[0.0],
        benchmark__both_thinking_modes=False,
    )
    whole = clone.run("dvc", "repro", "extract")
    clone.run("dvc", "repro")
    noop_s = [clone.run("dvc", "repro").all_s for _ in range(num_rounds)]

    clone.questions_sent()
    clone.set_params(generate__concurrency=64)
    concurrency_s = clone.run("dvc", "repro").all_s
    concurrency_questions = clone.questions_sent()

    clone.set_params(prompts__sample_cap=num_samples - num_held_out + tenth)
    more = clone.run("dvc", "repro", "extract")
    return {
        "noop_repro_10k_s": result(noop_s, COMMAND),
        "concurrency_change_s": result([concurrency_s], COMMAND),
        "concurrency_change_requests": result([concurrency_questions], COMMAND),
        "cap_plus_10_percent_cost": result([more.all_s / whole.all_s], COMMAND),
        "cap_plus_10_percent_cost_less_starts": result(
            [more.less_starts_s / whole.less_starts_s], COMMAND
        ),
        "cap_plus_10_percent_requests": result([clone.questions_sent()], COMMAND),
    }


def draw_questions(path: Path, count: int) -> None:
    rng = Random(0)
    drawn: dict[str, None] = {}
    while len(drawn) < count * SPARE:
        drawn[make_question(rng).question] = None
    rows = ({"messages": [{"role": "user", "content": question}]} for question in drawn)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def pulls(folder: Path, num_rounds: int) -> Iterator[float]:
    for turn in range(num_rounds):
        # -o: the .venv is there and need not be made anew for a clone whose files are newer.
        yield Clone(folder / f"pull-{turn}").run("make", "-o", ".venv/.ready-cpu", "pull").all_s


if __name__ == "__main__":
    main()
