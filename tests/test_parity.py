"""The parity gate: true states pass, and each way to be wrong is named."""

import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline import extract, parity, reference, states_server
from pipeline.draft import check_layer_ids
from pipeline.errors import BadRun, DataError, ServerError, VerifierError
from pipeline.findings import Captured, Cause, Head, Reference, check_payload, compare_together
from pipeline.server import meet
from tests.small_sequences import ROOT, sequence, write_params, write_sequences, write_verifier
from tests.test_extract import Payload, StatesServer

VOCAB_SIZE, HIDDEN_SIZE, NUM_LAYERS = 64, 32, 5
LAYERS = [1, 2, 4, NUM_LAYERS]
LENGTHS = [9, 12, 12, 17, 20, 24, 28, 31]
DTYPES = ["float32", "bfloat16"]


def new_model(seed: int, dtype: str = "float32", *, tied: bool = False) -> Qwen3ForCausalLM:
    """Random weights, also of the final norm, which is 1 in a new model."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config).eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    angles = model.model.rotary_emb  # stays in float32, as in a model that is loaded
    model.to(getattr(torch, dtype)).model.rotary_emb = type(angles)(config)
    return model


@torch.inference_mode()
def all_states(model: Qwen3ForCausalLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, n + 2, H], by hooks on the layers, the last entry after the norm; top-1 [T - 1]."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
        for layer in [*model.model.layers, model.model.norm, model.lm_head]
    ]
    logits = model(torch.tensor([ids])).logits[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(seen, dim=1), logits[:-1].argmax(-1)


class World:
    """A verifier, its sequences, and what a right server gives for them."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.model = new_model(0, dtype)
        torch.manual_seed(1)
        self.ids = [torch.randint(0, VOCAB_SIZE, (length,)).tolist() for length in LENGTHS]
        self.head = Head(self.model.model.norm.weight.data, 1e-6, self.model.lm_head.weight.data)
        self.truth = [all_states(self.model, ids)[0] for ids in self.ids]
        self.references = [Reference(true[:, :-1], true[:, -1]) for true in self.truth]

    def served(
        self, layers: list[int] = LAYERS, model: Qwen3ForCausalLM | None = None
    ) -> list[Captured]:
        captured = []
        for number, ids in enumerate(self.ids):
            states, top1 = all_states(model or self.model, ids)
            asked = torch.tensor(ids)
            captured.append(Captured(f"q{number}", asked, asked, states[:, layers], top1))
        return captured

    def findings(
        self,
        alone: list[Captured],
        together: list[Captured] | None = None,
        reference: bool = True,
    ) -> parity.Report:
        together = alone if together is None else together
        for each in (alone, together):
            wrong = check_payload(each, LAYERS, HIDDEN_SIZE, self.dtype)
            if wrong:
                return parity.Report(None, None, None, None, wrong)
        truth = self.references if reference else None
        return parity.compare(alone, together, truth, self.head, LAYERS, self.dtype)


@pytest.fixture(scope="module", params=DTYPES)
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


@pytest.fixture(scope="module")
def world32() -> World:
    return World("float32")


def causes(report: parity.Report) -> dict[int | None, Cause]:
    return {finding.slot: finding.cause for finding in report.findings}


def edited(
    captured: list[Captured], edit: Callable[[int, torch.Tensor], torch.Tensor]
) -> list[Captured]:
    """With other hidden states: edit(number of the sequence, states)."""
    return [
        replace(one, hidden_states=edit(number, one.hidden_states.clone()))
        for number, one in enumerate(captured)
    ]


# All is well


@pytest.mark.parametrize("reference", [True, False])
def test_true_states_pass(world: World, reference: bool) -> None:
    report = world.findings(world.served(), reference=reference)
    assert report.findings == []
    assert report.top1_agreement == 1.0
    assert report.together_error == 0.0
    assert (report.slots is not None) == reference


def test_rounding_of_the_dtype_passes(world: World) -> None:
    """Noise of a third of a bit of the type on every value, as other kernels make it."""
    torch.manual_seed(2)
    eps = torch.finfo(getattr(torch, world.dtype)).eps

    def noisy(number: int, states: torch.Tensor) -> torch.Tensor:
        return (states * (1 + eps / 3 * torch.randn(states.shape))).to(states.dtype)

    alone = world.served()
    assert world.findings(edited(alone, noisy), edited(alone, noisy)).findings == []


# What is wrong is named


def test_layers_shifted_by_one(world: World) -> None:
    for layers, slots in (([0, 1, 3, 4], 4), ([2, 3, 5, 5], 3)):
        report = world.findings(world.served(layers))
        assert list(causes(report).values()) == [Cause.OFF_BY_ONE] * slots
        assert str(report.findings[1]) == (
            f"slot 1 (layer 2): layers off by one: holds the states after layer {layers[1]}"
        )


def test_one_slot_off_by_two(world: World) -> None:
    assert causes(world.findings(world.served([1, 4, 4, 5]))) == {1: Cause.OTHER_LAYER}


def test_the_last_layer_missing_without_a_reference(world: World) -> None:
    report = world.findings(world.served([0, 1, 3, 4]), reference=False)
    assert list(causes(report)) == [3]
    assert causes(report)[3] in (Cause.OFF_BY_ONE, Cause.OTHER_VERIFIER)  # an untrained model's


@pytest.mark.parametrize("reference", [True, False])
def test_the_final_norm_applied(world: World, reference: bool) -> None:
    report = world.findings(world.served([1, 2, 4, 6]), reference=reference)
    assert causes(report) == {3: Cause.FINAL_NORM}


def test_a_final_norm_that_changes_no_top1_is_found_by_the_length(world32: World) -> None:
    """With weights near 1 the likeliest token is the same with one norm, two or none."""
    model = new_model(0)
    torch.nn.init.uniform_(model.model.norm.weight, 0.999, 1.001)
    head = Head(model.model.norm.weight.data, 1e-6, model.lm_head.weight.data)
    alone = world32.served([1, 2, 4, 6], model)
    report = parity.compare(alone, alone, None, head, LAYERS, "float32")
    assert report.top1_agreement is not None
    assert report.top1_agreement >= 0.99
    assert causes(report) == {3: Cause.FINAL_NORM}


def test_slots_in_another_order(world: World) -> None:
    report = world.findings(world.served([2, 1, 4, 5]))
    assert causes(report) == {0: Cause.WRONG_ORDER, 1: Cause.WRONG_ORDER}
    report = world.findings(world.served([5, 4, 2, 1]), reference=False)
    assert causes(report) == {3: Cause.WRONG_ORDER}


@pytest.mark.parametrize("reference", [True, False])
def test_sequences_swapped(world: World, reference: bool) -> None:
    """q1 and q2 are of one length."""
    alone = world.served()
    swapped = edited(
        alone,
        lambda number, states: (
            alone[{1: 2, 2: 1}[number]].hidden_states if number in (1, 2) else states
        ),
    )
    report = world.findings(swapped, alone, reference)
    assert set(causes(report).values()) == {Cause.ROWS_SWAPPED}
    if reference:
        assert "24 of 153 rows are others', token 11 of q2 has that of token 11 of q1" in str(
            report.findings[0]
        )


def test_two_rows_swapped_in_a_batch(world: World) -> None:
    def swap(number: int, states: torch.Tensor) -> torch.Tensor:
        if number == 5:
            states[[7, 8]] = states[[8, 7]]
        return states

    alone = world.served()
    report = world.findings(alone, edited(alone, swap))
    assert causes(report) == dict.fromkeys(range(4), Cause.ROWS_SWAPPED)
    assert "asked at once, 2 of 153 rows" in str(report.findings[0])


def test_rows_swapped_among_noise() -> None:
    """As experts that flip make it in a half type, in more tokens than are swapped."""
    world = World("bfloat16")

    def spoil(number: int, states: torch.Tensor) -> torch.Tensor:
        if number == 5:
            states[[7, 8]] = states[[8, 7]]
        states[0] *= 1.1
        return states

    alone = world.served()
    report = world.findings(alone, edited(alone, spoil))
    assert causes(report) == dict.fromkeys(range(4), Cause.ROWS_SWAPPED)


def test_rows_one_token_off(world: World) -> None:
    rolled = edited(world.served(), lambda number, states: states.roll(1, 0))
    for with_truth in (True, False):
        report = world.findings(rolled, reference=with_truth)
        assert set(causes(report).values()) == {Cause.ROWS_SWAPPED}


def test_states_of_other_tokens(world32: World) -> None:
    alone = world32.served()
    mixed = [replace(one, token_ids=alone[2].asked) if one is alone[1] else one for one in alone]
    assert causes(world32.findings(mixed)) == {None: Cause.ROWS_SWAPPED}


def test_a_prefix_cache_that_shortens(world: World) -> None:
    alone = world.served()
    short = edited(alone, lambda number, states: states[8:])
    report = world.findings(alone, short)
    assert causes(report) == {None: Cause.PREFIX_CACHE}
    assert str(report.findings[0]) == "prefix cache on: 1 states for the 9 tokens of q0"


def test_a_prefix_cache_that_gives_stale_states(world: World) -> None:
    alone = world.served()
    torch.manual_seed(3)

    def stale(number: int, states: torch.Tensor) -> torch.Tensor:
        states[:8] = torch.randn(states[:8].shape)
        return states

    _, findings = compare_together(alone, edited(alone, stale), LAYERS, world.dtype)
    assert [finding.cause for finding in findings] == [Cause.PREFIX_CACHE] * 4


@pytest.mark.parametrize("reference", [True, False])
def test_another_verifier(world: World, reference: bool) -> None:
    other = new_model(9, world.dtype)
    report = world.findings(world.served(model=other), reference=reference)
    assert set(causes(report).values()) == {Cause.OTHER_VERIFIER}
    assert set(causes(report)) == ({0, 1, 2, 3} if reference else {3})


def test_a_verifier_of_another_size(world32: World) -> None:
    narrow = edited(world32.served(), lambda number, states: states[:, :, :16])
    assert causes(world32.findings(narrow)) == {None: Cause.OTHER_VERIFIER}


def test_calculated_in_another_dtype(world32: World) -> None:
    half = world32.served(model=new_model(0, "bfloat16"))
    assert causes(world32.findings(half)) == {None: Cause.WRONG_DTYPE}
    widened = edited(half, lambda number, states: states.float())
    assert causes(world32.findings(widened)) == {3: Cause.WRONG_DTYPE}
    # Widened before the last sum: every value is a true float32, and only the reference tells.
    nudged = edited(widened, lambda number, states: states * (1 + 1e-6 * torch.randn(states.shape)))
    report = world32.findings(nudged, [*nudged])
    assert set(causes(report).values()) == {Cause.WRONG_DTYPE}


def test_values_that_are_not_finite(world32: World) -> None:
    def spoil(number: int, states: torch.Tensor) -> torch.Tensor:
        states[2, 1, 3] = torch.inf
        return states

    assert causes(world32.findings(edited(world32.served(), spoil))) == {1: Cause.WRONG_DTYPE}


def test_a_norm_that_training_does_not_know(world32: World) -> None:
    """Gemma's and Qwen3.5's norm weighs by 1 + w."""
    model = new_model(0)
    model.model.norm.weight.data += 1
    alone = world32.served(model=model)
    report = parity.compare(alone, alone, None, world32.head, LAYERS, "float32")
    assert causes(report) == {3: Cause.OTHER_NORM}


# The verifier's files


@pytest.mark.parametrize("tied", [True, False])
def test_only_norm_and_head_are_read(tmp_path: Path, tied: bool) -> None:
    model = new_model(0, tied=tied)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = ("model.norm.weight", "model.embed_tokens.weight" if tied else "lm_head.weight")
    save_file({name: weights[name] for name in kept}, tmp_path / "model.safetensors")
    head = reference.load_head(str(tmp_path), trust_remote_code=False)
    assert torch.equal(head.norm, model.model.norm.weight)
    assert torch.equal(head.lm_head, model.lm_head.weight)
    assert head.eps == model.config.rms_norm_eps


def test_a_verifier_without_such_a_norm_is_an_error(tmp_path: Path) -> None:
    model = new_model(0)
    model.save_pretrained(tmp_path)
    save_file({"lm_head.weight": model.lm_head.weight.data}, tmp_path / "model.safetensors")
    with pytest.raises(VerifierError, match=r"no final RMSNorm \(model.norm.weight"):
        reference.load_head(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_transformers(tmp_path: Path, dtype: str) -> None:
    world = World(dtype)
    world.model.save_pretrained(tmp_path)
    found = reference.references(str(tmp_path), dtype, world.ids, trust_remote_code=False)
    for ours, true in zip(found, world.truth, strict=True):
        assert torch.equal(ours.layers, true[:, :-1])
        assert torch.equal(ours.normed, true[:, -1])


# Which sequences


def test_the_sequences_are_different_and_spread_over_the_lengths() -> None:
    lengths = [5, 5, 6, *range(10, 40), 1]
    rows = [{"sample_id": str(n), "seq_len": n, "input_ids": [7] * n} for n in lengths]
    chosen = parity.choose(Dataset.from_list(rows))
    found = [len(one.input_ids) for one in chosen]
    assert (len(chosen), found[0], found[-1]) == (8, 5, 39)
    assert found == sorted(set(found))
    assert parity.choose(Dataset.from_list(rows)) == chosen
    cut = parity.choose(Dataset.from_list(rows), longest=20)
    assert max(len(one.input_ids) for one in cut) == 20
    assert len({tuple(one.input_ids) for one in cut}) == len(cut) == 8
    few = parity.choose(Dataset.from_list(rows[:2]))
    assert [one.sample_id for one in few] == ["5"]
    with pytest.raises(DataError, match="no sequence of two tokens"):
        parity.choose(Dataset.from_list(rows[-1:]))


# Within extract


FOLDER = Path("data/hidden_states")
ROWS = [sequence(i, num_tokens=8 + i) for i in range(12)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StatesServer]:
    """A server of true states, in a project folder with twelve sequences."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "staging").mkdir()
    model = new_model(0)
    model.save_pretrained("models/verifier")
    write_params(tmp_path, extract={"layer_ids": LAYERS[:3]})
    write_verifier(tmp_path, weights=[], num_hidden_layers=NUM_LAYERS)
    write_sequences(tmp_path, ROWS)
    fake = StatesServer(tmp_path / "staging")
    fake.spoil = true_to(model, LAYERS)
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", fake.base_url)
    yield fake
    fake.close()


def true_to(model: Qwen3ForCausalLM, layers: list[int]) -> Callable[..., None]:
    one_at_a_time = threading.Lock()  # the server answers in threads, and hooks see all of them

    def answer_with(ids: list[int], answer: dict[str, Any], payload: Payload) -> None:
        with one_at_a_time:
            states, top1 = all_states(model, ids)
        payload["hidden_states"] = states[:, layers].contiguous()
        entries = [{str(token): {"rank": 1, "logprob": -0.1}} for token in top1.tolist()]
        answer["choices"][0]["prompt_logprobs"] = [None, *entries]

    return answer_with


def files() -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in FOLDER.iterdir()}


def test_extract_asks_the_gate_once(server: StatesServer) -> None:
    extract.main()
    assert len(server.asked) == 8 + 8 + len(ROWS)
    kept = json.loads((FOLDER / "parity.json").read_text())
    assert kept["settings"]["layer_ids"] == LAYERS
    assert kept["settings"]["vllm"] == ["0.32.0"]
    assert (kept["top1_agreement"], kept["together_max_error"]) == (1.0, 0.0)
    assert (len(kept["max_errors"]), kept["no_reference"]) == (4, None)
    metrics = json.loads(Path("reports/extract.json").read_text())
    assert metrics["parity"]["top1_agreement"] == 1.0
    assert metrics["parity"]["reference_max_error"] < 1e-5

    before, server.asked[:] = files(), []
    grow()
    extract.main()
    # Of a server that somebody named nobody knows if it is still what it was.
    assert len(server.asked) == 8 + 8 + 1
    assert files()["parity.json"] == before["parity.json"]
    server.close()
    extract.main()  # nothing to do


def test_of_a_server_of_our_own_the_gate_is_asked_once(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = replace(meet(server.base_url), process=subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(states_server, "states_endpoints", lambda *_: nullcontext([endpoint]))
    extract.main()
    server.asked.clear()
    grow()
    extract.main()
    assert len(server.asked) == 1
    assert endpoint.process
    endpoint.process.kill()


def grow() -> None:
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [*ROWS, sequence(20)])


@pytest.mark.parametrize("damage", ["", "{}", "[]", '{"settings": null}', '{"settings": {"a'])
def test_a_damaged_proof_is_none(server: StatesServer, damage: str) -> None:
    extract.main()
    before = (FOLDER / "parity.json").read_bytes()
    (FOLDER / "parity.json").write_text(damage)
    extract.main()  # nothing to ask, so nothing to prove
    assert json.loads(Path("reports/extract.json").read_text())["parity"] is None
    grow()
    extract.main()
    assert (FOLDER / "parity.json").read_bytes() == before


def test_other_settings_ask_the_gate_again(server: StatesServer) -> None:
    extract.main()
    server.asked.clear()
    write_params(Path(), extract={"layer_ids": [0, 1, 3]})
    server.spoil = true_to(new_model(0), [0, 1, 3, 5])
    extract.main()
    assert len(server.asked) == 8 + 8 + len(ROWS)
    assert json.loads((FOLDER / "parity.json").read_text())["settings"]["layer_ids"] == [0, 1, 3, 5]


def test_a_gate_that_fails_stores_nothing_and_keeps_what_is_there(server: StatesServer) -> None:
    extract.main()
    before, server.asked[:] = files(), []
    write_params(Path(), extract={"layer_ids": [0, 1, 3]})  # the server goes on with 1, 2, 4
    with pytest.raises(BadRun, match=r"nothing is extracted: slot 0 \(layer 0\): layers off by"):
        extract.main()
    assert files() == before
    assert len(server.asked) == 8 + 8
    with pytest.raises(BadRun):  # a failure is not remembered as passed
        extract.main()


def test_a_model_that_does_not_fit_is_judged_without_transformers(
    server: StatesServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "available_bytes", lambda: 10**9)
    extract.main()
    kept = json.loads((FOLDER / "parity.json").read_text())
    assert kept["max_errors"] is None
    assert kept["no_reference"] == "it needs 4 GB of memory, 1 are free"
    server.spoil = true_to(new_model(5), LAYERS)
    (FOLDER / "parity.json").unlink()
    shutil.rmtree("data/sequences")
    write_sequences(Path(), [*ROWS, sequence(20)])
    with pytest.raises(BadRun, match=r"slot 3 \(layer 5\): another verifier"):
        extract.main()


def test_one_wrong_server_of_two_is_enough(
    server: StatesServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = StatesServer(tmp_path / "staging")
    other.spoil = true_to(new_model(0), [0, 1, 3, 4])
    urls = f"{server.base_url},{other.base_url}"
    monkeypatch.setenv("PIPELINE_EXTRACT_ENDPOINTS", urls)
    with pytest.raises(BadRun, match="layers off by one"):
        extract.main()
    other.close()


def test_a_server_without_prompt_logprobs_is_an_error(server: StatesServer) -> None:
    server.spoil = None
    with pytest.raises(ServerError, match="gives no prompt_logprobs, which the gate needs"):
        extract.main()


def test_a_server_without_states_is_an_error(server: StatesServer) -> None:
    server.spoil = lambda ids, answer, payload: answer.pop("kv_transfer_params") and None
    with pytest.raises(ServerError, match=r"extract.endpoints needs vLLM's extract_hidden_states"):
        extract.main()


def test_make_parity_writes_nothing_and_says_what_is_stale(
    server: StatesServer, capsys: pytest.CaptureFixture[str]
) -> None:
    extract.main()
    before = files()
    Path("models/draft").mkdir()
    Path("models/draft/config.json").write_text('{"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}')
    capsys.readouterr()
    parity.main()
    said = capsys.readouterr().out
    assert "layers in data/hidden_states: [1, 2, 4, 5]\n" in said
    assert "layers in models/draft: [0, 1, 2, 5], of an earlier run" in said
    assert files() == before
    with pytest.raises(DataError, match=r"names layers \[0, 1, 2\], but extract.layer_ids is"):
        check_layer_ids(Path("models/draft"), LAYERS[:3])


# vLLM itself


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo verifier and sequences that fill vLLM's cache blocks, of 128 tokens on a CPU."""
    shutil.copytree(ROOT / "models/verifier", tmp_path / "models/verifier")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PIPELINE_EXTRACT_ENDPOINTS", raising=False)
    config = json.loads(Path("models/verifier/config.json").read_text())
    write_params(tmp_path, verifier={"max_model_len": 300}, extract={"layer_ids": [1, 2, 3]})
    sizes = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
    write_verifier(tmp_path, weights=[], **{name: config[name] for name in sizes})
    lengths = [5, 300, 17, 140, 129, 64, 260, 200]
    write_sequences(tmp_path, [sequence(i, num_tokens=n) for i, n in enumerate(lengths)])
    return tmp_path


@pytest.mark.server
def test_vllm_passes(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parity.main()
    assert "layers in params.yaml: [1, 2, 3, 4]" in capsys.readouterr().out


def served_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[str]], list[str]]) -> None:
    """Start the server with other arguments than extract's."""
    right = states_server.states_args
    monkeypatch.setattr(states_server, "states_args", lambda *given: change(right(*given)))


@pytest.mark.full
@pytest.mark.server
def test_vllm_in_bfloat16_passes(demo: Path) -> None:
    write_params(
        demo,
        verifier={"max_model_len": 300, "dtype": "bfloat16"},
        extract={"layer_ids": [1, 2, 3]},
    )
    parity.main()


@pytest.mark.full
@pytest.mark.server
@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            lambda args: [arg.replace("[1,2,3,4]", "[0,1,2,3]") for arg in args],
            "slot 0 (layer 1): layers off by one: holds the embeddings",
            id="layers shifted",
        ),
        pytest.param(
            lambda args: [arg.replace("--no-enable-prefix", "--enable-prefix") for arg in args],
            "prefix cache on",
            id="prefix cache",
        ),
    ],
)
def test_a_vllm_started_wrongly_is_found(
    demo: Path, monkeypatch: pytest.MonkeyPatch, change: Any, said: str
) -> None:
    served_with(monkeypatch, change)
    with pytest.raises(BadRun) as error:
        parity.main()
    assert said in str(error.value)


@pytest.mark.full
@pytest.mark.server
def test_a_vllm_with_other_weights_is_found(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same shape, with noise on some of them."""
    shutil.copytree("models/verifier", "models/other")
    path = Path("models/other/model.safetensors")
    torch.manual_seed(0)
    weights = {
        name: w + 0.5 * w.float().std() * torch.randn(w.shape) if "mlp" in name else w
        for name, w in load_file(path).items()
    }
    save_file({n: w.bfloat16() for n, w in weights.items()}, path, metadata={"format": "pt"})
    right = states_server.with_room
    monkeypatch.setattr(
        states_server,
        "with_room",
        lambda verifier: right(verifier).model_copy(update={"model": "models/other"}),
    )
    with pytest.raises(BadRun, match="another verifier"):
        parity.main()
