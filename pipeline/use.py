"""Puts a profile's values into params.yaml, whose comments stay.

    make use PROFILE=kimi_k2_5      (python -m pipeline.use kimi_k2_5)

Reads    profiles/<name>.yaml, a complete and checked params file
Writes   params.yaml, unless it has changes that git does not have
"""

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import ParamsError
from pipeline.params import PARAMS_PATH, load_params
from pipeline.resume import write_bytes

PROFILES = Path("profiles")


def main() -> None:
    try:
        path = profile_path(sys.argv[1:])
        load_params(path)
    except ParamsError as error:
        sys.exit(f"use: {error}")
    if is_changed() and not is_a_profile():
        sys.exit(
            f"use: {PARAMS_PATH} has changes that would be lost: commit them or `git checkout "
            f"{PARAMS_PATH}` first"
        )
    text = PARAMS_PATH.read_text(encoding="utf-8")
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    write_bytes(PARAMS_PATH, with_values(text, values).encode())
    assert load_params() == load_params(path)
    print(f"{PARAMS_PATH} has the values of {path}: `dvc params diff` shows what changed")


def is_changed() -> bool:
    """Whether params.yaml is not as git has it."""
    status = ["git", "status", "--porcelain", "--", str(PARAMS_PATH)]
    return bool(subprocess.run(status, capture_output=True, text=True).stdout)


def is_a_profile() -> bool:
    """Whether params.yaml has the values of a profile, so that nothing is lost with them."""
    try:
        return load_params() in map(load_params, PROFILES.glob("*.yaml"))
    except ParamsError:
        return False


def profile_path(arguments: list[str]) -> Path:
    """Raises ParamsError: none is named, or there is no such profile."""
    names = sorted(path.stem for path in PROFILES.glob("*.yaml"))
    if len(arguments) != 1 or arguments[0] not in names:
        there_is_no = f"there is no {' '.join(arguments)}; " if arguments else ""
        raise ParamsError(f"{there_is_no}name a profile: PROFILE={'|'.join(names)}")
    return PROFILES / f"{arguments[0]}.yaml"


def with_values(manual: str, values: dict[str, Any]) -> str:
    """The text of a params file with other values in their places: all else stays, comments too."""
    node = yaml.compose(manual)
    assert isinstance(node, yaml.MappingNode)
    for start, end, text in sorted(_changes(node, values, yaml.safe_load(manual)), reverse=True):
        manual = manual[:start] + text + manual[end:]
    return manual


def _changes(
    node: yaml.MappingNode, values: dict[str, Any], now: dict[str, Any]
) -> Iterator[tuple[int, int, str]]:
    """Begin and end of what changes, and what it becomes."""
    for key_node, value_node in node.value:
        old, new = now[key_node.value], values[key_node.value]
        if old == new:
            continue
        same_keys = isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys()
        if same_keys and isinstance(value_node, yaml.MappingNode):
            yield from _changes(value_node, new, old)
        else:
            # Of a block the end mark lies behind the comments that follow it.
            last = value_node
            while isinstance(last, yaml.CollectionNode) and not last.flow_style:
                last = last.value[-1][1] if isinstance(last, yaml.MappingNode) else last.value[-1]
            begin = key_node.end_mark.index + 1  # behind the colon
            yield begin, last.end_mark.index, _written(new, key_node.start_mark.column + 2)


def _written(value: Any, indent: int) -> str:
    if isinstance(value, dict) and value:
        block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
        return "\n" + textwrap.indent(block.rstrip("\n"), " " * indent)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    return " " + text.removesuffix("...\n").rstrip("\n")


if __name__ == "__main__":
    main()
