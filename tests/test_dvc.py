"""dvc.yaml says what the code does: no dependency missing, none too many."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PARAMS: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())

# What they say or show cannot change a stage's output.
NEUTRAL = {"diagnosis", "errors", "live", "progress", "stage"}
# Where an answer was computed does not change it.
UNTRACKED = {"generate.endpoints", "extract.endpoints", "train.tensorboard"}


def imported(module: str) -> set[str]:
    """The modules of `pipeline` that a module imports, at the top or inside a function."""
    tree = ast.parse((ROOT / "pipeline" / f"{module}.py").read_text())
    names = {
        node.module.split(".")[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pipeline.")
    }
    # A module that vLLM loads by name.
    text = {
        node.value.split(".")[1]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("pipeline.")
        and (ROOT / f"{node.value.replace('.', '/')}.py").is_file()
    }
    return names | text


def closure(module: str) -> set[str]:
    seen: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= imported(name) - seen - NEUTRAL
    return seen


def leaves(value: Any, key: str) -> set[str]:
    if isinstance(value, dict) and key != "verifier.server_env":
        return {leaf for name in value for leaf in leaves(value[name], f"{key}.{name}".lstrip("."))}
    return {key}


@pytest.mark.parametrize("stage", [name for name in STAGES if name != "demo_verifier"])
def test_code_deps_are_the_import_closure(stage: str) -> None:
    declared = {Path(dep).stem for dep in STAGES[stage]["deps"] if dep.startswith("pipeline/")}
    assert declared == closure(stage)


def test_every_param_is_tracked_leaf_by_leaf_or_named_as_untracked() -> None:
    tracked = {key for stage in STAGES.values() for key in stage["params"]}
    assert tracked | UNTRACKED == leaves(PARAMS, "")
    assert not tracked & UNTRACKED


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_the_params_it_declares(stage: str) -> None:
    """A param that is declared and read nowhere re-runs the stage for nothing."""
    modules = closure(stage) if stage != "demo_verifier" else {"demo_verifier/__main__"}
    if "generate.top_p" not in STAGES[stage]["params"]:  # read by a property of its section
        modules -= {"params"}
    code = "\n".join((ROOT / "pipeline" / f"{module}.py").read_text() for module in modules)
    unread = {key for key in STAGES[stage]["params"] if f".{key.split('.')[-1]}" not in code}
    assert unread == set()


def test_stages_run_without_a_shell_in_between_and_say_what_they_do() -> None:
    for name, stage in STAGES.items():
        assert stage["cmd"] == f"exec python -m pipeline.{name}"
        assert stage["desc"]


def outputs(stage: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and options."""
    for out in [*stage.get("outs", []), *stage.get("metrics", []), *stage.get("plots", [])]:
        yield next(iter(out.items())) if isinstance(out, dict) else (out, {})


def test_outputs_are_either_in_git_or_in_the_cache() -> None:
    """Not in both (dvc#3678), and never bound to one remote."""
    for stage in STAGES.values():
        for path, options in outputs(stage):
            cached = options.get("cache", True)
            # Those of committed files: what a person ignores on one machine helps no clone.
            ignored = git("-c", "core.excludesFile=/dev/null", "check-ignore", "-q", path)
            assert (ignored.returncode == 0) == cached, path
            assert not (cached and git("ls-files", "--", path).stdout), path
            assert not {"remote", "push"} & set(options), path


def test_a_stage_can_be_looked_up_in_the_run_cache() -> None:
    """Which takes a command, dependencies and outputs (dvc#10589)."""
    for name, stage in STAGES.items():
        assert stage["deps"], name
        assert list(outputs(stage)), name


def git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)


def test_no_key_hides_from_dvc() -> None:
    """Keys with dots cannot be named in dvc.yaml; `size` and `nfiles` escape the run cache."""
    for leaf in leaves(PARAMS, ""):
        assert not {"size", "nfiles"} & set(leaf.split("."))
    keys = walk_keys(PARAMS)
    assert not [key for key in keys if "." in key]


def walk_keys(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [*value, *(key for child in value.values() for key in walk_keys(child))]
