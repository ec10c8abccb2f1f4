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
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from pipeline.errors import ParamsError
from pipeline.params import PARAMS_PATH, load_params
from pipeline.resume import write_bytes

PROFILES = Path("profiles")


def main() -> None:
    try:
        path = profile_path(sys.argv[1:])
        wanted = load_params(path)
        if not is_a_profile():
            check_committed()
        text = edited(PARAMS_PATH, path)
        with TemporaryDirectory() as folder:
            trial = Path(folder) / PARAMS_PATH.name
            trial.write_text(text, encoding="utf-8")
            if load_params(trial) != wanted:
                raise ParamsError("other values came out")
    except ParamsError as error:
        sys.exit(f"use: {error}")
    write_bytes(PARAMS_PATH, text.encode())
    print(f"{PARAMS_PATH} has the values of {path}: `dvc params diff` shows what changed")


def check_committed() -> None:
    """Raises ParamsError unless git can bring back params.yaml as it is."""
    name = str(PARAMS_PATH)
    for command in (["ls-files", "--error-unmatch", name], ["status", "--porcelain", "--", name]):
        done = subprocess.run(["git", *command], capture_output=True, text=True)
        if done.returncode:
            raise ParamsError(f"git does not have {name}, which would be lost: copy it first")
    if done.stdout:
        raise ParamsError(
            f"{name} has changes that would be lost: commit them or `git checkout {name}` first"
        )


def edited(params: Path, profile: Path) -> str:
    """Raises ParamsError: the params file is written in a way that this cannot edit."""
    values = yaml.safe_load(profile.read_text(encoding="utf-8"))
    try:
        return with_values(params.read_text(encoding="utf-8"), values)
    except (OSError, yaml.YAMLError, AssertionError, KeyError, TypeError, AttributeError) as error:
        raise ParamsError(
            f"{params} is written in a way that cannot be edited ({type(error).__name__}): `git "
            f"checkout` the one that ships, or `cp {profile} {params}`"
        ) from error


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
    changes = _changes(manual, node, values, yaml.safe_load(manual))
    for start, end, text in sorted(changes, reverse=True):
        manual = manual[:start] + text + manual[end:]
    return manual


def _changes(
    manual: str, node: yaml.MappingNode, values: dict[str, Any], now: dict[str, Any]
) -> Iterator[tuple[int, int, str]]:
    """Begin and end of what changes, and what it becomes."""
    for key_node, value_node in node.value:
        old, new = now[key_node.value], values[key_node.value]
        if old == new:
            continue
        same_keys = isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys()
        if same_keys and isinstance(value_node, yaml.MappingNode):
            yield from _changes(manual, value_node, new, old)
        else:
            # Of a block the end mark lies behind the comments that follow it.
            last = value_node
            while isinstance(last, yaml.CollectionNode) and not last.flow_style:
                last = last.value[-1][1] if isinstance(last, yaml.MappingNode) else last.value[-1]
            begin = manual.index(":", key_node.end_mark.index) + 1
            yield begin, last.end_mark.index, _written(new, key_node.start_mark.column + 2)


def _written(value: Any, indent: int) -> str:
    if isinstance(value, dict) and value:
        block = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1000)
        return "\n" + textwrap.indent(block.rstrip("\n"), " " * indent)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=1000)
    return " " + text.removesuffix("...\n").rstrip("\n")


if __name__ == "__main__":
    main()
