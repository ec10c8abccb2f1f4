"""Clients that ask the same questions of the same server, taking turns, and their ratios.

    clients = Clients(project, base_url)
    rounds = take_turns({"ours": clients.ours, "speculators": clients.speculators}, num_rounds=3)
    ratios(rounds, "speculators", "asking_s")         # above 1: ours is faster

Three times are taken of each run, two of them from the server's stopwatch, because a client's
imports (1 to 8 s) say nothing about how it asks.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from perf.project import Project
from perf.stopwatch import read_stopwatch, start_stopwatch
from pipeline.resume import jsonl, read_json

BIN = Path(sys.executable).parent
MAX_DIFFERENCE = 0.03  # of the generated tokens of two clients in one round


@dataclass(frozen=True)
class Run:
    """What one client did in one round."""

    num_answers: int
    num_tokens: int  # generated, by the client's own output
    asking_s: float  # first request in, last answer out
    storing_s: float  # first request in, end of the process: every answer is on disk
    whole_s: float  # the process, imports and all


class Clients:
    """Each asks every question of `project` once, as its params.yaml says, and stores what comes.

    Raises:
        SystemExit: a client fails, or leaves a question without an answer.
    """

    def __init__(self, project: Project, base_url: str) -> None:
        self.project, self.base_url = project, base_url
        self.num_questions = len(project.questions)
        self.settings = project.params.generate
        self.body = {
            **self.settings.sampling,
            "chat_template_kwargs": self.settings.template_kwargs,
            "return_token_ids": True,
        }
        asked = [(question["key"], question["messages"]) for question in project.questions]
        self._write("for_speculators.jsonl", ({"id": k, "messages": m} for k, m in asked))
        self._write("for_bench.jsonl", ({"prompt": messages} for _, messages in asked))

    def ours(self) -> Run:
        return self._run(self.project.stage("generate"), self._our_tokens)

    def speculators(self) -> Run:
        command = [
            *(str(BIN / "speculators"), "regenerate-responses"),
            *("--endpoint", f"{self.base_url}/chat/completions"),
            *("--dataset", "for_speculators.jsonl", "--outfile", "out/answers.jsonl"),
            *("--concurrency", str(self.settings.concurrency)),
            *("--max-tokens", str(self.settings.max_tokens)),
            *("--sampling-params", json.dumps(self.body)),
        ]
        return self._run(command, self._speculators_tokens)

    def vllm_bench(self) -> Run:
        """Without a tokenizer it sends the messages as they are, as the others do, and would ask
        for one token; the body says how many it shall be."""
        body = {**self.body, "max_completion_tokens": self.settings.max_tokens}
        command = [
            *(str(BIN / "vllm"), "bench", "serve", "--model", self.project.params.verifier.model),
            *("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", self.base_url.removesuffix("/v1")),
            *("--dataset-name", "custom", "--dataset-path", "for_bench.jsonl"),
            *("--num-prompts", str(self.num_questions), "--disable-shuffle"),
            *("--skip-tokenizer-init", "--extra-body", json.dumps(body)),
            *("--max-concurrency", str(self.settings.concurrency), "--disable-tqdm"),
            *("--save-result", "--save-detailed"),
            *("--result-dir", "out", "--result-filename", "bench.json"),
        ]
        return self._run(command, self._bench_tokens)

    def _run(self, command: list[str], tokens: Callable[[], Iterable[int]]) -> Run:
        self.project.forget_answers()
        start_stopwatch(self.base_url)
        log = self.project.folder / "client.log"
        began = time.monotonic()
        with log.open("wb") as out:
            code = subprocess.call(
                command,
                cwd=self.project.folder,
                env=self.project.env(PIPELINE_GENERATE_ENDPOINTS=self.base_url),
                stdout=out,
                stderr=out,
            )
        ended = time.monotonic()
        if code:
            sys.exit(f"{command[:3]} ended with {code}:\n{log.read_text()[-3000:]}")
        per_answer = [number for number in tokens() if number]
        if len(per_answer) != self.num_questions:
            sys.exit(f"{command[:3]}: {len(per_answer)} answers of {self.num_questions}")
        first, last = read_stopwatch(self.base_url)
        return Run(
            num_answers=len(per_answer),
            num_tokens=sum(per_answer),
            asking_s=last - first,
            storing_s=ended - first,
            whole_s=ended - began,
        )

    def _our_tokens(self) -> Iterator[int]:
        for part in sorted((self.project.folder / "data/traces").glob("part-*.jsonl")):
            yield from (len(trace["token_ids"]) for trace in rows_of(part))

    def _speculators_tokens(self) -> Iterator[int]:
        rows = rows_of(self.project.folder / "out/answers.jsonl")
        return (sum(row["loss_mask"]) for row in rows)

    def _bench_tokens(self) -> Iterable[int]:
        return list(read_json(self.project.folder / "out/bench.json")["output_lens"])

    def _write(self, name: str, rows: Iterable[Any]) -> None:
        (self.project.folder / name).write_bytes(jsonl(rows))


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """One at a time; a file may hold gigabytes."""
    with path.open("rb") as file:
        yield from map(orjson.loads, file)


def take_turns(clients: Mapping[str, Callable[[], Run]], num_rounds: int) -> list[dict[str, Run]]:
    """A B C, B C A, …

    Raises:
        SystemExit: the clients of a round did not have the server do the same work.
    """
    names, rounds = list(clients), []
    for number in range(num_rounds):
        first = number % len(names)
        runs = {}
        for name in names[first:] + names[:first]:
            runs[name] = run = clients[name]()
            print(
                f"round {number + 1}, {name}: {run.num_tokens} tokens; asking {run.asking_s:.2f} "
                f"s, to the end {run.storing_s:.2f} s, whole process {run.whole_s:.2f} s",
                flush=True,
            )
        tokens = {name: run.num_tokens for name, run in runs.items()}
        if max(tokens.values()) > min(tokens.values()) * (1 + MAX_DIFFERENCE):
            sys.exit(f"the clients did not do the same work: generated tokens {tokens}")
        rounds.append(runs)
    return rounds


def ratios(rounds: list[dict[str, Run]], other: str, duration: str) -> list[float]:
    """Our speed over the other's within each round, by one of the durations of Run."""
    return [getattr(runs[other], duration) / getattr(runs["ours"], duration) for runs in rounds]


def answers_per_s(rounds: list[dict[str, Run]], name: str, duration: str) -> list[float]:
    return [runs[name].num_answers / getattr(runs[name], duration) for runs in rounds]
