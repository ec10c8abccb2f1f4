"""Training of the demo draft beside speculators' own trainer, in float32 on the same batches.

    train_tokens_per_s         ours, after the fifth step
    train_vs_speculators       ours over speculators' in the same round; speculators' with one
                               thread or with all, whichever was faster
    train_loss_difference      between the two loss curves, the largest, as a part of the loss

Reads the data of a finished run (`make repro`); speculators gets the sequences and states as files
of its own.

Run      python -m perf.training                              # or, for a short trial:
         python -m perf.training --steps 20 --rounds 1
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datasets import concatenate_datasets
from safetensors.torch import save_file

from perf.compare import rows_of
from perf.project import ROOT, Project, scratch_project
from perf.report import publish, result, sizes
from pipeline.records import HIDDEN_STATES, SEQUENCES, Split
from pipeline.sequences import load_split
from pipeline.shards import HiddenStates

COMMAND = "python -m perf.training"
NUM_STEPS = 80  # fewer than an epoch has, with which speculators' trainer ends; each is logged
NUM_ROUNDS = 3
WARM_UP = 5
THEIRS = "theirs"


def main() -> None:
    size, is_full = sizes(COMMAND, steps=NUM_STEPS, rounds=NUM_ROUNDS)
    changes = {
        "train.dtype": "float32",
        "train.num_steps": size.steps,
        "train.checkpoint_steps": size.steps,
    }
    values: dict[str, list[float]] = {}
    with scratch_project(changes) as project:
        project.borrow(ROOT / "data")
        options = speculators_options(project, size.steps)
        turns = {
            "ours": (["ours"], {}),
            "one thread": (["speculators", *options], {"OMP_NUM_THREADS": "1"}),
            "all threads": (["speculators", *options], {}),
        }
        for number in range(size.rounds):
            order = [*turns][number % 3 :] + [*turns][: number % 3]
            runs = {name: steps(project, *turns[name]) for name in order}
            speeds = {name: speed(rows) for name, rows in runs.items()}
            print({name: f"{each:,.0f} tokens/s" for name, each in speeds.items()}, flush=True)
            theirs = max(speeds["one thread"], speeds["all threads"])
            found = {
                "train_tokens_per_s": speeds["ours"],
                "train_vs_speculators": speeds["ours"] / theirs,
                "train_loss_difference": difference(runs["ours"], runs["one thread"]),
            }
            for name, value in found.items():
                values.setdefault(name, []).append(value)
    publish({name: result(each, COMMAND) for name, each in values.items()}, is_full=is_full)


def steps(project: Project, arguments: list[str], env: Mapping[str, str]) -> list[dict[str, Any]]:
    """What perf.steps heard. Raises SystemExit when the trainer fails."""
    heard = project.folder / "steps.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "perf.steps", str(heard), *arguments],
        cwd=project.folder,
        env=project.env(**env),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{arguments[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return list(rows_of(heard))


def speed(rows: list[dict[str, Any]]) -> float:
    """Tokens a second."""
    tokens = sum(row["tokens"] for row in rows[WARM_UP:])
    return float(tokens / (rows[-1]["ended_s"] - rows[WARM_UP - 1]["ended_s"]))


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    pairs = [(a["loss"], b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    return max(abs(a - b) / b for a, b in pairs)


def speculators_options(project: Project, num_steps: int) -> list[str]:
    """Writes what it reads, too. Its split is by place: the training rows come first."""
    folder, params = project.folder / THEIRS, project.params
    splits = [
        load_split(project.folder / SEQUENCES / split) for split in (Split.TRAIN, Split.HELD_OUT)
    ]
    rows = concatenate_datasets(splits).with_format("torch")
    rows.save_to_disk(str(folder))
    write_states(project, list(rows["key"]), folder / "hidden_states")
    ratio = (len(splits[0]) + 0.5) / len(rows)
    train = params.train
    return [
        *("--speculator-type", "eagle3", "--verifier-name-or-path", params.verifier.model),
        *("--data-path", THEIRS, "--save-path", "out", "--train-data-ratio", f"{ratio:.9f}"),
        *("--d2t-path", str(SEQUENCES / "d2t.npy"), "--t2d-path", str(SEQUENCES / "t2d.npy")),
        *("--draft-vocab-size", str(params.reassemble.draft_vocab_size)),
        *("--target-layer-ids", *map(str, params.extract.layer_ids)),
        *("--num-layers", str(train.num_layers), "--ttt-steps", str(train.ttt_steps)),
        *("--full-attention-indices", *map(str, range(train.num_layers))),
        *("--no-norm-before-fc", "--no-norm-output"),
        *("--total-seq-len", str(train.max_tokens_per_batch), "--seed", str(train.seed)),
        *("--optimizer", "muon", "--scheduler-type", "cosine"),
        *("--lr", str(train.learning_rate), "--muon-lr", str(train.muon_learning_rate)),
        *("--ttt-step-loss-decay", str(train.ttt_step_loss_decay), "--loss-fn", "kl_div"),
        *("--max-steps", str(num_steps), "--epochs", "1", "--on-missing", "raise"),
        *("--draft-attn-impl", "eager", "--loss-implementation", "eager"),
        *("--hidden-states-dtype", "float32", "--num-workers", "0", "--no-resume-from-checkpoint"),
    ]


def write_states(project: Project, keys: list[str], folder: Path) -> None:
    """A file for each row, as `speculators generate-offline-data` leaves them."""
    folder.mkdir()
    transfer = HiddenStates(project.folder / HIDDEN_STATES).transfer(keys)
    for index in range(len(keys)):
        tensors = transfer.get_cached(index)
        assert tensors
        file = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(file, folder / f"hs_{index}.safetensors")


if __name__ == "__main__":
    main()
