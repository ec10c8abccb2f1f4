"""Two revisions side by side: params, what the data are, and what the draft is worth.

    make compare A=HEAD~1 B=HEAD      (python -m pipeline.compare HEAD~1 HEAD)

Reads    params.yaml and the reports of both revisions, through DVC; without B, those of the folder
         as it is now; a report that one of them lacks is shown as –

What differs comes first in each part; equal params are only counted. `dvc params diff` and
`dvc metrics diff` have every value.
"""

import json
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import dvc.api
import yaml
from dvc.exceptions import DvcException, FileMissingError, PathMissingError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from pipeline.errors import PipelineError, UserError
from pipeline.params import PARAMS_PATH
from pipeline.stage import STAGES
from pipeline.summary import REPORTS

WORKSPACE = "workspace"
WIDTH = 200
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
    first, second = ([*sys.argv[1:], "", ""])[:2]
    if not first:
        sys.exit(
            "compare: name a revision: make compare A=HEAD~1 B=HEAD (no B: the folder as it is)"
        )
    revisions = [first, second or WORKSPACE]
    try:
        params = [leaves(read(PARAMS_PATH, revision, yaml.safe_load)) for revision in revisions]
        reports = [reports_of(revision) for revision in revisions]
    except PipelineError as error:
        sys.exit(f"compare: {error}")
    # Values are text, and in a file or a pipe there is no width to fit.
    out = Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    names = {**params[0], **params[1]}
    changed = [name for name in names if written(name, params[0]) != written(name, params[1])]
    table = side_by_side("params", revisions, params, changed, [])
    table.caption = f"{len(names) - len(changed)} more are equal"
    out.print(table)
    for part, parents in PARTS.items():
        found = [
            {name: value for name, value in report.items() if is_below(name, parents)}
            for report in reports
        ]
        out.print(side_by_side(part, revisions, found, *sorted_out(*found)))


def read(path: Path, revision: str, parse: Callable[[str], Any]) -> Any:
    """A file that git or DVC has. Raises UserError: there is no such revision, or the file does not
    parse; NotThere: it has no such file."""
    at = None if revision == WORKSPACE else revision
    try:
        return parse(dvc.api.read(path.as_posix(), rev=at))
    except (FileMissingError, PathMissingError, FileNotFoundError) as error:
        raise NotThere(f"{revision} has no {path}") from error
    except (DvcException, OSError, AttributeError) as error:
        raise UserError(f"{revision}: {' '.join(str(error).split())}") from error
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{revision}: {path} cannot be read: {reason}") from error


class NotThere(UserError):
    """A revision without that file."""


def reports_of(revision: str) -> dict[str, Any]:
    """All reports in one, with the stage in front of each name; a stage that has not run is not
    there."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        with suppress(NotThere):
            found |= leaves(read(REPORTS / f"{stage}.json", revision, json.loads), stage)
    return found


def leaves(values: Any, name: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} → {"a.b": 1}"""
    if not isinstance(values, dict):
        return {name: values}
    return {
        leaf: value
        for key in sorted(values, key=str)
        for leaf, value in leaves(values[key], f"{name}.{key}" if name else str(key)).items()
    }


def is_below(name: str, parents: Iterable[str]) -> bool:
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def sorted_out(first: dict[str, Any], second: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The names that differ, and those that are equal. Nothing and 0 are the same, for a counter
    may be new; what is nothing on both sides is left out."""
    names = {**first, **second}
    changed = [name for name in names if (first.get(name) or 0) != (second.get(name) or 0)]
    return changed, [name for name in names if name not in changed and first.get(name)]


def side_by_side(
    title: str,
    revisions: list[str],
    values: list[dict[str, Any]],
    changed: list[str],
    equal: list[str],
) -> Table:
    """A line for each name; by how much the number grew, where it changed."""
    first, second = values
    table = Table(Column(title, overflow="fold"), *revisions, "", box=SIMPLE)
    for name in changed:
        grown = change(first.get(name), second.get(name))
        table.add_row(name, written(name, first), written(name, second), grown, style="bold")
    for name in equal:
        table.add_row(name, written(name, first), written(name, second), "", style="dim")
    return table


def written(name: str, values: dict[str, Any]) -> str:
    return json.dumps(values[name], ensure_ascii=False, default=str) if name in values else "–"


def change(before: Any, after: Any) -> str:
    """By how much a number grew."""
    numbers = [v for v in (before, after) if isinstance(v, int | float) and not isinstance(v, bool)]
    return f"{after - before:+.6g}" if len(numbers) == 2 else ""


if __name__ == "__main__":
    main()
