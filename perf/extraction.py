"""Hidden states out of vLLM: tokens a second, beside speculators and beside bare prefill.

The demo verifier answers 1,000 questions; the sequences of these answers go through one server of
hidden states, started as the stage starts it, three ways that take turns:

    ours          `python -m pipeline.extract`: from its first request to its last shard on disk,
                  checksums and all; the parity gate before it does not count
    speculators   `speculators generate-offline-data`, its imports done, to its last file on disk
    bare          completions of one token and nothing else: what the server gives is thrown away

    extract_tokens_per_s          ours
    extract_vs_speculators        ours over speculators', within each round
    extract_vs_bare_prefill       ours over the server's own speed

Run      python -m perf.extraction                              # or, for a short trial:
         python -m perf.extraction --prompts 128 --rounds 1
"""

import asyncio
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from perf.project import ROOT, Project, scratch_project
from perf.reassembly import TIMED
from perf.report import publish, result, sizes
from pipeline.extract import load_sequences
from pipeline.manifest import MANIFEST
from pipeline.records import HIDDEN_STATES, SEQUENCES
from pipeline.resume import read_json
from pipeline.states_server import states_endpoints
from pipeline.verifier import VerifierIdentity

COMMAND = "python -m perf.extraction"
NUM_PROMPTS = 1000
NUM_HELD_OUT = 64
NUM_ROUNDS = 3
CONCURRENCY = 64  # of all three
PREPARED, THEIR_FILES = "prepared", "out"


def main() -> None:
    size, is_full = sizes(COMMAND, prompts=NUM_PROMPTS, rounds=NUM_ROUNDS)
    num_held_out = min(NUM_HELD_OUT, size.prompts // 2)
    changes = {
        "prompts.num_held_out": num_held_out,
        "prompts.sample_cap": size.prompts - num_held_out,
        "generate.concurrency": 128,
        "extract.concurrency": CONCURRENCY,
        "extract.dtype": "float32",  # as speculators stores them
    }
    with scratch_project(changes) as project:
        project.take_questions(ROOT / "data/raw")
        for stage in ("generate", "reassemble"):
            subprocess.run(project.stage(stage), cwd=project.folder, env=project.env(), check=True)
        sequences = load_sequences(project.folder / SEQUENCES)
        # As tensors, which speculators counts on.
        sequences.with_format("torch").save_to_disk(str(project.folder / PREPARED))
        rows = [list(map(int, ids)) for ids in sequences["input_ids"]]
        verifier = VerifierIdentity(**read_json(project.folder / "data/verifier.json"))
        with states_endpoints(project.params, verifier) as endpoints:
            ways = Ways(project, endpoints[0].base_url, rows)
            ways.ours()  # not measured: the server's first requests, and the parity gate
            turns = {"ours": ways.ours, "speculators": ways.speculators, "bare": ways.bare}
            rounds = []
            for number in range(size.rounds):
                order = [*turns][number % 3 :] + [*turns][: number % 3]
                seconds = {name: turns[name]() for name in order}
                print(
                    {
                        name: f"{ways.num_tokens / each:,.0f} tokens/s"
                        for name, each in seconds.items()
                    },
                    flush=True,
                )
                rounds.append(seconds)
    values = {
        "extract_tokens_per_s": [ways.num_tokens / each["ours"] for each in rounds],
        "extract_vs_speculators": [each["speculators"] / each["ours"] for each in rounds],
        "extract_vs_bare_prefill": [each["bare"] / each["ours"] for each in rounds],
    }
    publish({name: result(each, COMMAND) for name, each in values.items()}, is_full=is_full)


class Ways:
    """Each returns seconds."""

    def __init__(self, project: Project, base_url: str, rows: list[list[int]]) -> None:
        self.project, self.base_url, self.rows = project, base_url, rows
        self.num_tokens = sum(map(len, rows))

    def ours(self) -> float:
        folder = self.project.folder / HIDDEN_STATES
        for path in [*folder.glob("shard-*"), folder / MANIFEST]:  # what the gate found stays
            path.unlink(missing_ok=True)
        env = self.project.env(PIPELINE_EXTRACT_ENDPOINTS=self.base_url)
        self._run(self.project.stage("extract"), env)
        status = read_json(self.project.folder / "logs/extract.status.json")
        if (status["state"], status["tokens"]) != ("done", self.num_tokens):
            sys.exit(f"not all sequences got their states: {status}")
        return float(status["seconds"])

    def speculators(self) -> float:
        files = self.project.folder / THEIR_FILES
        for path in files.glob("*"):
            path.unlink()
        arguments = [
            *("generate-offline-data", "--endpoint", self.base_url),
            *("--preprocessed-data", PREPARED, "--output", THEIR_FILES),
            *("--concurrency", str(CONCURRENCY)),
        ]
        code = TIMED.format(
            imports="from speculators.__main__ import app\n"
            "import speculators.cli.generate_offline_data",
            work=f"app({arguments!r}, standalone_mode=False)",
        )
        self._run([sys.executable, "-c", code], self.project.env())
        if len(list(files.glob("hs_*.safetensors"))) != len(self.rows):
            sys.exit("speculators left sequences out")
        return float((self.project.folder / "work_s").read_text())

    def bare(self) -> float:
        began = time.monotonic()
        asyncio.run(self._ask_all())
        return time.monotonic() - began

    async def _ask_all(self) -> None:
        rows = iter(self.rows)
        connector = aiohttp.TCPConnector(limit=CONCURRENCY)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def work() -> None:
                for ids in rows:
                    body = {"model": self.project.params.verifier.model, "prompt": ids}
                    url = f"{self.base_url}/completions"
                    async with session.post(url, json={**body, "max_tokens": 1}) as response:
                        _throw_away((await response.json())["kv_transfer_params"])

            await asyncio.gather(*[work() for _ in range(CONCURRENCY)])

    def _run(self, command: list[str], env: dict[str, str]) -> None:
        """Raises SystemExit when it fails."""
        done = subprocess.run(
            command, cwd=self.project.folder, env=env, capture_output=True, text=True
        )
        if done.returncode:
            sys.exit(f"{command[:3]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def _throw_away(transfer: dict[str, Any]) -> None:
    path = Path(transfer["hidden_states_path"])
    with suppress(OSError):  # still being written, perhaps
        path.unlink()
    with suppress(OSError):
        path.with_name(f"{path.name}.lock").unlink()


if __name__ == "__main__":
    main()
