"""Training for real, on a verifier of 3 layers with random weights and its true hidden states."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline import train
from pipeline.draft import load_draft, load_vocabulary
from pipeline.errors import BadRun, DataError
from pipeline.evaluate import main as evaluate
from pipeline.extract import load_sequences, wanted_shards
from pipeline.manifest import MANIFEST, Manifest, describe
from pipeline.params import load_params
from pipeline.progress import Bar
from pipeline.resume import write_json
from pipeline.shards import ShardWriter, States
from pipeline.verifier import load_verifier
from tests.small_sequences import (
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    LAYER_IDS,
    NUM_LAYERS,
    VOCAB_SIZE,
    sequence,
    write_params,
    write_sequences,
    write_verifier,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def verifier() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


@torch.inference_mode()
def true_states(model: Qwen3ForCausalLM, ids: list[int]) -> States:
    """transformers' own; its last entry is behind the final norm, so that one is hooked."""
    before_norm = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    hook.remove()
    aux = torch.stack([hidden[layer][0] for layer in LAYER_IDS], dim=1)  # [T, 3, H]
    return States(torch.tensor(ids), aux, before_norm[0][0])


@pytest.fixture
def project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verifier: Qwen3ForCausalLM
) -> Iterator[Path]:
    """A project folder that is ready to train."""
    monkeypatch.chdir(tmp_path)
    write_params(tmp_path)
    verifier.save_pretrained("models/verifier")
    write_verifier(tmp_path, weights=[])
    write_sequences(tmp_path, [sequence(i, num_tokens=10 + i % 3) for i in range(8)])
    write_states(tmp_path, verifier)
    yield tmp_path
    for handler in logging.getLogger("speculators.metrics").handlers[:]:
        logging.getLogger("speculators.metrics").removeHandler(handler)


def write_states(root: Path, model: Qwen3ForCausalLM) -> None:
    sequences, folder = load_sequences(root / "data/sequences"), root / "data/hidden_states"
    ids_of = dict(zip(sequences["key"], sequences["input_ids"], strict=True))
    shards = []
    for name, entry in wanted_shards(sequences, load_params().extract, load_verifier()).items():
        writer = ShardWriter(folder / name, entry, HIDDEN_SIZE)
        for index, record in enumerate(entry.sequences):
            writer.put(index, true_states(model, ids_of[record.key]))
        shards.append(describe(folder / name, writer.write()))
    write_json(folder / MANIFEST, Manifest(shards=shards).model_dump())


def metrics() -> Any:
    return json.loads(Path("reports/train.json").read_text())


def test_training_makes_a_checkpoint_that_loads(project: Path, verifier: Qwen3ForCausalLM) -> None:
    train.main()
    files = {path.name for path in Path("models/draft").iterdir()}
    assert {"config.json", "model.safetensors"} <= files
    assert not [name for name in files if name.endswith(".pt")]
    assert {path.name for path in Path("models").iterdir()} == {"verifier", "draft"}
    for path in Path("models/draft").iterdir():
        assert str(project).encode() not in path.read_bytes()
    config = json.loads(Path("models/draft/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "models/verifier"
    assert config["eagle_aux_hidden_state_layer_ids"] == LAYER_IDS
    assert config["dtype"] == "float32"

    draft = load_draft(Path("models/draft"), torch.float32, CPU)
    embeddings = verifier.model.embed_tokens.weight
    assert torch.equal(draft.embed_tokens.weight, embeddings)
    assert torch.equal(draft.lm_head.weight, verifier.lm_head.weight[:DRAFT_VOCAB_SIZE])
    with safe_open("models/draft/model.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("t2d"), torch.arange(VOCAB_SIZE) < DRAFT_VOCAB_SIZE)

    found = metrics()
    # 8 sequences of 10, 11, 12, 10, … tokens, 4 of each the prompt; 0 and 1 are held out.
    assert (found["sequences"], found["tokens"], found["supervised_tokens"]) == (6, 66, 42)
    assert (found["held_out"]["sequences"], found["held_out"]["supervised_tokens"]) == (2, 13)
    assert (found["steps"], found["sequences_cut"]) == (3, 0)
    curve = Path("reports/train_curve.csv").read_text().splitlines()
    assert curve[0] == "step,loss,accuracy_1,accuracy_2"
    assert [line.split(",")[0] for line in curve[1:]] == ["1", "2", "3"]

    evaluate()
    report = json.loads(Path("reports/evaluate.json").read_text())
    assert (report["samples"], report["tokens"]) == (2, 13)
    assert 1 <= report["acceptance_length"]["overall"] <= 3
    assert set(report["by_num_draft_tokens"]) == {"1", "2", "3"}


def test_same_seed_same_draft_other_seed_another(project: Path) -> None:
    def trained(seed: int) -> tuple[Any, bytes]:
        write_params(project, train={"seed": seed})
        train.main()
        return metrics(), Path("models/draft/model.safetensors").read_bytes()

    first = trained(0)
    assert trained(0) == first
    assert trained(1) != first


def test_the_loss_falls(project: Path) -> None:
    write_params(project, train={"num_steps": 40, "dtype": "bfloat16"})
    train.main()
    losses = [float(line.split(",")[1]) for line in Path(train.CURVE).read_text().splitlines()[1:]]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    curve = train.Curve()
    curve.points.append((7, {"loss": float("nan")}))
    with pytest.raises(BadRun, match=r"loss is nan at step 7.*train.learning_rate"):
        curve.after_step(Bar("training", 10, "steps"))


def test_nothing_supervised_is_an_error(project: Path, verifier: Qwen3ForCausalLM) -> None:
    rows = [sequence(i) | {"loss_mask": [0] * 10} for i in range(4)]
    write_sequences(project, rows)
    write_states(project, verifier)
    with pytest.raises(DataError, match="train: no supervised token in 2 sequences"):
        train.main()


def test_states_of_another_verifier_are_an_error(project: Path) -> None:
    write_verifier(project, weights=[], weights_fingerprint="e" * 64)
    with pytest.raises(DataError, match=r"of verifier ffffffffffff, wanted .* of eeeeeeeeeeee"):
        train.main()


def test_a_sequence_without_states_is_an_error(project: Path) -> None:
    write_sequences(project, [sequence(i) for i in range(9)])
    with pytest.raises(DataError, match=r"states of other tokens for q|no states for q"):
        train.main()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        pytest.param("t2d", np.arange(VOCAB_SIZE + 1) < DRAFT_VOCAB_SIZE, id="other vocabulary"),
        pytest.param("t2d", np.arange(VOCAB_SIZE) < DRAFT_VOCAB_SIZE - 1, id="other number"),
        pytest.param("d2t", np.ones(DRAFT_VOCAB_SIZE, dtype=np.int64), id="other ids"),
        pytest.param("d2t", np.zeros(DRAFT_VOCAB_SIZE + 1, dtype=np.int64), id="too many"),
    ],
)
def test_a_mapping_that_does_not_fit_is_an_error(
    project: Path, name: str, array: np.ndarray
) -> None:
    np.save(project / f"data/sequences/{name}.npy", array)
    with pytest.raises(DataError, match="no mapping into the verifier's 64 ids"):
        load_vocabulary(project / "data/sequences", load_verifier())
