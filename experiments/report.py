"""The tables of the docs from reports/experiments.csv.

python -m experiments.report     # writes what stands between the marks of the pages
"""

import pandas as pd

from experiments.trial import TABLE
from perf.project import ROOT
from pipeline.resume import write_bytes

PAGES = {"reasoning": "why_reasoning.md", "recipe": "training.md", "states": "hidden_states.md"}
COLUMNS = {
    "acceptance_length": "acceptance length",
    "acceptance_length_reasoning": "in reasoning",
    "acceptance_length_answer": "in answers",
    "held_out_accuracy": "the trainer's own accuracy",
}


def table(rows: pd.DataFrame) -> str:
    """A line for each arm, the best first: median, least and most of its seeds."""
    head = ["", "drafts", "supervised tokens", *COLUMNS.values()]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    arms = dict(list(rows.groupby("arm")))
    order = sorted(arms, key=lambda arm: -arms[arm]["acceptance_length"].median())
    for arm in order:
        found = arms[arm]
        cells: list[str] = [
            str(arm),
            str(len(found)),
            f"{round(found['supervised_tokens'].median()):,}",
        ]
        for column in COLUMNS:
            values = found[column]
            cells.append(f"{values.median():.3f} ({values.min():.3f} – {values.max():.3f})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def chart(rows: pd.DataFrame) -> str:
    """Medians by phase, as GitHub draws them."""
    phases = {"reasoning": "acceptance_length_reasoning", "answers": "acceptance_length_answer"}
    arms = list(dict.fromkeys(rows["arm"]))
    names = [f'"{arm}: {phase}"' for arm in arms for phase in phases]
    values = [
        f"{rows.loc[rows['arm'] == arm, column].median():.2f}"
        for arm in arms
        for column in phases.values()
    ]
    return (
        "```mermaid\nxychart-beta\n"
        '    title "Tokens a verification step writes (k = 3)"\n'
        f"    x-axis [{', '.join(names)}]\n"
        '    y-axis "acceptance length" 1 --> 4\n'
        f"    bar [{', '.join(values)}]\n```\n"
    )


def main() -> None:
    everything = pd.read_csv(TABLE)
    for experiment, name in PAGES.items():
        rows = everything[everything["experiment"] == experiment]
        if rows.empty:
            continue
        page, text = ROOT / "docs" / name, table(rows)
        if experiment == "reasoning":
            text += "\n" + chart(rows)
        written = page.read_text(encoding="utf-8") if page.exists() else ""
        before, mark, rest = written.partition(f"<!-- {experiment} -->\n")
        if not mark:
            print(text)
            continue
        _, end, after = rest.partition("<!-- end -->")
        assert end, page
        write_bytes(page, (before + mark + text + end + after).encode())


if __name__ == "__main__":
    main()
