"""Training for real, on a verifier of 3 layers with random weights and its true hidden states."""

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.run import config_from_args, parse_args
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline import train
from pipeline.batches import SequenceDataset, make_loader
from pipeline.draft import load_draft, load_vocabulary, verifier_folder
from pipeline.errors import BadRun, DataError, ParamsError
from pipeline.evaluate import PHASES
from pipeline.evaluate import main as evaluate
from pipeline.extract import load_sequences, wanted_shards
from pipeline.manifest import MANIFEST, Manifest, StatesRejection, describe
from pipeline.params import load_params
from pipeline.progress import Bar
from pipeline.records import HIDDEN_STATES, SEQUENCES, Split
from pipeline.resume import file_sha256, write_json
from pipeline.shards import HiddenStates, ShardWriter, States
from pipeline.trainer import DraftTrainer
from pipeline.verifier import load_verifier
from tests.small_sequences import (
    DRAFT_VOCAB_SIZE,
    HIDDEN_SIZE,
    LAYER_IDS,
    NUM_LAYERS,
    ROOT,
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


def write_states(root: Path, model: Qwen3ForCausalLM, refused: str | None = None) -> None:
    sequences, folder = load_sequences(root / "data/sequences"), root / "data/hidden_states"
    ids_of = dict(zip(sequences["key"], sequences["input_ids"], strict=True))
    shards = []
    for name, entry in wanted_shards(sequences, load_params(), load_verifier()).items():
        writer = ShardWriter(folder / name, entry, HIDDEN_SIZE)
        for index, record in enumerate(entry.sequences):
            if record.sample_id == refused:
                writer.reject(index, StatesRejection.REFUSED)
            else:
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
    assert {path.name for path in Path("models").glob("[!.]*")} == {"verifier", "draft"}
    assert not list(train.IN_PROGRESS.iterdir())
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
    assert (found["rows_in"], found["held_out"]["rows_in"]) == (6, 2)
    # 8 sequences of 10, 11, 12, 10, … tokens, 4 of each the prompt; 0 and 1 are held out.
    assert (found["sequences"], found["tokens"], found["supervised_tokens"]) == (6, 66, 42)
    assert (found["held_out"]["sequences"], found["held_out"]["supervised_tokens"]) == (2, 13)
    assert (found["steps"], found["sequences_cut"]) == (3, 0)
    expected = 1 + sum(found["held_out"]["accuracy"].values())
    assert found["held_out"]["expected_acceptance_length"] == pytest.approx(expected, abs=2e-4)
    curve = Path("reports/train_curve.csv").read_text().splitlines()
    assert curve[0].startswith("step,loss,loss_1,loss_2,accuracy_1,accuracy_2,reasoning_loss_1,")
    assert [line.split(",")[0] for line in curve[1:]] == ["1", "2", "3"]

    evaluate()
    report = json.loads(Path("reports/evaluate.json").read_text())
    assert (report["rows_in"], report["samples"], report["tokens"]) == (2, 2, 13)
    assert report["rejected"] == {"no_states": 0}
    assert 1 <= report["acceptance_length"]["overall"] <= 3
    assert set(report["by_num_draft_tokens"]) == {"1", "2", "3"}


def test_the_checkpoint_says_what_it_was_trained_on(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    def provenance() -> Any:
        train.main()
        return json.loads(Path("models/draft/provenance.json").read_text())

    found = provenance()
    d2t = Path("data/sequences/d2t.npy").read_bytes()
    assert found["vocabulary_sha256"] == hashlib.sha256(d2t).hexdigest()
    assert (found["ablation"], found["rebuilt_sequences"]) == (["none"], 0)
    changes = {"ablation": "reasoning_dropped", "rebuilt": True}
    write_sequences(project, [sequence(i) | changes for i in range(8)])
    write_states(project, verifier)
    found = provenance()
    assert (found["ablation"], found["rebuilt_sequences"]) == (["reasoning_dropped"], 6)


def test_the_curves_tell_the_phases_apart(project: Path, verifier: Qwen3ForCausalLM) -> None:
    """Without a reasoning there is nothing to say about it."""
    train.main()
    for file in (train.CURVE, train.HELD_OUT_CURVE):
        table = pd.read_csv(file)
        for phase in ("reasoning", "answer"):
            assert table[[f"{phase}_loss_1", f"{phase}_loss_2"]].gt(0).all(axis=None)
            assert table[[f"{phase}_accuracy_1", f"{phase}_accuracy_2"]].notna().all(axis=None)
    assert metrics()["held_out"]["by_phase"]["reasoning"]["accuracy"]["1"] is not None

    write_sequences(project, [sequence(i) | {"answer_start": 4} for i in range(8)])
    write_states(project, verifier)
    train.main()
    for file in (train.CURVE, train.HELD_OUT_CURVE):
        table = pd.read_csv(file)
        assert table.filter(like="reasoning_").isna().all(axis=None)
        # All losses of a batch with one phase are of that phase.
        sums = table["answer_loss_1"] + 0.8 * table["answer_loss_2"]
        assert sums.tolist() == pytest.approx(table["loss"].tolist(), abs=2e-3)
    by_phase = metrics()["held_out"]["by_phase"]
    assert by_phase["reasoning"]["accuracy"] == {"1": None, "2": None}
    assert by_phase["answer"]["accuracy"]["1"] is not None


def test_a_phase_too_short_for_a_draft_token_says_nothing_of_it(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """Two tokens of answer: behind the first stands one that can be drafted."""
    write_sequences(project, [sequence(i) | {"answer_start": 8} for i in range(8)])
    write_states(project, verifier)
    train.main()
    table = pd.read_csv(train.HELD_OUT_CURVE)
    assert table["answer_accuracy_2"].notna().all()  # from the last token of the reasoning on
    write_sequences(project, [sequence(i) | {"answer_start": 9} for i in range(8)])
    write_states(project, verifier)
    train.main()
    table = pd.read_csv(train.HELD_OUT_CURVE)
    assert table["answer_accuracy_1"].notna().all()
    assert table["answer_accuracy_2"].isna().all()


def test_tensorboard_gets_the_metrics_on_request(project: Path) -> None:
    train.main()
    assert not Path("logs/tensorboard").exists()
    write_params(project, train={"tensorboard": True})
    train.main()
    [run] = Path("logs/tensorboard").iterdir()
    events = EventAccumulator(str(run)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [0, 1, 2]
    assert {"val/all_acc_0_epoch", "train/reasoning_loss_1"} <= set(events.Tags()["scalars"])


def test_a_question_that_is_held_out_and_trained_on_stops_the_run(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """By the tokens that were asked, whatever was answered."""
    rows = [sequence(i) for i in range(8)]
    rows[5]["input_ids"] = [*rows[1]["input_ids"][:4], *rows[5]["input_ids"][4:]]
    write_sequences(project, rows)
    write_states(project, verifier)
    with pytest.raises(DataError, match=r"1 questions are in .*train and in .*held_out"):
        train.main()


# The yardstick


class Replay:
    """Proposes what the verifier wrote next; shuffled, what it wrote somewhere."""

    device, dtype, d2t = CPU, torch.float32, None

    def __init__(self, order: np.random.Generator | None) -> None:
        self._order = order

    def __call__(self, input_ids: torch.Tensor, ttt_steps: int, **batch: Any) -> list[torch.Tensor]:
        places = torch.arange(input_ids.shape[1])
        if self._order is not None:
            places = torch.from_numpy(self._order.permutation(len(places)))
        return [input_ids[:, places].roll(-1 - step, dims=1) for step in range(ttt_steps)]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_perfect_draft_scores_k_plus_1_and_a_shuffled_one_about_1(
    project: Path, verifier: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    """Through the whole stage. Behind the first token of an answer come ten full steps."""
    rows = [sequence(i, num_tokens=4 + 1 + 10 * (k + 1)) for i in range(8)]
    write_sequences(project, rows, num_held_out=6)
    write_states(project, verifier)
    benchmark = {"num_draft_tokens": k, "max_tokens": 16}
    write_params(project, benchmark=benchmark, verifier={"max_model_len": 64})
    train.main()

    def judged(draft: Replay) -> Any:
        monkeypatch.setattr("pipeline.evaluate.load_draft", lambda *_: draft)
        evaluate()
        return json.loads(Path("reports/evaluate.json").read_text())

    perfect = judged(Replay(None))
    assert perfect["acceptance_length"] == dict.fromkeys(("overall", *PHASES), k + 1.0)
    assert perfect["acceptance"]["joint"] == dict.fromkeys(map(str, range(1, k + 1)), 1.0)
    assert perfect["steps"] == 6 * 10
    # Of 16 tokens one in 16 is right by chance, or in padding, which holds token 0.
    assert judged(Replay(np.random.default_rng(0)))["acceptance_length"]["overall"] < 1.3


# A draft to go on with


def first_draft(project: Path) -> Path:
    train.main()
    return Path(shutil.copytree("models/draft", project / "first"))


def test_training_goes_on_from_a_draft_and_keeps_its_vocabulary(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """The data ask for other ids by now."""
    folder = first_draft(project)
    ids = np.array([0, *range(2, 16), 20])
    np.save("data/sequences/d2t.npy", ids - np.arange(16))
    np.save("data/sequences/t2d.npy", np.isin(np.arange(VOCAB_SIZE), ids))
    tiny = {"learning_rate": 1e-9, "muon_learning_rate": 1e-9, "num_steps": 1, "ttt_steps": 3}
    write_params(project, train={"init_from": "first", **tiny})
    train.main()
    first, second = (load_draft(f, torch.float32, CPU) for f in (folder, Path("models/draft")))
    for name, weights in first.state_dict().items():
        if not name.startswith("verifier_"):  # not saved
            assert torch.allclose(weights, second.state_dict()[name], atol=1e-6), name
    found = json.loads(Path("models/draft/provenance.json").read_text())
    files = [folder / "config.json", folder / "model.safetensors"]
    assert found["init_from_sha256"] == [file_sha256(path) for path in files]
    old = json.loads((folder / "provenance.json").read_text())
    assert found["vocabulary_sha256"] == old["vocabulary_sha256"]
    assert metrics()["vocabulary"]["answer"]["fraction"] == 1.0
    proposal = json.loads(Path("models/draft/config.json").read_text())["speculators_config"]
    assert proposal["proposal_methods"][0]["speculative_tokens"] == 3
    config = json.loads(Path("models/draft/config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "models/verifier"


@pytest.mark.parametrize(("acceptance", "best_step"), [([3.0, 2.0, 1.0], 0), ([1.0, 2.0, 3.0], 4)])
def test_a_draft_that_training_makes_no_better_stays_as_it_was(
    project: Path, monkeypatch: pytest.MonkeyPatch, acceptance: list[float], best_step: int
) -> None:
    folder = first_draft(project)
    write_params(project, train={"init_from": "first", "num_steps": 4, "checkpoint_steps": 2})
    measured = iter(acceptance)
    monkeypatch.setattr("pipeline.trainer.expected_acceptance", lambda _: next(measured))
    train.main()
    assert pd.read_csv(train.HELD_OUT_CURVE)["step"].tolist() == [0, 2, 4]
    assert metrics()["best_step"] == best_step
    before, after = (load_file(f / "model.safetensors") for f in (folder, Path("models/draft")))
    same = all(torch.equal(before[name], after[name]) for name in before)
    assert same == (best_step == 0)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"train": {"init_from": "nowhere"}}, "nowhere is no folder; name another"),
        ({"train": {"init_from": "models/verifier"}}, "verifier is no draft .*name another"),
        ({"train": {"init_from": "first", "num_layers": 2}}, "1 layers; .*train.num_layers is 2"),
    ],
)
def test_a_draft_of_another_shape_is_an_error(
    project: Path, changes: dict[str, Any], problem: str
) -> None:
    first_draft(project)
    write_params(project, **changes)
    with pytest.raises(DataError, match=problem):
        train.main()


def test_a_draft_that_could_never_end_the_thinking_is_an_error(project: Path) -> None:
    first_draft(project)
    write_params(project, train={"init_from": "first"})
    write_verifier(project, weights=[], think_end_id=40)
    with pytest.raises(DataError, match=r"first: .* can never propose \[40\]"):
        train.main()


# Many processes


def test_fewer_sequences_than_processes_are_an_error(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    held_out = SEQUENCES / Split.HELD_OUT
    dataset = SequenceDataset(held_out, HiddenStates(HIDDEN_STATES), load_params(), load_verifier())
    with pytest.raises(DataError, match=r"2 sequences, fewer than train.num_processes, which is 3"):
        make_loader(dataset, HIDDEN_SIZE, CPU, 0, num_parts=3)


def test_torchrun_runs_this_module_once_for_each_gpu() -> None:
    """Read by torchrun's own parser."""
    command = train.torchrun_command(8)
    assert command[1:3] == ["-m", "torch.distributed.run"]
    config, script, arguments = config_from_args(parse_args(command[3:]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (1, 1, 8)
    assert arguments[-2:] == ["-m", "pipeline.train"]
    assert script == sys.executable


def test_more_processes_than_gpus_are_an_error(project: Path) -> None:
    write_params(project, train={"num_processes": 8})
    with pytest.raises(ParamsError, match="num_processes is 8, but this machine has 0 GPUs"):
        train.main()


def test_two_processes_train_one_draft_and_go_on_after_a_kill(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """By torchrun and FSDP, sharded over two processes, though on a CPU."""
    rows = [sequence(i, num_tokens=60 + i % 3) for i in range(10)]
    write_sequences(project, rows)
    write_states(project, verifier)
    write_params(project, train={"num_processes": 2, "num_steps": 6, "checkpoint_steps": 2})

    def trained(*, dies_at: int = 0) -> subprocess.CompletedProcess[str]:
        command = train.torchrun_command(2)
        command[command.index("pipeline.train")] = "tests.cpu_processes"
        env = {**os.environ, "DIES_AT": str(dies_at), "PYTHONPATH": str(ROOT)}
        env["OMP_NUM_THREADS"] = "1"
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)

    done = trained()
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the best was step") == 1
    whole = results()
    weights = load_file("models/draft/model.safetensors")
    embeddings = verifier.model.embed_tokens.weight
    assert torch.equal(weights["embed_tokens.weight"], embeddings)
    table = pd.read_csv(train.CURVE)
    assert table["step"].tolist() == [1, 2, 3, 4, 5, 6]
    shutil.rmtree("models/draft")
    assert trained(dies_at=3).returncode != 0
    assert not Path("models/draft").exists()
    assert trained().returncode == 0
    assert results() == whole


def test_acceptance_is_that_of_all_generated_tokens_whatever_is_learnt(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    train.main()
    found = []
    for mask in ([0] * 4 + [1] * 6, [0] * 9 + [1]):
        write_sequences(project, [sequence(i) | {"loss_mask": mask} for i in range(8)])
        write_states(project, verifier)
        evaluate()
        found.append(Path("data/acceptance/runs.parquet").read_bytes())
    assert found[0] == found[1]


def test_rows_without_states_are_counted(project: Path, verifier: Qwen3ForCausalLM) -> None:
    write_states(project, verifier, refused="q3_gen0")
    train.main()
    found = metrics()
    assert (found["rows_in"], found["sequences"]) == (6, 5)
    assert found["rejected"] == {"no_states": 1, "cut_before_answer": 0}

    write_states(project, verifier, refused="q1_gen0")
    evaluate()
    report = json.loads(Path("reports/evaluate.json").read_text())
    assert (report["rows_in"], report["samples"], report["rejected"]) == (2, 1, {"no_states": 1})


def test_what_is_counted_is_what_training_sees(project: Path, verifier: Qwen3ForCausalLM) -> None:
    """Batches of 128 tokens; speculators drops the first token of each sequence before it cuts."""
    rows = [
        *[sequence(0), sequence(1)],  # held out
        sequence(2),
        sequence(3, num_tokens=129),  # fits just so
        sequence(4, num_tokens=140),
        sequence(5, num_tokens=140, prompt=128),  # one supervised token is left
        sequence(6, num_tokens=140, prompt=129),  # none
    ]
    write_sequences(project, rows)
    write_states(project, verifier)
    params, identity = load_params(), load_verifier()
    states = HiddenStates(HIDDEN_STATES)
    training = SequenceDataset(SEQUENCES / Split.TRAIN, states, params, identity)
    batches = list(make_loader(training, HIDDEN_SIZE, CPU, 0, num_parts=1))
    assert training.counts() == {
        "rows_in": 5,
        "sequences": 4,
        "rejected": {"no_states": 0, "cut_before_answer": 1},
        "tokens": 10 + 129 + 129 + 129,
        "supervised_tokens": 6 + 125 + 125 + 1,
        "sequences_cut": 2,
    }
    supervised = sum(int(batch["loss_mask"].sum()) for batch in batches)
    assert supervised == training.counts()["supervised_tokens"]
    seen = sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)
    assert seen == training.counts()["tokens"] - training.counts()["sequences"]  # the first tokens


def test_answers_that_are_all_cut_are_an_error(project: Path, verifier: Qwen3ForCausalLM) -> None:
    write_sequences(project, [sequence(i, num_tokens=140, prompt=130) for i in range(4)])
    write_states(project, verifier)
    with pytest.raises(DataError, match=r"train: no supervised .* train.max_tokens_per_batch 128"):
        train.main()


@pytest.mark.parametrize("stage", [train.main, evaluate])
def test_no_sequences_are_an_error(project: Path, stage: Callable[[], None]) -> None:
    shutil.rmtree("data/sequences/held_out")
    with pytest.raises(DataError, match="held_out holds no sequences; `dvc repro` makes them"):
        stage()


def test_of_a_hub_model_only_what_is_loaded_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["config.json", "tokenizer.model", "model-00001.safetensors", "pytorch_model.bin"]
    there += ["consolidated.00.pth", "model.pt", "model.gguf", "model.onnx", "code.py"]

    def snapshot(model: str, revision: str, allow_patterns: list[str] | None = None) -> Any:
        return list(filter_repo_objects(there, allow_patterns=allow_patterns))

    monkeypatch.setattr("pipeline.draft.snapshot_download", snapshot)
    identity: Any = SimpleNamespace(model="some/model", revision="a" * 40)
    assert verifier_folder(identity) == [*there[:3], "code.py"]


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
    curve = train.Curve([{"step": 7, "loss": float("nan")}])
    with pytest.raises(BadRun, match=r"loss is nan at step 7.*train.learning_rate"):
        curve.after_step(Bar("training", 10, "steps"))


def test_one_that_shows_between_the_measured_steps_is_in_no_checkpoint(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10 steps the first and the last are measured; the weights break behind the sixth."""
    monkeypatch.setattr(train, "CURVE_POINTS", 1)
    write_params(project, train={"num_steps": 10, "checkpoint_steps": 4})
    step = DraftTrainer._optimizers_step

    def break_weights(trainer: DraftTrainer) -> None:
        step(trainer)
        if trainer.global_step == 5:
            next(p for p in trainer.model.parameters() if p.requires_grad).data.fill_(float("nan"))

    with monkeypatch.context() as patch:
        patch.setattr(DraftTrainer, "_optimizers_step", break_weights)
        with pytest.raises(BadRun, match="loss is nan at step 8"):
            train.main()
    assert not Path("models/draft").exists()
    train.main()
    assert metrics()["held_out"]["loss"] > 0


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


def test_a_weight_of_none_for_the_reasoning_is_training_on_the_answer(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """The loss at a token is for the one behind it: the answer begins at 8."""

    def trained(mask: list[int], weight: float) -> bytes:
        write_params(project, train={"reasoning_weight": weight})
        write_sequences(project, [sequence(i) | {"loss_mask": mask} for i in range(8)])
        write_states(project, verifier)
        train.main()
        return Path("models/draft/model.safetensors").read_bytes()

    whole, answer = [0] * 4 + [1] * 6, [0] * 7 + [1] * 3
    assert trained(whole, 0.0) == trained(answer, 1.0)
    assert trained(whole, 0.5) != trained(whole, 1.0)


def test_a_weight_of_none_leaves_nothing_of_answers_cut_in_the_reasoning(
    project: Path, verifier: Qwen3ForCausalLM
) -> None:
    write_params(project, train={"reasoning_weight": 0.0})
    cut = {"answer_start": 10, "answer_end": 10, "reasoning_end": 10}
    write_sequences(project, [sequence(0), *(sequence(i) | cut for i in range(1, 8))], 1)
    write_states(project, verifier)
    with pytest.raises(DataError, match="no supervised token in 7 sequences"):
        train.main()


# Killed and resumed


def test_a_damaged_checkpoint_is_said_and_training_starts_anew(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.main()
    whole = results()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_draft", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train.main()
    [last] = train.IN_PROGRESS.glob("*/last.pt")
    last.write_bytes(last.read_bytes()[:1000])
    train.main()
    assert f"{last} is damaged" in capsys.readouterr().out
    assert results() == whole


def test_a_finished_run_leaves_the_progress_of_another(project: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save_draft", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train.main()
    write_params(project, train={"seed": 1})
    (train.IN_PROGRESS / "stray").touch()
    train.main()
    assert len(list(train.IN_PROGRESS.glob("*/last.pt"))) == 1


class Killed(BaseException):
    """As if the process ended here."""


def results() -> list[bytes]:
    """Draft, report and curves."""
    files = [Path("models/draft/model.safetensors"), *sorted(Path("reports").iterdir())]
    return [path.read_bytes() for path in files]


@pytest.mark.parametrize("kill_at", [1, 3, 4, 7, 8, 10])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_run_ends_with_the_weights_of_one_that_was_not(
    project: Path,
    verifier: Qwen3ForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
    kill_at: int,
    dtype: str,
) -> None:
    """Two batches an epoch, a checkpoint every three steps: in the middle of epochs too."""
    changes = {"num_steps": 10, "checkpoint_steps": 3, "dtype": dtype}
    write_params(project, train=changes)
    write_sequences(project, [sequence(i, num_tokens=30 + i % 3) for i in range(8)])
    write_states(project, verifier)
    train.main()
    whole = results()

    shutil.rmtree("models/draft")
    after_step, steps = train.Curve.after_step, []

    def kill(curve: train.Curve, bar: Bar) -> None:
        after_step(curve, bar)
        steps.append(curve.points[-1]["step"])
        if len(steps) == kill_at:
            raise Killed

    monkeypatch.setattr(train.Curve, "after_step", kill)
    with pytest.raises(Killed):
        train.main()
    assert not Path("models/draft").exists()
    train.main()
    assert results() == whole
    # The step that was killed had ended; the next run began behind the last checkpoint.
    done = kill_at - 1 - (kill_at - 1) % 3
    assert steps == [*range(1, kill_at + 1), *range(done + 1, 11)]
    assert not list(train.IN_PROGRESS.iterdir())
