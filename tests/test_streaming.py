"""extract.mode streamed: a plan instead of shards, and states from a server when they are needed.

The server is a stand-in that writes known states; tests/e2e/test_states.py has vLLM.
"""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from speculators.data_generation import vllm_client
from speculators.train.recovery import SampleUnavailable
from torch.utils.data import DataLoader
from transformers import Qwen3ForCausalLM

from pipeline import (
    evaluate,
    extract,
    parity,
    server,
    states_server,
    streaming,
    train,
    verify_states,
)
from pipeline.errors import DataError, ServerError, ServerStopped, UserError
from pipeline.loading import Fate, StatesDataset
from pipeline.params import load_params
from pipeline.records import HIDDEN_STATES, SEQUENCES, Split
from pipeline.sequences import load_split
from pipeline.streaming import open_states
from pipeline.verifier import load_verifier
from tests.small_sequences import LAYER_IDS, NUM_LAYERS, sequence, write_params, write_sequences
from tests.test_extract import StatesServer, states_of
from tests.test_train import project, true_states, verifier, write_states

__all__ = ["project", "verifier"]
TRAIN = SEQUENCES / Split.TRAIN
MAX_LEN = 128


@pytest.fixture
def fake(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesServer]:
    """A server of `states_of`, in a project whose states are to be streamed."""
    (project / "staging").mkdir()
    fake = StatesServer(project / "staging")
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", fake.base_url)
    monkeypatch.setattr(parity, "prove", lambda *_: None)  # tests/test_parity.py has the gate
    monkeypatch.setattr(vllm_client, "RETRY_BACKOFF_BASE", 0)  # seconds
    write_params(project, extract={"mode": "streamed"})
    yield fake
    fake.close()


def dataset(states: Any, max_len: int = MAX_LEN) -> StatesDataset:
    verifier = load_verifier()
    rows = states.of(load_split(TRAIN), [*LAYER_IDS, NUM_LAYERS], verifier.weights_fingerprint)
    return StatesDataset(TRAIN, rows, states, max_len, torch.float32)


def report(stage: str) -> Any:
    return json.loads(Path(f"reports/{stage}.json").read_text())


def test_extract_leaves_a_plan_and_no_shards(fake: StatesServer) -> None:
    assert list(HIDDEN_STATES.glob("shard-*"))
    extract.main()
    assert {path.name for path in HIDDEN_STATES.iterdir()} == {"plan.json"}
    plan = json.loads((HIDDEN_STATES / "plan.json").read_text())
    assert [record["sample_id"] for record in plan["sequences"]] == [f"q{i}_gen0" for i in range(8)]
    assert (plan["layer_ids"], plan["dtype"]) == ([*LAYER_IDS, NUM_LAYERS], "float32")
    assert fake.asked == []
    found = report("extract")
    assert (found["rows_in"], found["rows_stored"], found["rows_streamed"]) == (8, 0, 8)
    assert (found["shards"], found["bytes"], found["tokens"]) == (0, 0, 87)


def test_the_gate_is_asked_once_and_nothing_is_started_again(
    fake: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def prove(*args: Any) -> None:
        _, sequences, _, _, entry, _ = args
        asked.append(len(sequences))
        settings = {name: getattr(entry, name) for name in extract.MADE_BY}
        figures = {
            "no_reference": None,
            "max_errors": [0.0],
            "together_max_error": 0.0,
            "top1_agreement": 1.0,
        }
        (HIDDEN_STATES / "parity.json").write_text(json.dumps({"settings": settings, **figures}))

    monkeypatch.setattr(parity, "prove", prove)
    extract.main()
    fake.close()
    write_sequences(Path(), [sequence(i) for i in range(9)])
    extract.main()
    assert asked == [8]
    assert report("extract")["rows_streamed"] == 9
    assert report("extract")["parity"]["top1_agreement"] == 1.0


def test_back_to_stored_makes_the_shards_and_removes_the_plan(fake: StatesServer) -> None:
    extract.main()
    write_params(Path(), extract={"mode": "stored"})
    extract.main()
    names = {path.name for path in HIDDEN_STATES.iterdir()}
    assert names == {"manifest.json", *(f"shard-0000{i}.safetensors" for i in range(2))}
    assert report("extract")["rows_stored"] == 8


def test_verify_states_says_that_nothing_is_stored(
    fake: StatesServer, capsys: pytest.CaptureFixture[str]
) -> None:
    extract.main()
    verify_states.main()
    assert "nothing is stored, extract.mode is streamed" in capsys.readouterr().out


def test_a_draft_trained_on_streamed_states_is_that_of_stored_ones(
    fake: StatesServer, project: Path, verifier: Qwen3ForCausalLM
) -> None:
    """In float32, same seed and steps: bit for bit; and judged the same."""

    rows = [row["input_ids"] for split in Split for row in load_split(SEQUENCES / split)]
    known = {tuple(ids): true_states(verifier, ids) for ids in rows}

    def spoil(ids: list[int], answer: Any, payload: dict[str, torch.Tensor]) -> None:
        states = known[tuple(ids)]
        payload["hidden_states"] = torch.cat([states.aux, states.last[:, None]], dim=1)

    fake.spoil = spoil
    write_params(project, extract={"mode": "stored"})
    write_states(project, verifier)
    train.main()
    evaluate.main()
    stored = load_file("models/draft/model.safetensors"), report("train"), report("evaluate")

    write_params(project, extract={"mode": "streamed"})
    extract.main()
    train.main()
    evaluate.main()
    streamed = load_file("models/draft/model.safetensors")
    assert all(torch.equal(streamed[name], tensor) for name, tensor in stored[0].items())
    assert (report("train"), report("evaluate")) == stored[1:]
    # 3 steps of all 6 sequences; the 2 held-out ones at both checkpoints and by `evaluate`.
    assert len(fake.asked) == 3 * 6 + 2 * 2 + 2
    assert not list(Path("staging").iterdir())


def test_a_batch_is_asked_at_once(fake: StatesServer) -> None:
    together = threading.Barrier(6, timeout=20)

    def spoil(*_: Any) -> None:
        together.wait()

    fake.spoil = spoil
    extract.main()
    with open_states(load_params(), load_verifier()) as states:
        samples = dataset(states)
        (batch,) = DataLoader(samples, 6, collate_fn=list)
    for row, sample in zip(samples.sequences, batch, strict=True):
        expected = states_of(row["input_ids"])["hidden_states"]
        assert torch.equal(sample["hidden_states"], expected[:, :3].flatten(1))
        assert torch.equal(sample["verifier_last_hidden_states"], expected[:, 3])
        assert sample["loss_mask"].tolist() == row["loss_mask"]


def test_no_more_is_asked_than_a_batch_has_room_for(fake: StatesServer) -> None:
    extract.main()
    with open_states(load_params(), load_verifier()) as states:
        sample = dataset(states, max_len=8)[0]
    assert [len(ids) for ids in fake.asked] == [9]  # the first is dropped later
    assert len(sample["loss_mask"]) == 9


def other_tokens(payload: dict[str, torch.Tensor]) -> None:
    payload["token_ids"] += 1


def no_number(payload: dict[str, torch.Tensor]) -> None:
    payload["hidden_states"][2, 1, 0] = float("nan")


def layer_missing(payload: dict[str, torch.Tensor]) -> None:
    payload["hidden_states"] = payload["hidden_states"][:, 1:].contiguous()


def too_short(payload: dict[str, torch.Tensor]) -> None:
    payload["hidden_states"] = payload["hidden_states"][3:].contiguous()


@pytest.mark.parametrize("break_", [other_tokens, no_number, layer_missing, too_short])
def test_a_sequence_with_wrong_states_is_left_out_and_counted(
    fake: StatesServer, break_: Any
) -> None:
    bad = sequence(4)["input_ids"]

    def spoil(ids: list[int], answer: Any, payload: dict[str, torch.Tensor]) -> None:
        if ids[:4] == bad[:4]:
            break_(payload)

    fake.spoil = spoil
    extract.main()
    train.main()
    found = report("train")
    assert (found["rows_in"], found["sequences"], found["rejected"]["no_states"]) == (6, 5, 1)
    assert found["tokens"] == 66 - 11
    assert not list(Path("staging").glob("*.safetensors"))


def test_a_held_out_answer_without_states_is_counted(fake: StatesServer) -> None:
    extract.main()
    train.main()
    bad = sequence(1)["input_ids"]
    fake.spoil = lambda ids, *_: 400 if ids[:4] == bad[:4] else None
    evaluate.main()
    found = report("evaluate")
    assert (found["rows_in"], found["samples"], found["rejected"]) == (2, 1, {"no_states": 1})


@pytest.mark.parametrize("stage", [train, evaluate])
def test_more_failures_than_one_in_a_hundred_fail_the_stage(fake: StatesServer, stage: Any) -> None:
    """Unlike wrong states, no answer may be an answer next time."""
    extract.main()
    train.main()
    fake.spoil = lambda ids, *_: 500 if ids[:4] in (ids_of(1)[:4], ids_of(5)[:4]) else None
    with pytest.raises(ServerError, match=r"1 of . sequences of data/.* got no hidden states"):
        stage.main()


def test_training_on_nothing_is_an_error(fake: StatesServer) -> None:
    extract.main()
    fake.spoil = lambda *_: 400
    with pytest.raises(ServerError, match="6 of 6 sequences of data/sequences/train got no hidden"):
        train.main()
    assert not Path("models/draft").exists()


@pytest.mark.parametrize("code", [401, 403, 404])
def test_a_wrong_key_or_model_ends_the_run_at_once(fake: StatesServer, code: int) -> None:
    extract.main()
    fake.spoil = lambda *_: code
    with pytest.raises(ServerError, match=str(code)):
        train.main()
    assert len(fake.asked) <= 6


def test_a_server_that_hangs_is_not_waited_for_twice(fake: StatesServer) -> None:
    write_params(Path(), extract={"mode": "streamed", "timeout_s": 1})
    extract.main()
    fake.spoil = lambda *_: time.sleep(3)
    with open_states(load_params(), load_verifier()) as states:
        samples = dataset(states)
        assert isinstance(samples[0], SampleUnavailable)
    assert len(fake.asked) == 1
    with pytest.raises(ServerError, match="1 of them no answer"):
        samples.check_fates()


def test_another_server_is_asked_for_what_one_failed(
    fake: StatesServer, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = StatesServer(project / "staging")
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", f"{dead.base_url},{fake.base_url}")
    extract.main()
    with open_states(load_params(), load_verifier()) as states:
        dead.spoil = lambda *_: 500
        samples = dataset(states)
        assert all("hidden_states" in samples[index] for index in range(6))
    assert (len(dead.asked), len(fake.asked)) == (3, 6)
    dead.close()


def ids_of(index: int) -> list[int]:
    ids: list[int] = sequence(index)["input_ids"]
    return ids


def test_states_that_come_the_next_time_are_no_loss(fake: StatesServer) -> None:
    codes = iter([500, 500])  # both tries
    fake.spoil = lambda *_: next(codes, None)
    extract.main()
    with open_states(load_params(), load_verifier()) as states:
        samples = dataset(states)
        assert isinstance(samples[0], SampleUnavailable)
        assert samples.fates.tolist() == [Fate.FAILED, *[Fate.THERE] * 5]
        assert "hidden_states" in samples[0]
        assert not samples.fates.any()


def test_a_server_that_gives_no_states_any_more_ends_the_run(fake: StatesServer) -> None:
    extract.main()
    fake.spoil = lambda *_: 500
    with open_states(load_params(), load_verifier()) as states:
        samples = dataset(states)
        for _ in range(19):
            assert isinstance(samples[5], SampleUnavailable)
        with pytest.raises(ServerError, match=r"^20 sequences in a row .* one q7_gen0: .*500"):
            samples[5]


def test_a_dead_server_of_our_own_has_the_last_word(
    fake: StatesServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    extract.main()
    log = tmp_path / "vllm.log"
    log.write_text("ERROR the engine is gone\n")
    process = subprocess.Popen(["false"])
    process.wait()
    dead = server.Endpoint("http://x/v1", "models/verifier", "0.32.0", 33, process, log)
    monkeypatch.setattr(streaming, "states_endpoints", lambda *_: nullcontext([dead]))
    with (
        pytest.raises(ServerStopped, match="the engine is gone"),
        open_states(load_params(), load_verifier()),
    ):
        raise ServerError("no states")
    # And if nobody noticed.
    with (
        pytest.raises(ServerStopped, match="the engine is gone"),
        open_states(load_params(), load_verifier()),
    ):
        pass


def test_a_file_that_holds_no_states_is_not_deleted(fake: StatesServer, project: Path) -> None:
    """The server names the file; speculators' own transfer would delete whatever it names."""
    (project / "mine.safetensors").write_text("mine")

    def spoil(ids: list[int], answer: Any, payload: Any) -> None:
        answer["kv_transfer_params"]["hidden_states_path"] = str(project / "mine.safetensors")

    extract.main()
    fake.spoil = spoil
    with open_states(load_params(), load_verifier()) as states:
        assert isinstance(dataset(states)[0], SampleUnavailable)
    assert (project / "mine.safetensors").read_text() == "mine"


def test_the_key_goes_along(fake: StatesServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    extract.main()
    with open_states(load_params(), load_verifier()) as states:
        dataset(states)[0]
    assert fake.keys == ["Bearer sesame"]


def test_loader_processes_ask_too_and_what_they_miss_is_known_here(fake: StatesServer) -> None:
    extract.main()
    fake.spoil = lambda ids, *_: 400 if ids[:4] == ids_of(4)[:4] else None
    with open_states(load_params(), load_verifier()) as states:
        samples = dataset(states)
        loader = DataLoader(
            samples, 1, num_workers=2, collate_fn=list, multiprocessing_context="spawn"
        )
        assert len(list(loader)) == 6
    assert samples.fates.tolist() == [0, 0, Fate.WRONG, 0, 0, 0]


def test_a_plan_of_other_tokens_stops_training(fake: StatesServer) -> None:
    extract.main()
    write_sequences(Path(), [sequence(i, num_tokens=9) for i in range(8)])
    with pytest.raises(DataError, match="states of other tokens for q2_gen0; `dvc repro`"):
        train.main()


def test_stored_without_its_manifest_says_what_to_do(fake: StatesServer) -> None:
    extract.main()
    write_params(Path(), extract={"mode": "stored"})
    with pytest.raises(DataError, match=r"manifest\.json.*dvc repro"):
        train.main()


def test_a_server_of_our_own_is_the_one_of_extract(
    fake: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same arguments, under the same lock: two of them would share one staging folder."""
    extract.main()
    monkeypatch.delenv("PIPELINE_EXTRACT_ENDPOINTS")
    started: list[Any] = []

    def serve(verifier: Any, name: str, args: Any) -> Any:
        started.append((verifier.max_model_len, name, args))
        raise ServerError("enough")

    monkeypatch.setattr(states_server, "serve", serve)
    for stage in (extract, train):
        with pytest.raises(ServerError, match="enough"):
            stage.main()
    assert started[0] == started[1]
    max_model_len, name, args = started[0]
    assert (max_model_len, name) == (33, "extract")  # one more than verifier.max_model_len
    assert "--no-enable-prefix-caching" in args
    assert f"[{', '.join(map(str, [*LAYER_IDS, NUM_LAYERS]))}]".replace(" ", "") in args[1]
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", fake.base_url)
    with (
        open_states(load_params(), load_verifier()),
        pytest.raises(UserError, match="is being written"),
    ):
        extract.main()
