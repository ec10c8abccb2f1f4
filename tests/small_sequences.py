"""A project folder with a few short sequences, as the stages before extract leave it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from datasets import Dataset

ROOT = Path(__file__).resolve().parent.parent
VOCAB_SIZE, DRAFT_VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 64, 16, 32, 3
LAYER_IDS = [0, 1, 2]
SMALL: dict[str, dict[str, Any]] = {
    "verifier": {"max_model_len": 32, "dtype": "float32"},
    "extract": {"layer_ids": LAYER_IDS, "samples_per_shard": 4, "concurrency": 2, "timeout_s": 30},
    "train": {
        "num_steps": 3,
        "checkpoint_steps": 2,
        "max_tokens_per_batch": 128,
        "ttt_steps": 2,
        "ttt_step_loss_decay": 0.8,
        "dtype": "float32",
    },
    "evaluate": {"max_draft_tokens": 3, "context_bins": [8, 12]},
    "benchmark": {"num_draft_tokens": 2, "max_tokens": 16},
    "generate": {"max_tokens": 16},
}


def sequence(index: int, num_tokens: int = 10, prompt: int = 4) -> dict[str, Any]:
    """The row of prompt `index`: its ids follow from the index, the answer begins at `prompt`."""
    ids = np.random.default_rng(index).integers(0, DRAFT_VOCAB_SIZE, num_tokens).tolist()
    return {
        "input_ids": ids,
        "loss_mask": [0] * prompt + [1] * (num_tokens - prompt),
        "seq_len": num_tokens,
        "sample_id": f"q{index}_gen0",
        "key": f"{index:064x}",
        "prompt_index": index,
        "source": "test",
        "status": "ok",
        "generated_start": prompt,
        "reasoning_start": prompt + 1,
        "reasoning_end": prompt + 3,
        "answer_start": prompt + 4,
        "answer_end": num_tokens - 1,
        "rebuilt": False,
        "control_text": False,
        "cut_in": "none",
        "ablation": "none",
    }


def write_sequences(root: Path, rows: list[dict[str, Any]], num_held_out: int = 2) -> None:
    folder = root / "data/sequences"
    for split, part in (("held_out", rows[:num_held_out]), ("train", rows[num_held_out:])):
        Dataset.from_list(part).save_to_disk(str(folder / split))
    np.save(folder / "d2t.npy", np.zeros(DRAFT_VOCAB_SIZE, dtype=np.int64))
    np.save(folder / "t2d.npy", np.arange(VOCAB_SIZE) < DRAFT_VOCAB_SIZE)


def write_params(root: Path, **changes: dict[str, Any]) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text("utf-8"))
    for section, keys in [*SMALL.items(), *changes.items()]:
        values[section].update(keys)
    (root / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")


def write_verifier(root: Path, weights: list[dict[str, Any]], **changes: Any) -> None:
    identity = {
        "model": "models/verifier",
        "revision": None,
        "config_sha256": "c" * 64,
        "tokenizer_sha256": "a" * 64,
        "chat_template_sha256": "b" * 64,
        "small_files": [],
        "weights": weights,
        "weights_fingerprint": "f" * 64,
        "think_start": "<think>",
        "think_end": "</think>",
        "think_start_id": 3,
        "think_end_id": 4,
        "end_ids": [1],
        "end_of_turn_id": 1,
        "bos_id": None,
        "control_ids": [1],
        "blank_ids": [],
        "num_hidden_layers": NUM_LAYERS,
        "hidden_size": HIDDEN_SIZE,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 64,
        "family": "qwen3",
        "family_verified": True,
    }
    (root / "data").mkdir(exist_ok=True)
    (root / "data/verifier.json").write_text(json.dumps(identity | changes), encoding="utf-8")
