"""Two revisions side by side: params, what the data are, and what the draft is worth.

    make compare A=HEAD~1 B=HEAD      (python -m pipeline.compare HEAD~1 HEAD)

Reads    params.yaml and the reports of both revisions, through DVC; without B, those of the folder
         as it is now

What differs comes first in each part; equal params are only counted. `dvc params diff` and
`dvc metrics diff` have every value.
"""

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import dvc.api
import yaml
from dvc.exceptions import DvcException
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pipeline.errors import PipelineError, UserError
from pipeline.params import PARAMS_PATH
from pipeline.stage import STAGES
from pipeline.summary import REPORTS

WORKSPACE = "workspace"
# Parts of the table, and the names in the reports that each shows: all below the name, if it has
# any.
PARTS = {
    "data": [
        "prompts.train",
        "prompts.held_out",
        "prompts.rejected",
        "generate.rows_in",
        "generate.status",
        "reassemble.train",
        "reassemble.held_out",
        "reassemble.rejected",
        "extract.rejected",
        "train.supervised_tokens",
        "train.rejected",
    ],
    "reasoning": [
        "generate.reasoning_tokens",
        "reassemble.reasoning_tokens",
        "reassemble.answer_tokens",
        "reassemble.ablated",
    ],
    "draft": [
        "train.best_step",
        "train.held_out.accuracy",
        "evaluate.acceptance_length",
        "evaluate.ngram_acceptance_length",
        "evaluate.at_boundaries",
        "benchmark.acceptance_length",
        "benchmark.speedup",
        "benchmark.lossless_fraction",
    ],
}


def main() -> None:
    first, *rest = [revision for revision in sys.argv[1:] if revision] or [""]
    revisions = [first, rest[0] if rest else WORKSPACE]
    if not first:
        sys.exit(
            "compare: name a revision: make compare A=HEAD~1 B=HEAD (no B: the folder as it is)"
        )
    out = Console()
    try:
        params = [leaves(yaml.safe_load(read(PARAMS_PATH, revision))) for revision in revisions]
        reports = [reports_of(revision) for revision in revisions]
    except PipelineError as error:
        sys.exit(f"compare: {error}")
    table, num_equal = side_by_side("params", revisions, params, only_changes=True)
    table.caption = f"{num_equal} more are equal"
    out.print(table)
    for part, names in PARTS.items():
        found = [
            {name: value for name, value in report.items() if is_below(name, names)}
            for report in reports
        ]
        out.print(side_by_side(part, revisions, found)[0])


def read(path: Path, revision: str) -> str:
    """A file that git or DVC has. Raises UserError when the revision or the file is unknown."""
    try:
        text: str = dvc.api.read(path.as_posix(), rev=None if revision == WORKSPACE else revision)
    except (DvcException, OSError) as error:
        raise UserError(f"{revision}: {error}") from error
    return text


def reports_of(revision: str) -> dict[str, Any]:
    """All reports in one, with the stage in front of each name; a stage that has not run is not
    there."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        with suppress(UserError):
            text = read(REPORTS / f"{stage}.json", revision)
            found |= leaves(json.loads(text), stage)
    return found


def leaves(values: Any, name: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}"""
    if not isinstance(values, dict):
        return {name: values}
    return {
        leaf: value
        for key in sorted(values)
        for leaf, value in leaves(values[key], f"{name}.{key}".lstrip(".")).items()
    }


def is_below(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def side_by_side(
    title: str, revisions: list[str], values: list[dict[str, Any]], *, only_changes: bool = False
) -> tuple[Table, int]:
    """A line for each name, those that differ first, and how many are equal. What is nothing on
    both sides is left out, but for a param that is new."""
    first, second = values
    names = list({**first, **second})
    changed = [
        name
        for name in names
        if first.get(name) != second.get(name)
        or (only_changes and (name in first) != (name in second))
    ]
    equal = [name for name in names if name not in changed and (only_changes or first.get(name))]
    table = Table(title, *revisions, "", box=SIMPLE)
    for name in changed:
        before, after = first.get(name), second.get(name)
        grown = change(before, after)
        table.add_row(name, text_of(name, first), text_of(name, second), grown, style="bold")
    if not only_changes:
        for name in equal:
            table.add_row(name, text_of(name, first), text_of(name, second), "", style="dim")
    return table, len(equal)


def text_of(name: str, values: dict[str, Any]) -> str:
    return json.dumps(values[name], ensure_ascii=False) if name in values else "–"


def change(before: Any, after: Any) -> str:
    """By how much a number grew."""
    numbers = [v for v in (before, after) if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < 2:
        return ""
    return f"{round(after - before, 6):+g}"


if __name__ == "__main__":
    main()
