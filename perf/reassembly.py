"""reassemble: tokens a second, memory, and speed beside `speculators prepare-data`.

The two take turns on the same made-up answers of 2,000 tokens, prompt included (`Answers`): ours
gets them with token ids, as `generate` leaves them, speculators as text, with a vLLM to render it.
Each run is a process of its own that takes the time of its work once the imports are done.

    reassemble_tokens_per_s      tokens of all rows over the time of the stage's `main`
    reassemble_memory_growth_mb  most anonymous memory with all rows less that with a tenth of
                                 them, in 10^6 bytes
    reassemble_vs_speculators    their time over ours, and that of `…_whole_process`

Run      python -m perf.reassembly                                  # or, for a short trial:
         python -m perf.reassembly --rows 1000 --rounds 1
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from datasets import Dataset

from perf.project import Project, scratch_project
from perf.report import publish, result, sizes
from pipeline.demo_verifier.draw import make_question
from pipeline.families import generation_prompt
from pipeline.params import Params
from pipeline.records import (
    PROMPTS_PATH,
    TRACES,
    TRACES_PER_PART,
    Message,
    Prompt,
    Split,
    Status,
    Trace,
)
from pipeline.resume import content_key, jsonl, read_json
from pipeline.server import serve
from pipeline.verifier import VerifierIdentity, load_tokenizer

COMMAND = "python -m perf.reassembly"
NUM_ROWS = 10_000
NUM_ROUNDS = 3
NUM_TOKENS = 2000  # of a row
NUM_HELD_OUT = 64
NUM_DIFFERENT = 512  # answers, each of them in many rows
MAX_DIFFERENCE = 0.01  # of the tokens of the two ways: speculators' rows end with a line's end
SAMPLE_EVERY_S = 0.005
CONTEXT = 2048  # the demo verifier's
CHANGES = {
    "verifier.max_model_len": CONTEXT,
    "prompts.num_held_out": NUM_HELD_OUT,
    "generate.max_tokens": NUM_TOKENS,
    "reassemble.max_tokens": CONTEXT,
}
CONVERSATIONS = "conversations.jsonl"
PREPARED = "prepared"
TIMED = """
import time
{imports}
began = time.perf_counter()
{work}
with open("work_s", "w") as file:
    file.write(str(time.perf_counter() - began))
"""
REASSEMBLE = TIMED.format(
    imports="from transformers import AutoTokenizer\nfrom pipeline.reassemble import main",
    work="main()",
)


class Run(NamedTuple):
    """What one process did."""

    num_tokens: int  # of all sequences, by the process's own output
    work_s: float  # without its imports
    whole_s: float
    most_bytes: int  # of anonymous memory: what is mapped from files can be dropped at any time


def main() -> None:
    size, is_full = sizes(COMMAND, rows=NUM_ROWS, rounds=NUM_ROUNDS)
    with scratch_project(CHANGES) as project:
        answers = Answers(project)
        with serve(project.params.verifier, "perf", ["--enable-scale-out"]) as endpoint:
            render_endpoint = endpoint.base_url.removesuffix("/v1")
            answers.write(size.rows // 10)
            runs_of_few = [reassemble(project) for _ in range(size.rounds)]
            prepare_data(project, render_endpoint)  # the server's first requests are slower
            answers.write(size.rows)
            rounds = [take_turns(project, render_endpoint, n) for n in range(size.rounds)]
    ours, theirs = zip(*rounds, strict=True)
    results = {
        "reassemble_tokens_per_s": [run.num_tokens / run.work_s for run in ours],
        "reassemble_memory_growth_mb": [
            (many.most_bytes - few.most_bytes) / 1e6
            for many, few in zip(ours, runs_of_few, strict=True)
        ],
        "reassemble_vs_speculators": ratios(ours, theirs, "work_s"),
        "reassemble_vs_speculators_whole_process": ratios(ours, theirs, "whole_s"),
    }
    publish({name: result(each, COMMAND) for name, each in results.items()}, is_full=is_full)


def take_turns(project: Project, render_endpoint: str, number: int) -> tuple[Run, Run]:
    """Round `number`: our run and speculators'; every other round they begin.

    Raises:
        SystemExit: the two did not make the same sequences.
    """
    if number % 2:
        theirs, ours = prepare_data(project, render_endpoint), reassemble(project)
    else:
        ours, theirs = reassemble(project), prepare_data(project, render_endpoint)
    if abs(theirs.num_tokens / ours.num_tokens - 1) > MAX_DIFFERENCE:
        sys.exit(f"not the same sequences: {ours.num_tokens} tokens and {theirs.num_tokens}")
    return ours, theirs


def ratios(ours: Sequence[Run], theirs: Sequence[Run], duration: str) -> list[float]:
    """Our speed over theirs within each round."""
    return [getattr(b, duration) / getattr(a, duration) for a, b in zip(ours, theirs, strict=True)]


def reassemble(project: Project) -> Run:
    shutil.rmtree(project.folder / "data/sequences", ignore_errors=True)
    times_and_memory = run(project, REASSEMBLE, "reassemble")
    return Run(read_json(project.folder / "reports/reassemble.json")["tokens"], *times_and_memory)


def prepare_data(project: Project, render_endpoint: str) -> Run:
    """`speculators prepare-data` in one process, as its command starts it."""
    for folder in ("cache", PREPARED):
        shutil.rmtree(project.folder / folder, ignore_errors=True)
    arguments = [
        *("prepare-data", "--model", project.params.verifier.model, "--data", CONVERSATIONS),
        *("--render-endpoint", render_endpoint, "--output", PREPARED),
        *("--seq-length", str(CONTEXT), "--num-preprocessing-workers", "1"),
    ]
    code = TIMED.format(
        imports="from speculators.__main__ import app",
        work=f"app({arguments!r}, standalone_mode=False)",
    )
    times_and_memory = run(project, code, "speculators")
    prepared = Dataset.load_from_disk(str(project.folder / PREPARED))
    return Run(sum(prepared.with_format(None)["seq_len"]), *times_and_memory)


def run(project: Project, code: str, name: str) -> tuple[float, float, int]:
    """Times and memory of a process, as in Run. Raises SystemExit when it fails."""
    log, most_bytes = project.folder / f"{name}.log", 0
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=project.folder,
            env=project.env(),
            stdout=out,
            stderr=out,
        )
        while process.poll() is None:
            most_bytes = max(most_bytes, anonymous_bytes(process.pid))
            time.sleep(SAMPLE_EVERY_S)
    whole_s = time.monotonic() - began
    if process.returncode:
        sys.exit(f"{name} ended with {process.returncode}:\n{log.read_text()[-3000:]}")
    work_s = float((project.folder / "work_s").read_text())
    print(
        f"{name}: {work_s:.2f} s of work in {whole_s:.2f} s, {most_bytes / 1e6:.0f} MB", flush=True
    )
    return work_s, whole_s, most_bytes


def anonymous_bytes(pid: int) -> int:
    """0 when it is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class Answers:
    """Made-up answers in the project's files: `generate`'s, and `prepare-data`'s.

    Questions, reasoning and answers are those that the demo verifier was taught, the reasoning that
    of many questions in a row. A few hundred differ, since making one takes longer than
    reassembling it; each row has a key of its own.
    """

    def __init__(self, project: Project) -> None:
        self.folder, self.params = project.folder, project.params
        (self.folder / "data").mkdir()
        identify = project.stage("identify")
        subprocess.run(identify, cwd=self.folder, env=project.env(), check=True)
        verifier = VerifierIdentity(**read_json(self.folder / "data/verifier.json"))
        tokenizer = load_tokenizer(self.folder / verifier.model, trust_remote_code=False)
        rng = Random(0)
        self.different = [
            made_up(rng, tokenizer, verifier, self.params) for _ in range(NUM_DIFFERENT)
        ]

    def write(self, num_rows: int) -> None:
        for folder in (TRACES, PROMPTS_PATH.parent):
            shutil.rmtree(self.folder / folder, ignore_errors=True)
            (self.folder / folder).mkdir(parents=True)
        for start in range(0, num_rows, TRACES_PER_PART):
            numbers = range(start, min(start + TRACES_PER_PART, num_rows))
            part = TRACES / f"part-{start // TRACES_PER_PART:05}.jsonl"
            (self.folder / part).write_bytes(jsonl(map(self.trace, numbers)))
        (self.folder / PROMPTS_PATH).write_bytes(jsonl(map(self.prompt, range(num_rows))))
        (self.folder / CONVERSATIONS).write_bytes(jsonl(map(self.conversation, range(num_rows))))

    def trace(self, number: int) -> Trace:
        key = content_key(["trace", number])
        trace = self.different[number % NUM_DIFFERENT]
        return {**trace, "sample_id": self.prompt(number)["sample_id"], "key": key}

    def prompt(self, number: int) -> Prompt:
        trace, key = self.different[number % NUM_DIFFERENT], content_key(["prompt", number])
        return {
            "index": number,
            "split": Split.HELD_OUT if number < NUM_HELD_OUT else Split.TRAIN,
            "key": key,
            "sample_id": f"{key[:16]}_gen0",
            "source": trace["source"],
            "messages": trace["messages"],
            "later_turns": [],
        }

    def conversation(self, number: int) -> dict[str, Any]:
        trace = self.different[number % NUM_DIFFERENT]
        answer = {
            "role": "assistant",
            "content": trace["content"],
            "reasoning_content": trace["reasoning"],
        }
        return {"conversations": [*trace["messages"], answer]}


def made_up(rng: Random, tokenizer: Any, verifier: VerifierIdentity, params: Params) -> Trace:
    """One answer of NUM_TOKENS tokens with its prompt, still without names."""

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    question = make_question(rng)
    messages: list[Message] = [{"role": "user", "content": question.question}]
    prompt_ids = ids_of(generation_prompt(tokenizer, messages, params.generate.template_kwargs))
    answer_ids = ids_of(f"\n\n{question.answer}")
    num_reasoning = NUM_TOKENS - len(prompt_ids) - len(answer_ids) - 3  # two think tokens, the end
    line_end = ids_of("\n")
    reasoning_ids = [*line_end]
    while len(reasoning_ids) < num_reasoning:
        reasoning_ids += ids_of(f"{make_question(rng).reasoning}\n")
    reasoning_ids[num_reasoning - len(line_end) :] = line_end
    think_start, think_end = verifier.think_start_id, verifier.think_end_id
    token_ids = [think_start, *reasoning_ids, think_end, *answer_ids, verifier.end_of_turn_id]
    assert len(prompt_ids) + len(token_ids) == NUM_TOKENS
    return {
        "sample_id": "",
        "key": "",
        "status": Status.OK,
        "source": question.source,
        "messages": messages,
        "finish_reason": "stop",
        "prompt_token_ids": prompt_ids,
        "token_ids": token_ids,
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(token_ids),
            "total_tokens": NUM_TOKENS,
            "reasoning_tokens": len(reasoning_ids),
        },
        "sampling": {**params.generate.sampling, "max_tokens": params.generate.max_tokens},
        "max_model_len": CONTEXT,
        "attempts": 1,
        "server_version": "0.32.0",
        "reasoning": tokenizer.decode(reasoning_ids),
        "content": tokenizer.decode(answer_ids),
    }


if __name__ == "__main__":
    main()
