"""The short table at the end of `make repro`: what the run made, and how to put it to use.

Reads    reports/*.json, params.yaml
Run      python -m pipeline.summary
"""

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pipeline.errors import PipelineError
from pipeline.params import load_params
from pipeline.records import in_words
from pipeline.resume import read_json
from pipeline.server import HOST, draft_config, serve_command, speculative_args

REPORTS = Path("reports")


def main() -> None:
    try:
        params = load_params()
        reports = {
            stage: read_json(REPORTS / f"{stage}.json")
            for stage in ("prompts", "generate", "reassemble", "evaluate", "benchmark")
        }
    except PipelineError as error:
        sys.exit(f"summary: {error}")
    out = Console()
    out.print(rows_table(reports))
    out.print(draft_table(reports))
    if len(reports["benchmark"]["by_mode"]) > 1:
        out.print(modes_table(reports["benchmark"]))
    command = serve_command(
        params.verifier, speculative_args(draft_config(params.benchmark.num_draft_tokens))
    )
    out.print("Put the draft to use (source .venv/bin/activate first):")
    environment = [f"{name}={value}" for name, value in params.verifier.server_env.items()]
    print(shlex.join([*environment, *command, "--host", HOST]))


def rows_table(reports: dict[str, Any]) -> Table:
    """What came in, what is left, and what was rejected for which reason, stage by stage."""
    prompts, generate, reassemble = (reports[s] for s in ("prompts", "generate", "reassemble"))
    table = Table("stage", "rows in", "kept", "rejected, by reason", box=SIMPLE)
    table.title = "What the data is"
    table.add_row(
        "prompts",
        str(prompts["rows_in"]),
        f"{prompts['train']} to train on, {prompts['held_out']} held out, "
        f"{prompts['beyond_cap']} beyond the cap",
        in_words(prompts["rejected"]),
    )
    statuses = generate["status"]
    table.add_row(
        "generate",
        str(generate["rows_in"]),
        f"{statuses['ok']} ok",
        in_words({status: n for status, n in statuses.items() if status != "ok"}),
    )
    table.add_row(
        "reassemble",
        str(reassemble["rows_in"]),
        f"{reassemble['train']} to train on, {reassemble['held_out']} held out"
        + (f", {reassemble['ablated']} of them ablated" if reassemble["ablated"] else ""),
        in_words(reassemble["rejected"]),
    )
    reasoning = reassemble["reasoning_tokens"]
    table.caption = (
        f"reasoning tokens a row: mean {reasoning['mean']}, p50 {reasoning['p50']}, "
        f"p95 {reasoning['p95']}"
    )
    return table


def draft_table(reports: dict[str, Any]) -> Table:
    """No speculation, n-gram and draft side by side, as vLLM served them."""
    served = reports["benchmark"]
    table = Table("", "accepted", "by position", "tokens/s", "speed", "as plain", box=SIMPLE)
    for name, label in (("plain", "no speculation"), ("ngram", "n-gram"), ("draft", "draft")):
        length = served["acceptance_length"].get(name)
        positions = served["acceptance_by_position"].get(name, {})
        same = {"plain": "plain_vs_plain_fraction", "ngram": "lossless_fraction_ngram"}
        table.add_row(
            label,
            f"{length:.2f}" if length else "1.00",
            " ".join(f"{share:.2f}" for share in positions.values()),
            f"{served['tokens_per_s'][name]['1']:.0f}",
            f"x {served['speedup'].get(name, 1.0):.2f}",
            f"{served[same.get(name, 'lossless_fraction')]:.0%}",
        )
    table.title = (
        f"What the draft is worth (greedy, {served['num_draft_tokens']} draft tokens, "
        "1 request at a time)"
    )
    table.caption = (
        "accepted: tokens a drafted step; as plain: identical outputs\n"
        f"no speculation again: x {served['noise']['min']:.2f} to {served['noise']['max']:.2f}; "
        f"not counted: {in_words(served['rejected'])}\n"
        f"offline, draft: {by_phase(reports['evaluate']['acceptance_length'])}\n"
        f"offline, n-gram: {by_phase(reports['evaluate']['ngram_acceptance_length'])}"
    )
    return table


def modes_table(served: dict[str, Any]) -> Table:
    """Draft and n-gram in every mode that was measured."""
    table = Table("", "draft", "speed", "n-gram", "speed", "answers", box=SIMPLE)
    table.title = "What it is worth in each mode"
    for mode in served["by_mode"].values():
        thinking = "thinking" if mode["thinking"] else "no thinking"
        sampling = f"temperature {mode['temperature']}" if mode["temperature"] else "greedy"
        table.add_row(f"{thinking}, {sampling}", *worth_cells(mode), str(mode["num_answered"]))
    return table


def worth_cells(mode: dict[str, Any]) -> list[str]:
    """Accepted and speed of draft and n-gram; of a mode without an answer that counts, dashes."""
    if not mode["num_answered"]:
        return ["–"] * 4
    lengths, speeds = mode["acceptance_length"], mode["speedup"]
    pairs = [(f"{lengths[s]:.2f}", f"x {speeds[s]:.2f}") for s in ("draft", "ngram")]
    return [cell for pair in pairs for cell in pair]


def by_phase(lengths: dict[str, float | None]) -> str:
    """An acceptance length for each phase; a phase without a step has none."""
    phases = ("overall", "reasoning", "answer")
    return ", ".join(f"{p} {lengths[p]:.2f}" if lengths[p] else f"{p} –" for p in phases)


if __name__ == "__main__":
    main()
