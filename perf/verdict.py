"""Seconds until a server that does not reason is refused.

The demo verifier is served with thinking off by default, and `generate.thinking_switch` has a name
that its chat template does not know, so the request to think is ignored: what happens to whoever
takes another model's switch. Timed from the ready server, as a start of the stage, to its end with
code 1 and a message that names the switch.

    seconds_to_reasoning_verdict

Run      python -m perf.verdict [--rounds 1]
"""

import subprocess
import sys
import time

from perf.project import ROOT, Project, scratch_project
from perf.report import publish, result, sizes
from pipeline.server import serve

COMMAND = "python -m perf.verdict"
NUM_ROUNDS = 3
SERVER_ARGS = ["--default-chat-template-kwargs", '{"enable_thinking": false}']
CHANGES = {"generate.thinking": True, "generate.thinking_switch": "thinking"}


def main() -> None:
    size, is_full = sizes(COMMAND, rounds=NUM_ROUNDS)
    with scratch_project(CHANGES) as project:
        project.take_questions(ROOT / "data/raw")
        with serve(project.params.verifier, "perf", SERVER_ARGS) as endpoint:
            times = [seconds_to_verdict(project, endpoint.base_url) for _ in range(size.rounds)]
    publish({"seconds_to_reasoning_verdict": result(times, COMMAND)}, is_full=is_full)


def seconds_to_verdict(project: Project, base_url: str) -> float:
    """Raises SystemExit when the stage does not end with that verdict."""
    project.forget_answers()
    began = time.monotonic()
    ended = subprocess.run(
        project.stage("generate"),
        cwd=project.folder,
        env=project.env(PIPELINE_GENERATE_ENDPOINTS=base_url),
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - began
    if ended.returncode != 1 or "generate.thinking_switch" not in ended.stderr:
        sys.exit(f"no verdict, but code {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    print(f"{seconds:.1f} s: {ended.stderr.splitlines()[0]}")
    return seconds


if __name__ == "__main__":
    main()
