"""reports/perf.json: {name: {value, spread, num_runs, command}}, and docs/performance.md from it.

    python -m perf.report         # writes the table of docs/performance.md anew

`value` is the median of the runs, `spread` their least and largest.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from perf.project import ROOT
from pipeline.resume import read_json, write_bytes, write_json

REPORT = ROOT / "reports/perf.json"
PAGE = ROOT / "docs/performance.md"
TABLE = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)

Results = Mapping[str, Mapping[str, Any]]


def result(values: Sequence[float], command: str) -> dict[str, Any]:
    return {
        "value": round(median(values), 3),
        "spread": [round(min(values), 3), round(max(values), 3)],
        "num_runs": len(values),
        "command": command,
    }


def sizes(command: str, **defaults: int) -> tuple[argparse.Namespace, bool]:
    """The sizes from the command line, and whether they are the module's own."""
    parser = argparse.ArgumentParser(prog=command)
    for name, value in defaults.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}"
        )
    chosen = parser.parse_args()
    return chosen, vars(chosen) == defaults


def publish(results: Results, *, is_full: bool) -> None:
    """Print; a full measurement also goes into the report, where other results stay."""
    print(json.dumps(results, indent=2, sort_keys=True))
    if is_full:
        write_json(REPORT, {**(read_json(REPORT) if REPORT.exists() else {}), **results})
    else:
        print(f"a trial: {REPORT.relative_to(ROOT)} stays as it is")


def table(results: Results) -> str:
    rows = ["| | median | least – most | runs | command |", "|---|---|---|---|---|"]
    for name, row in sorted(results.items()):
        least, most = row["spread"]
        rows.append(
            f"| `{name}` | {row['value']:,.2f} | {least:,.2f} – {most:,.2f} | {row['num_runs']} "
            f"| `{row['command']}` |"
        )
    return "\n".join(rows) + "\n"


def main() -> None:
    figures = table(read_json(REPORT))
    page = TABLE.sub(lambda marks: marks[1] + figures + marks[2], PAGE.read_text(encoding="utf-8"))
    write_bytes(PAGE, page.encode())


if __name__ == "__main__":
    main()
