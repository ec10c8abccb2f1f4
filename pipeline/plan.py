"""What a run would do and take, before anything runs and without the model at hand.

    make plan                       (python -m pipeline.plan)             of params.yaml
    make plan PROFILE=kimi_k2_5     (python -m pipeline.plan kimi_k2_5)   of a profile

Reads    params.yaml or profiles/<name>.yaml, dvc.yaml, dvc.lock, `dvc status`, the free space, and
         what the last run here has measured: reports/generate.json, logs/*.status.json
Writes   nothing

Each figure says where it is from; what nobody knows is "unknown". What cannot fit is refused: the
plan is printed all the same, and the exit code is 1. docs/plan.md tells what is calculated how.
"""

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table

from pipeline.errors import PipelineError, UserError
from pipeline.estimate import (
    Disk,
    Figure,
    Measured,
    Place,
    Quantities,
    as_size,
    bytes_on_disk,
    checkpoint_bytes,
    draft_parameters,
    duration,
    fact,
    in_all,
    need,
    quantities,
    refusals,
    seconds,
    servers,
    staging,
    training_bytes,
    weights_a_gpu,
    written,
)
from pipeline.params import PARAMS_PATH, Params, Verifier, endpoints_from, load_params
from pipeline.parity import NUM_SEQUENCES
from pipeline.records import DRAFT, HIDDEN_STATES, SEQUENCES, TRACES
from pipeline.resume import read_json
from pipeline.room import size
from pipeline.server import HOST, serve_command
from pipeline.stage import LOGS
from pipeline.states_server import (
    CPU_CONNECTOR,
    GPU_CONNECTOR,
    SHARED_MEMORY,
    STAGING_ON_DISK,
    connector,
    states_args,
    with_room,
)
from pipeline.summary import REPORTS
from pipeline.use import profile_path
from pipeline.verifier import VERIFIER_PATH

WIDTH = 160
OUTPUTS = {"generate": TRACES, "reassemble": SEQUENCES, "extract": HIDDEN_STATES, "train": DRAFT}
PROBE_REQUESTS = 3
# More or fewer questions leave the answers and states of the others as they are.
GROWS = frozenset({"prompts.sample_cap", "prompts.num_held_out"})
GIVEN = frozenset({"data/raw", "models/verifier"})
Lock = Mapping[str, Any]
"""The stages of dvc.lock, or of dvc.yaml."""


def main() -> None:
    try:
        arguments = [argument for argument in sys.argv[1:] if argument]
        path = profile_path(arguments) if arguments else PARAMS_PATH
        params, here = as_identified(load_params(path)), as_identified(load_params())
        values, stages, lock = params.model_dump(), stages_in("dvc.yaml"), stages_in("dvc.lock")
        status = dvc_status()
        why = stages_to_run(stages, lock, values, status)
        place = look_around(stages, lock, values, status, frozenset(why))
        found = quantities(params, place.measured)
        rates = throughput(params, served_before(params, here, lock))
        refused = refusals(params, place)
    except (PipelineError, yaml.YAMLError, OverflowError) as error:
        sys.exit(f"plan: {' '.join(str(error).split())}")
    out = Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    out.print(f"Plan of {path}\n", style="bold")
    out.print(stages_table(list(stages), why))
    out.print(figures_table("How much", quantities_rows(params, found)))
    out.print(figures_table("Bytes on disk", bytes_rows(params, found, place)))
    out.print(figures_table("Memory", memory_rows(params)))
    times = figures_table("Time", time_rows(params, found, rates, list(stages), place.runs))
    times.caption = "of all that there is to do; server starts are not in it"
    out.print(times)
    out.print("Commands", style="bold")
    for what, command in commands(params, path, here, place):
        print(f"  # {what}\n  {command}")
    if refused:
        print(flush=True)
        sys.exit("\n".join(f"plan: refused: {refusal}" for refusal in refused))


def as_identified(params: Params) -> Params:
    """With what `identify` has found of this verifier in the place of the facts of the plan."""
    if not VERIFIER_PATH.exists():
        return params
    found, named = read_json(VERIFIER_PATH), params.verifier
    if (found["model"], found["revision"]) != (named.model, named.revision):
        return params
    facts = {key: found[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    facts["weights_gb"] = sum(file["size_bytes"] for file in found["weights"]) / 1e9
    sources = params.plan.facts_from | dict.fromkeys(facts, str(VERIFIER_PATH))
    plan = params.plan.model_copy(update={**facts, "facts_from": sources})
    return params.model_copy(update={"plan": plan})


# What would run


def stages_in(file: str) -> dict[str, Any]:
    """Of dvc.yaml or dvc.lock, less the frozen ones; none where the file is missing."""
    path = Path(file)
    found = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    stages: dict[str, Any] = (found or {}).get("stages") or {}
    return {name: stage for name, stage in stages.items() if not stage.get("frozen")}


def dvc_status() -> dict[str, list[Any]]:
    """What DVC finds changed in each stage. Raises UserError when it cannot say."""
    status: dict[str, list[Any]] = json.loads(dvc("status", "--json"))
    return status


def dvc(*arguments: str) -> str:
    """What a command of DVC writes. Raises UserError when it fails."""
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"dvc {' '.join(arguments)}: {(told or ['no word'])[-1]}")
    return done.stdout


def changed_params(stage: Any, locked: Any, values: Mapping[str, Any]) -> dict[str, str]:
    """{name: "old -> new"} of the params that a stage reads; a stage that never ran has none."""
    if locked is None:
        return {}
    before = locked.get("params", {}).get(PARAMS_PATH.name, {})
    changed = {}
    for name in stage.get("params", ()):
        now = value_of(name, values)
        if name not in before or before[name] != now:
            old = json.dumps(before[name]) if name in before else "–"
            changed[name] = f"{old} -> {json.dumps(now)}"
    return changed


def value_of(name: str, values: Mapping[str, Any]) -> Any:
    found: Any = values
    for key in name.split("."):
        found = found[key]
    return found


def stages_to_run(
    stages: Lock, lock: Lock, values: Mapping[str, Any], status: Mapping[str, list[Any]]
) -> dict[str, list[str]]:
    """{stage: why}, in the order of dvc.yaml. Of what DVC says only files count: the params of a
    profile are not those that DVC sees."""
    why: dict[str, list[str]] = {}
    made_by: dict[str, str] = {}
    for name, stage in stages.items():
        made_by |= {output_path(out): name for out in stage.get("outs", ())}
        makers = {made_by.get(dep) for dep in stage.get("deps", ())}
        after = [earlier for earlier in why if earlier in makers]
        reasons = [f"after {earlier}" for earlier in after]
        if name not in lock:
            reasons.append("never ran: dvc.lock does not have it")
        changed = changed_params(stage, lock.get(name), values)
        reasons += [f"{param}: {how}" for param, how in changed.items()]
        for path, how in changed_files(status.get(name, [])):
            remade = made_by.get(path) in after
            if not remade and (name in lock or how != "new"):
                reasons.append(f"{path} {how}".strip())
        if reasons:
            why[name] = reasons
    return why


def output_path(out: Any) -> str:
    """An output is a path, or a path with settings."""
    return str(next(iter(out))) if isinstance(out, dict) else str(out)


def changed_files(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """Path and how it changed; `changed command` is a word of its own."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry, ""
            continue
        for files in entry.values():
            yield from ((path, how) for path, how in files.items() if path != PARAMS_PATH.name)


# What is here


def look_around(
    stages: Lock,
    lock: Lock,
    values: Mapping[str, Any],
    status: Mapping[str, list[Any]],
    runs: frozenset[str],
) -> Place:
    # Params, and what is given from outside: other questions, another model.
    changed = {
        name: set(changed_params(stage, lock.get(name), values))
        | ({path for path, _ in changed_files(status.get(name, []))} & GIVEN)
        for name, stage in stages.items()
    }
    upto = {
        name: set().union(*(changed[earlier] for earlier in list(stages)[: place + 1]))
        for place, name in enumerate(stages)
    }
    there = {
        name: folder_bytes(path)
        for name, path in OUTPUTS.items()
        if name in lock and upto[name] <= GROWS and path not in (SEQUENCES, DRAFT)
    }
    return Place(
        runs,
        there,
        measured_before() if "generate" in lock and not upto["generate"] else None,
        disk_of(Path.cwd(), cache_folder(), Path("/proc/mounts").read_text(encoding="utf-8")),
        shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
    )


def measured_before() -> Measured | None:
    """By the run that dvc.lock records."""
    prompts, generate = REPORTS / "prompts.json", REPORTS / "generate.json"
    if not (prompts.exists() and generate.exists()):
        return None
    asked, answered = read_json(prompts), read_json(generate)
    return Measured(
        asked["train"] + asked["held_out"],
        answered["rows_in"],
        answered["prompt_tokens"],
        answered["generated_tokens"],
    )


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def cache_folder() -> Path:
    folder = Path(dvc("cache", "dir").strip())
    while not folder.exists():  # nothing has been cached yet
        folder = folder.parent
    return folder


def disk_of(folder: Path, cache: Path, mounts: str) -> Disk:
    apart = folder.stat().st_dev != cache.stat().st_dev
    return Disk(
        shutil.disk_usage(folder).free,
        shutil.disk_usage(cache).free if apart else None,
        file_system(folder, mounts),
    )


def file_system(folder: Path, mounts: str) -> str:
    """Its name, from the text of /proc/mounts: that of the deepest mount, and of these the last."""
    found, depth = "unknown", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        root = Path(point.replace("\\040", " "))
        if folder.resolve().is_relative_to(root) and len(root.parts) >= depth:
            found, depth = kind, len(root.parts)
    return found


def served_before(params: Params, here: Params, lock: Lock) -> bool:
    """Whether the logs in this folder are of a run of these params, and of this verifier."""
    locked = lock.get("identify", {}).get("params", {}).get(PARAMS_PATH.name, {})
    return params == here and locked.get("verifier.model") == params.verifier.model


def throughput(params: Params, served: bool) -> dict[str, Figure]:
    """Tokens a second of the stages that have one: of the last run, or as the plan section says."""
    rates = {}
    for stage in ("generate", "extract", "train"):
        rates[stage] = fact(params, f"{stage}_tokens_per_s")
        path = LOGS / f"{stage}.status.json"  # train has none
        if served and path.exists():
            last = read_json(path)
            rate = last.get("tokens_per_s") if isinstance(last, dict) else None
            if rate and last.get("state") == "done":  # 0: it asked nothing
                rates[stage] = Figure(rate, f"{path}, the last run")
    return rates


# The commands


def commands(params: Params, path: Path, here: Params, place: Place) -> Iterator[tuple[str, str]]:
    """What it is for, and what to type or what a stage runs."""
    if params != here:
        yield f"puts {path} into {PARAMS_PATH}", f"make use PROFILE={path.stem}"
    verifier = params.verifier
    if verifier.revision is None and not Path(verifier.model).is_dir():
        yield (
            "prints the commit for verifier.revision, which is null",
            f"git ls-remote https://huggingface.co/{verifier.model} HEAD",
        )
    if params.prompts.urls:
        yield f"fetches {', '.join(params.prompts.sources)}", "make raw"
    yield "all stages that have something to do, in order (as `dvc repro`)", "make repro"
    yield from server_commands(params, place)
    if "train" in place.runs and params.train.num_processes > 1:
        from pipeline.train import torchrun_command  # speculators takes seconds to import

        yield "train runs", shlex.join(torchrun_command(params.train.num_processes))


def server_commands(params: Params, place: Place) -> Iterator[tuple[str, str]]:
    if "generate" in place.runs:
        asked = endpoints_from("PIPELINE_GENERATE_ENDPOINTS", params.generate.endpoints)
        command = serve_line(params.verifier, serve_command(params.verifier))
        yield who_starts("generate", asked), command
    streamed = params.extract.mode == "streamed"
    asking = ({"train", "evaluate"} if streamed else {"extract"}) & place.runs
    if asking:
        asked = endpoints_from("PIPELINE_EXTRACT_ENDPOINTS", params.extract.endpoints)
        what = who_starts(", ".join(sorted(asking, reverse=True)), asked)
        yield f"{what}, with a staging folder of its own", states_command(params, place)


def who_starts(stage: str, endpoints: list[str]) -> str:
    if endpoints:
        return f"{stage} asks {', '.join(endpoints)}, started like this"
    return f"{stage} starts this server, on a free port"


def serve_line(verifier: Verifier, command: list[str]) -> str:
    environment = [f"{name}={value}" for name, value in verifier.server_env.items()]
    return shlex.join([*environment, *command, "--host", HOST])


def states_command(params: Params, place: Place) -> str:
    if params.plan.num_hidden_layers is None:
        return f"unknown: {fact(params, 'num_hidden_layers').source}"
    on_disk = (staging(params).value or 0) > place.shared_memory
    folder = STAGING_ON_DISK.resolve() if on_disk else SHARED_MEMORY
    layer_ids = [*params.extract.layer_ids, params.plan.num_hidden_layers]
    kind = connector()
    if params.plan.num_gpus is not None:  # else that of this machine
        kind = GPU_CONNECTOR if params.plan.num_gpus else CPU_CONNECTOR
    verifier = with_room(params.verifier)
    arguments = states_args(layer_ids, folder / "hidden-states", kind)
    return serve_line(verifier, serve_command(verifier, arguments))


# On the screen


def stages_table(stages: list[str], why: Mapping[str, list[str]]) -> Table:
    table = Table("stage", "runs", Column("why", overflow="fold"), box=SIMPLE)
    table.title = "Stages"
    for name in stages:
        reasons = "\n".join(why.get(name, ["up to date"]))
        table.add_row(name, "yes" if name in why else "no", reasons)
    table.caption = (
        "behind a stage that runs, DVC skips those whose inputs come out the same; what has been "
        "answered or extracted with the same settings is not asked again"
        if why
        else "nothing to do: everything is up to date"
    )
    return table


Row = tuple[str, str, str]


def figures_table(title: str, rows: list[Row]) -> Table:
    table = Table("", Column("", justify="right"), Column("from", overflow="fold"), box=SIMPLE)
    table.title = title
    for row in rows:
        table.add_row(*row)
    return table


def row(name: str, figure: Figure, form: Callable[[float], str] = "{:,.0f}".format) -> Row:
    return name, written(figure, form), figure.source


def quantities_rows(params: Params, found: Quantities) -> list[Row]:
    retry = "generate.on_truncated: retry asks what was cut once more"
    extra = f"{PROBE_REQUESTS} of the probe" + (
        f"; {retry}" if params.generate.on_truncated == "retry" else ""
    )
    prefill = Figure(found.requests.value, "one a sequence, if no answer is rejected")
    if params.extract.mode == "streamed":
        prefill = Figure(0, "extract.mode: streamed; train asks one a sequence and epoch")
    return [
        row("questions", found.questions),
        row("requests of generate", found.requests),
        ("and extra", "", extra),
        row("tokens of prompts", found.prompt_tokens),
        row("tokens of answers", found.answer_tokens),
        row("tokens of sequences", found.tokens),
        row("requests of extract", prefill),
        ("and extra", "", f"{2 * NUM_SEQUENCES} of the parity gate on settings not proved yet"),
        row("tokens to train on", found.training_tokens),
        row("epochs of training", found.epochs, "{:,.1f}".format),
    ]


def bytes_rows(params: Params, found: Quantities, place: Place) -> list[Row]:
    takes, wanted = bytes_on_disk(params, found), need(params, place)
    rows = [row(str(OUTPUTS[name]), figure, as_size) for name, figure in takes.items()]
    once = place.disk.shares_blocks
    disk = f"{place.disk.kind}, which " + ("shares blocks" if once else "does not share blocks")
    cache = f"the same once more: {disk}"
    if place.disk.cache_free is not None:
        cache = f"the same on another file system, {size(place.disk.cache_free)} free"
    elif once:
        cache = f"nothing: {disk}"
    return [
        *rows,
        ("DVC's cache", "", cache),
        ("weights of the verifier", *weights_on_disk(params)),
        row("a checkpoint", checkpoint_bytes(params), as_size),
        row("needed now", in_all(wanted, place.disk), as_size),
        ("free here", size(place.disk.free), str(Path.cwd())),
        row("staged", staging(params), as_size),
        ("free in memory", size(place.shared_memory), str(SHARED_MEMORY)),
    ]


def weights_on_disk(params: Params) -> tuple[str, str]:
    if Path(params.verifier.model).is_dir():
        return "", f"{params.verifier.model} is here"
    weights = fact(params, "weights_gb")
    return written(weights, "{:,.1f} GB".format), f"in HF_HOME, not counted here; {weights.source}"


def memory_rows(params: Params) -> list[Row]:
    parallel, number = servers(params.verifier.server_args), params.train.num_processes
    memory = fact(params, "gpu_memory_gb")
    rows = [
        row("GPUs", fact(params, "num_gpus")),
        row("GB of weights, each GPU", weights_a_gpu(params), "{:,.4g}".format),
        row("GB of a GPU", memory, "{:,.1f}".format),
    ]
    if memory.value is not None:
        share = f"--gpu-memory-utilization {parallel.utilization}; what the weights leave is cache"
        usable = Figure(memory.value * parallel.utilization, share)
        rows.append(row("of which vLLM uses", usable, "{:,.1f}".format))
    draft = draft_parameters(params)
    if draft is None:
        return [*rows, ("parameters of the draft", "unknown", "plan.* of its shape is null")]
    shape = "3H x H, layers of attention (taken for H wide: mostly less) and MLP, norms"
    head = "embeddings, the head of reassemble.draft_vocab_size twice, the verifier's norm"
    training = Figure(
        training_bytes(draft) / number,
        "16 bytes a trained parameter (float32: weight, gradient, optimizer), 4 a frozen one"
        + (f", over {number} processes" if number > 1 else "")
        + "; activations are not in it",
        "≤ ",
    )
    return [
        *rows,
        row("trained parameters", Figure(draft.trained, shape, "≤ ")),
        row("frozen ones", Figure(draft.frozen, head)),
        row("training, a process", training, as_size),
    ]


def time_rows(
    params: Params,
    found: Quantities,
    rates: Mapping[str, Figure],
    stages: list[str],
    runs: frozenset[str],
) -> list[Row]:
    streamed = params.extract.mode == "streamed"
    trained_on = params.train.num_steps * found.tokens_per_step
    work = {
        "generate": found.answer_tokens,
        "extract": Figure(None, "streamed: the parity gate") if streamed else found.tokens,
        "train": Figure(trained_on, "train.num_steps x tokens a step"),
    }
    rows = []
    for name in stages:
        if name not in runs:
            rows.append((name, "–", "up to date"))
        elif name in work:
            rows.append(row(name, seconds(work[name], rates[name]), duration))
        else:
            rows.append((name, "unknown", "its speed is not kept"))
    return rows


if __name__ == "__main__":
    main()
