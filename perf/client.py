"""The client alone: speed beside speculators' and memory, against a server that costs nothing.

The stub (perf/stub_server.py, a process of its own) answers at once with 2,000 tokens.

    client_vs_speculators      `generate` over `speculators regenerate-responses`, by the time from
                               the first request to the end of the process: the stub has answered
                               long before a client has dealt with it
    client_memory_growth_mb    largest resident size of `generate` through many answers, less its
                               size when the first request reached the stub, in 10^6 bytes

Run      python -m perf.client                                  # or, for a short trial:
         python -m perf.client --prompts 512 --rounds 1 --memory-prompts 1024
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from perf.compare import Clients, answers_per_s, ratios, take_turns
from perf.project import ROOT, Project, scratch_project
from perf.report import publish, result, sizes
from perf.stopwatch import read_stopwatch, start_stopwatch
from perf.stub_server import MAX_MODEL_LEN, NUM_TOKENS
from pipeline.resume import jsonl
from pipeline.server import free_port

COMMAND = "python -m perf.client"
NUM_PROMPTS = 4000
NUM_ROUNDS = 3
NUM_MEMORY_PROMPTS = 20_000
CONCURRENCY = 512
SAMPLE_EVERY_S = 0.02


def main() -> None:
    size, is_full = sizes(
        COMMAND, prompts=NUM_PROMPTS, rounds=NUM_ROUNDS, memory_prompts=NUM_MEMORY_PROMPTS
    )
    with stub_server() as base_url:
        with project_of(size.prompts) as project:
            clients = Clients(project, base_url)
            turns = {"ours": clients.ours, "speculators": clients.speculators}
            rounds = take_turns(turns, size.rounds)
        with project_of(size.memory_prompts) as project:
            growth_mb = memory_growth_mb(project, base_url)
    results = {
        f"client_requests_per_s_{name}": result(answers_per_s(rounds, name, "storing_s"), COMMAND)
        for name in turns
    }
    compared = ratios(rounds, "speculators", "storing_s")
    whole = ratios(rounds, "speculators", "whole_s")
    results["client_vs_speculators"] = result(compared, COMMAND)
    results["client_vs_speculators_whole_process"] = result(whole, COMMAND)
    results["client_memory_growth_mb"] = result([growth_mb], COMMAND)
    publish(results, is_full=is_full)


@contextmanager
def stub_server() -> Iterator[str]:
    """The base URL of a stub that runs as long as the block."""
    port = free_port()
    command = [sys.executable, "-m", "perf.stub_server", str(port)]
    with subprocess.Popen(command, cwd=ROOT) as process:
        base_url = f"http://127.0.0.1:{port}/v1"
        try:
            wait_for(base_url, process)
            yield base_url
        finally:
            process.terminate()


def wait_for(base_url: str, process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            httpx2.get(f"{base_url}/models", trust_env=False).raise_for_status()
        except httpx2.HTTPError:
            time.sleep(0.1)
        else:
            return
    sys.exit(f"the stub server ended with {process.returncode}")


@contextmanager
def project_of(num_questions: int) -> Iterator[Project]:
    """A project with so many made-up questions, whose budget fits the stub's answers."""
    changes = {
        "verifier.max_model_len": MAX_MODEL_LEN,
        "prompts.num_held_out": 1,
        "prompts.sample_cap": num_questions - 1,
        "generate.concurrency": CONCURRENCY,
        "generate.max_tokens": NUM_TOKENS,
    }
    with scratch_project(changes) as project:
        raw = project.folder / "raw"
        raw.mkdir()
        rows = (
            {"messages": [{"role": "user", "content": f"What is {number} plus {number % 7}?"}]}
            for number in range(num_questions)
        )
        (raw / "questions.jsonl").write_bytes(jsonl(rows))
        project.take_questions(raw)
        yield project


def memory_growth_mb(project: Project, base_url: str) -> float:
    """One run of the stage: its largest size less that at the first request, in MB (10^6)."""
    project.forget_answers()
    start_stopwatch(base_url)
    seen: list[tuple[float, int, int]] = []  # time, bytes now, most bytes so far
    process = subprocess.Popen(
        project.stage("generate"),
        cwd=project.folder,
        env=project.env(PIPELINE_GENERATE_ENDPOINTS=base_url),
        stdout=subprocess.DEVNULL,
    )
    while process.poll() is None:
        if sizes_now := resident_bytes(process.pid):
            seen.append((time.monotonic(), *sizes_now))
        time.sleep(SAMPLE_EVERY_S)
    if process.returncode:
        sys.exit(f"generate ended with {process.returncode}")
    first_in, _ = read_stopwatch(base_url)
    before = [now for moment, now, _ in seen if moment <= first_in][-1]
    most = seen[-1][2]
    print(f"memory: {before / 1e6:.0f} MB at the first request, {most / 1e6:.0f} MB at most")
    return (most - before) / 1e6


def resident_bytes(pid: int) -> tuple[int, int] | None:
    """VmRSS and VmHWM of a process; None when it is gone."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    if "VmRSS" not in lines:
        return None
    now, most = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, most


if __name__ == "__main__":
    main()
