"""dvc.yaml says what the code does: no dependency missing, none too many."""

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.stage import STAGES as ORDER

ROOT = Path(__file__).resolve().parents[1]
STAGES: dict[str, Any] = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
PARAMS: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())

# What they say or show cannot change a stage's output; `suggest` runs in place of a stage.
NEUTRAL = {"diagnosis", "errors", "live", "progress", "stage", "suggest"}
# Where an answer was computed does not change it, nor where a file of questions is from.
UNTRACKED = {"generate.endpoints", "extract.endpoints", "prompts.urls", "train.tensorboard"}
# Sections that no stage reads.
VIEWS = {"plan"}


# What a stage reads that another one, or a person, has made (../README.md, *What happens*).
DATA = {
    "identify": {"models/verifier"},
    "prompts": {"data/raw"},
    "generate": {"data/prompts", "data/verifier.json"},
    "reassemble": {"data/prompts", "data/traces", "data/verifier.json"},
    "extract": {"data/sequences", "data/verifier.json"},
    "train": {"data/sequences", "data/hidden_states", "data/verifier.json"},
    "evaluate": {"data/sequences", "data/hidden_states", "data/verifier.json", "models/draft"},
    "benchmark": {"data/prompts", "data/verifier.json", "models/draft"},
}
# Each answer and each state cost GPU time.
PERSIST = {"data/traces", "data/hidden_states"}
STAGE_KEYS = {"cmd", "desc", "params", "deps", "outs", "metrics", "plots"}
OUTPUT_KEYS = {"cache", "persist", "x", "y"}


def imported(module: str) -> set[str]:
    """The modules of `pipeline` that a module imports, at the top or inside a function, in whatever
    form, or names for vLLM to load."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / "pipeline" / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = "pipeline." * bool(node.level) + (node.module or "")
            names |= {package, *(f"{package.rstrip('.')}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return {
        name.split(".")[1]
        for name in names
        if name.startswith("pipeline.") and (ROOT / f"{name.replace('.', '/')}.py").is_file()
    }


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


@pytest.mark.parametrize("stage", DATA)
def test_data_deps_are_what_the_stage_reads(stage: str) -> None:
    assert {dep for dep in STAGES[stage]["deps"] if not dep.startswith("pipeline/")} == DATA[stage]


def test_every_param_is_tracked_leaf_by_leaf_or_named_as_untracked() -> None:
    tracked = {key for stage in STAGES.values() for key in stage["params"]}
    staged = {name: values for name, values in PARAMS.items() if name not in VIEWS}
    assert tracked | UNTRACKED == leaves(staged, "")
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
    """Not in both (dvc#3678), and never bound to one remote. What git ignores, it ignores for all
    who clone: by a file of this repository."""
    for stage in STAGES.values():
        for path, options in outputs(stage):
            by = git("check-ignore", "-v", path).stdout.partition(":")[0]
            assert bool(by) == options.get("cache", True), path
            assert not by or git("ls-files", "--error-unmatch", by).returncode == 0, path
            assert not (by and git("ls-files", "--", path).stdout), path
            assert set(options) <= OUTPUT_KEYS, path
            assert options.get("persist", False) == (path in PERSIST), path


def test_stages_use_of_dvc_what_this_project_relies_on() -> None:
    for name, stage in STAGES.items():
        assert set(stage) <= STAGE_KEYS | ({"frozen"} if name == "demo_verifier" else set())
    assert [*STAGES] == ["demo_verifier", *ORDER]


def test_a_stage_can_be_looked_up_in_the_run_cache() -> None:
    """Which takes a command, dependencies and outputs (dvc#10589)."""
    for name, stage in STAGES.items():
        assert stage["deps"], name
        assert list(outputs(stage)), name


def git(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)


def test_no_key_hides_from_dvc() -> None:
    """Keys with dots cannot be named in dvc.yaml; `size` and `nfiles` escape the run cache."""
    keys = walk_keys(PARAMS)
    assert not {"size", "nfiles"} & set(keys)
    assert not [key for key in keys if "." in key]


def walk_keys(value: Any) -> list[str]:
    if isinstance(value, list):
        return [key for child in value for key in walk_keys(child)]
    if not isinstance(value, dict):
        return []
    return [*value, *(key for child in value.values() for key in walk_keys(child))]


@pytest.mark.parametrize("path", sorted((ROOT / "reports").glob("*.json")), ids=lambda p: p.stem)
def test_reports_in_git_are_strict_json_and_count_in_whole_numbers(path: Path) -> None:
    def fail(constant: str) -> None:
        pytest.fail(f"{constant} in {path}")

    report = json.loads(path.read_text(), parse_constant=fail)
    counts = [
        *(report.get(name) for name in ("rows_in", "rows_out", "train", "held_out", "tokens")),
        *(report.get("rejected") or {}).values(),
        *(report.get("status") or {}).values(),
    ]
    assert not [count for count in counts if isinstance(count, float)]


def test_a_clone_gets_the_run_that_the_lock_describes() -> None:
    """All of it from remote/, with nothing else in there."""
    [shared] = re.findall(r"^SHARED +:= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lock = yaml.safe_load((ROOT / "dvc.lock").read_text())["stages"].values()
    hashes = {out["path"]: out["md5"] for stage in lock for out in stage.get("outs", [])}
    wanted = {hashes[path] for path in shared.split()}
    for listing in [name for name in wanted if name.endswith(".dir")]:
        wanted |= {file["md5"] for file in json.loads(stored(listing).read_text())}
    there = {path for path in (ROOT / "remote").rglob("*") if path.is_file()}
    assert there == {stored(name) for name in wanted}


def stored(name: str) -> Path:
    return ROOT / "remote/files/md5" / name[:2] / name[2:]
