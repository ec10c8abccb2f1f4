"""The plan of a run: its arithmetic, what it refuses, and which stages it names."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.train.cli import create_transformer_layer_config

from pipeline import plan, room, states_server
from pipeline.estimate import (
    Disk,
    Figure,
    Measured,
    Place,
    beyond_gpus,
    bytes_on_disk,
    draft_parameters,
    fact,
    largest_cap,
    need,
    parameters_of_shape,
    quantities,
    refusals,
    seconds,
    servers,
    staging,
    state_bytes,
    trace_bytes_a_token,
    training_bytes,
    weights_a_gpu,
    with_cap,
    with_extract,
    written,
)
from pipeline.manifest import SequenceRecord, ShardEntry
from pipeline.params import Params, load_params
from pipeline.train import torchrun_command
from tests.conftest import ROOT

GB = 10**9
ALL = frozenset({"identify", "prompts", "generate", "reassemble", "extract", "train"})
ROOMY = Disk(10**16, None, "ext4")


@pytest.fixture(scope="module")
def kimi() -> Params:
    return load_params(ROOT / "profiles/kimi_k2_5.yaml")


@pytest.fixture(scope="module")
def laptop() -> Params:
    return load_params(ROOT / "profiles/laptop.yaml")


def with_facts(params: Params, **facts: Any) -> Params:
    sources = {**params.plan.facts_from, **dict.fromkeys(facts, "a test")}
    known = {name: why for name, why in sources.items() if facts.get(name, why) is not None}
    return params.model_copy(
        update={"plan": params.plan.model_copy(update={**facts, "facts_from": known})}
    )


def place(disk: Disk = ROOMY, **changed: Any) -> Place:
    return Place(ALL, {}, None, disk, 10**12)._replace(**changed)


# How much


def test_kimi_takes_57344_bytes_a_token_in_bfloat16(kimi: Params) -> None:
    # 7168 values x 2 bytes x 4 layers, and 8 of token id.
    assert state_bytes(kimi, 7168, 1, 1) == 57_344 + 8
    assert state_bytes(kimi, 7168, 1, 0) == 43_008 + 8  # of a prompt, without the last layer
    ten_thousand = state_bytes(kimi, 7168, 23_000_000, 23_000_000)
    assert ten_thousand == 23_000_000 * 57_352
    assert round(ten_thousand / 1e12, 1) == 1.3


def test_float8_is_half_of_it_and_a_byte_of_scale_a_row(kimi: Params) -> None:
    float8 = with_extract(kimi, dtype="float8_e4m3")
    assert state_bytes(float8, 7168, 1, 1) == 57_344 / 2 + 4 + 8


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_states_are_what_extract_foretells(kimi: Params, dtype: Any) -> None:
    records = [
        SequenceRecord(sample_id="s", key="k", ids_sha256="", num_tokens=100, num_last_states=80)
        for _ in range(3)
    ]
    entry = ShardEntry.model_construct(layer_ids=[1, 2, 3, 4], dtype=dtype, sequences=records)
    foretold = room.num_bytes(entry, 7168)
    ours = state_bytes(with_extract(kimi, dtype=dtype), 7168, 300, 240)
    assert 0 <= foretold - ours < 20_000  # the header


def test_quantities_of_the_laptop(laptop: Params) -> None:
    found = quantities(laptop, None)
    assert found.questions.value == found.requests.value == 464
    assert found.prompt_tokens.value == 464 * 32
    assert found.answer_tokens.value == 464 * 115
    assert found.tokens == Figure(464 * 147, "prompts + answers")
    assert found.training_tokens.value == pytest.approx(400 * 147)
    assert found.epochs.value == pytest.approx(320 * 640 / (400 * 147))
    takes = bytes_on_disk(laptop, found)
    assert takes["generate"].value == 464 * 147 * (4 + 1 + 4.5)  # ids up to 1023
    assert takes["reassemble"].value == 464 * 147 * 9 + 464 * 200
    assert takes["extract"].value == 464 * (256 * 4 * (3 * 147 + 115) + 8 * 147)


def test_each_process_takes_a_batch_of_its_own(kimi: Params) -> None:
    assert quantities(kimi, None).tokens_per_step == 8 * 10_240


def test_no_more_is_asked_than_there_is(laptop: Params) -> None:
    found = quantities(with_facts(laptop, num_questions=100), None)
    assert found.questions == Figure(100, "plan.num_questions: a test")
    assert found.training_tokens.value == pytest.approx(36 * 147)


def test_what_a_run_measured_comes_before_the_facts(laptop: Params) -> None:
    found = quantities(laptop, Measured(464, 464, 14_933, 53_527))
    assert found.tokens.value == pytest.approx(68_460)
    assert "reports/generate.json" in found.answer_tokens.source
    # Of all turns, as many a question as there were.
    all_turns = laptop.prompts.model_copy(update={"turns": "all"})
    every = laptop.model_copy(update={"prompts": all_turns})
    assert written(quantities(every, None).requests) == "≥ 464"
    assert written(quantities(every, None).tokens).startswith("≥ ")
    larger = with_cap(every, 864)
    assert quantities(larger, Measured(464, 928, 1000, 1000)).requests.value == 2 * 928


def test_what_is_unknown_is_no_number(kimi: Params) -> None:
    found = quantities(kimi, None)
    assert found.prompt_tokens.value is None
    assert written(found.prompt_tokens) == "unknown"
    assert written(found.tokens) == "≥ 23,588,800"  # 10,256 answers of 2,300
    assert written(bytes_on_disk(kimi, found)["extract"], lambda n: f"{n / 1e9:.0f}") == "≥ 1353"
    assert fact(kimi, "extract_tokens_per_s") == Figure(None, "plan.extract_tokens_per_s is null")
    assert written(seconds(found.tokens, fact(kimi, "extract_tokens_per_s"))) == "unknown"
    nothing = with_facts(kimi, generated_tokens=None, hidden_size=None, vocab_size=None)
    found = quantities(nothing, None)
    assert {written(figure) for figure in bytes_on_disk(nothing, found).values()} == {"unknown"}
    assert written(staging(nothing)) == "unknown"
    assert draft_parameters(nothing) is None
    assert refusals(nothing, place(Disk(1, None, "ext4"))) == []  # nobody knows


def test_streamed_states_take_nothing(kimi: Params) -> None:
    streamed = with_extract(kimi, mode="streamed")
    assert bytes_on_disk(streamed, quantities(streamed, None))["extract"].value == 0


def test_staging_is_what_the_server_calculates(kimi: Params) -> None:
    assert staging(kimi).value == 2 * 32 * 11_264 * (4 * 7168 * 2 + 8)


def test_trace_bytes() -> None:
    assert trace_bytes_a_token(163_840) == 6 + 1 + 4.5
    assert trace_bytes_a_token(1000) == 3 + 1 + 4.5  # the largest id is 999


# Memory


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_draft_has_the_parameters_of_speculators_own(num_layers: int) -> None:
    layers = create_transformer_layer_config(
        str(ROOT / "models/verifier"),
        num_layers=num_layers,
        draft_arch="llama",
        hidden_act=None,
        sliding_window=2048,
        full_attention_indices=list(range(num_layers)),
    )
    layers._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=512,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        norm_before_residual=True,
    )
    with torch.device("meta"):
        real = Eagle3DraftModel(config)
    trained = sum(one.numel() for one in real.parameters() if one.requires_grad)
    frozen = sum(one.numel() for one in real.parameters() if not one.requires_grad)
    ours = parameters_of_shape(256, 640, 1024, 512, num_layers, 4 * 64, 2 * 64)
    assert (ours.trained, ours.frozen) == (trained, frozen)


def test_the_draft_by_hand(laptop: Params) -> None:
    # The shapes in the model.safetensors of a draft: fc, q, k, v, o, MLP, four norms.
    trained = 256 * 768 + 512 * (256 + 128 + 128) + 256 * 256 + 3 * 256 * 640 + 4 * 256
    ours = parameters_of_shape(256, 640, 1024, 512, 1, 256, 128)
    assert ours.trained == trained == 1_016_832
    assert ours.saved == trained + (1024 + 512) * 256
    bound = draft_parameters(laptop)  # the two heads of keys and values are taken for four
    assert bound is not None
    assert bound.trained == trained + 2 * 512 * 128
    assert training_bytes(ours) == 16 * trained + 4 * (1024 * 256 + 2 * 512 * 256 + 256)


def test_weights_are_spread_as_server_args_say(kimi: Params) -> None:
    assert weights_a_gpu(kimi).value == 595 / 8
    assert servers(["-tp=2", "--pipeline_parallel_size", "2", "-dp", "2"])[:2] == (4, 2)
    assert servers([]) == (1, 1, 0.92)


# What is refused


def test_what_fits_is_not_refused(kimi: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert refusals(kimi, place()) == []
    assert refusals(load_params(ROOT / "profiles/laptop.yaml"), place()) == []


def test_states_beyond_the_disk_come_with_what_would_fit(kimi: Params) -> None:
    disk = Disk(2000 * GB, None, "ext4")  # 1,000 with their copies; 1,353 are needed
    [refused] = refusals(kimi, place(disk))
    assert "the outputs need ≥ 2,7" in refused
    assert "extract.dtype: float8_e4m3 (≥ 1,3" in refused
    assert "extract.mode: streamed with train.num_processes: 1" in refused
    assert "xfs or btrfs, which have reflinks" in refused
    # Prompts are unknown, so nobody can promise.
    assert refused.count(": may fit)") == 3
    with_prompts = with_facts(kimi, prompt_tokens=100.0)
    assert refusals(with_prompts, place(disk))[0].count(": fits)") == 3
    assert "a GPU kept back from the server" in refused
    cap = largest_cap(kimi, place(disk))
    assert f"at most {cap:,} would fit" in refused
    # By hand: a question costs its states, trace and sequence, twice.
    of_one = 2300 * (57_352 + 11.5 + 9) + 200
    fixed = need(with_cap(kimi, 1), place(disk))
    beside = (fixed.outputs.value or 0) - 257 * of_one
    by_hand = ((2000 * GB - fixed.unfinished) / 2 - beside) / of_one - 256
    assert cap == math.floor(by_hand)
    assert refusals(with_cap(kimi, cap), place(disk)) == []
    assert len(refusals(with_cap(kimi, cap + 1), place(disk))) == 1


def test_where_blocks_are_shared_the_cache_takes_nothing(kimi: Params) -> None:
    assert refusals(kimi, place(Disk(2000 * GB, None, "xfs"))) == []
    assert refusals(kimi, place(Disk(1450 * GB, 1450 * GB, "ext4"))) == []
    [refused] = refusals(kimi, place(Disk(1450 * GB, 50 * GB, "xfs")))  # nor across file systems
    assert "50.0 GB where DVC's cache is" in refused
    assert "reflinks" not in refused


def test_nothing_helps_and_it_says_so(kimi: Params) -> None:
    [refused] = refusals(kimi, place(Disk(GB, None, "ext4"), shared_memory=0))
    assert ": fits)" not in refused
    assert ": may fit)" not in refused
    assert "prompts.sample_cap" not in refused
    assert "a smaller extract.concurrency" in refused


def test_what_does_not_run_or_is_there_needs_no_room(kimi: Params) -> None:
    full = Disk(10 * GB, None, "ext4")
    assert refusals(kimi, place(full, runs=frozenset({"benchmark"}))) == []
    there = {"extract": 1360 * GB, "generate": GB}
    runs = frozenset({"generate", "extract"})
    assert refusals(kimi, place(full, runs=runs, there=there)) == []


def test_unknown_bytes_are_not_refused(kimi: Params) -> None:
    unknown = with_facts(kimi, generated_tokens=None)
    assert refusals(unknown, place(Disk(100 * GB, None, "ext4"))) == []


def test_weights_beyond_the_gpus(kimi: Params) -> None:
    [refused] = beyond_gpus(with_facts(kimi, gpu_memory_gb=80.0))
    assert "74.4 GB of each GPU, of whose 80 GB vLLM uses 73.6" in refused
    assert "16 such GPUs or more" in refused
    with_two = kimi.verifier.model_copy(update={"server_args": ["-tp", "2"]})
    [refused] = beyond_gpus(kimi.model_copy(update={"verifier": with_two}))
    assert "--tensor-parallel-size of 8 or more" in refused
    assert len(beyond_gpus(with_facts(kimi, num_gpus=4))) == 2  # and train.num_processes


def test_more_questions_than_there_are(laptop: Params) -> None:
    [refused] = refusals(with_cap(laptop, 5000), place())
    assert "what would fit: prompts.sample_cap: 3360" in refused
    assert refusals(with_cap(laptop, 3360), place()) == []


def test_no_questions_and_no_urls(
    laptop: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "prompts.urls names none" in refusals(laptop, place())[0]


# What is here


def test_the_file_system_is_that_of_the_deepest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\n/dev/b /data xfs rw 0 0\n/dev/c /data/my\\040disk btrfs rw 0 0"
    assert plan.file_system(Path("/home"), mounts) == "ext4"
    assert plan.file_system(Path("/data/x"), mounts) == "xfs"
    assert plan.file_system(Path("/database"), mounts) == "ext4"
    assert plan.file_system(Path("/data/my disk/x"), mounts) == "btrfs"


def test_throughput_of_the_last_run_only_for_what_it_ran(
    laptop: Params, kimi: Params, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    status = {"state": "done", "tokens_per_s": 7000.5}
    Path("logs/generate.status.json").write_text(json.dumps(status))
    Path("logs/extract.status.json").write_text(json.dumps({**status, "tokens_per_s": 0.0}))
    lock = {"identify": {"params": {"params.yaml": {"verifier.model": "models/verifier"}}}}
    assert plan.served_before(laptop, laptop, lock)
    assert not plan.served_before(laptop, laptop, {})
    assert not plan.served_before(kimi, laptop, lock)
    assert not plan.served_before(with_cap(laptop, 5), laptop, lock)
    rates = plan.throughput(laptop, True)
    assert rates["generate"] == Figure(7000.5, "logs/generate.status.json, the last run")
    assert rates["extract"].value == laptop.plan.extract_tokens_per_s  # that run asked nothing
    assert plan.throughput(laptop, False)["generate"].value == laptop.plan.generate_tokens_per_s
    assert plan.throughput(kimi, False)["generate"].value is None


STAGES = {
    "first": {
        "cmd": "cp source first",
        "params": ["a.b", "a.c"],
        "deps": ["source"],
        "outs": [{"first": {"persist": True}}],
    },
    "second": {"cmd": "cp first second", "deps": ["first"], "outs": ["second"]},
    "apart": {"cmd": "true", "params": ["a.d"]},
    "still": {"cmd": "false", "frozen": True},
}
VALUES = {"a": {"b": 1, "c": [1], "d": None}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": STAGES}, sort_keys=False))
    Path("params.yaml").write_text(yaml.safe_dump(VALUES))
    Path("source").write_text("1")
    dvc = [sys.executable, "-m", "dvc"]
    for command in (["git", "init", "-q"], [*dvc, "init", "-q"], [*dvc, "repro", "-q"]):
        subprocess.run(command, check=True)
    return tmp_path


def why(values: Any = VALUES) -> dict[str, list[str]]:
    stages, lock = plan.stages_in("dvc.yaml"), plan.stages_in("dvc.lock")
    return plan.stages_to_run(stages, lock, values, plan.dvc_status())


def test_which_stages_run_and_why(project: Path) -> None:
    assert why() == {}
    other = {"a": {"b": 2, "c": [1, 2], "d": None}}
    changed = ["a.b: 1 -> 2", "a.c: [1] -> [1, 2]"]
    assert why(other) == {"first": changed, "second": ["after first"]}
    # A profile's params count, and not those of the folder.
    Path("params.yaml").write_text(yaml.safe_dump(other))
    assert why() == {}
    Path("source").write_text("2")
    assert why() == {"first": ["source modified"], "second": ["after first"]}


def test_a_missing_output_runs_its_stage(project: Path) -> None:
    Path("second").unlink()
    assert why() == {"second": ["second deleted"]}


def test_a_changed_command_and_a_new_param(project: Path) -> None:
    stages = {**STAGES, "apart": {"cmd": "true", "params": ["a.d", "a.b"]}}
    stages["second"] = {**STAGES["second"], "cmd": "cp  first second"}
    Path("dvc.yaml").write_text(yaml.safe_dump({"stages": stages}, sort_keys=False))
    assert why() == {"second": ["changed command"], "apart": ["a.b: – -> 1"]}


def test_without_a_lock_all_stages_run(project: Path) -> None:
    Path("dvc.lock").unlink()
    found = why()
    assert list(found) == ["first", "second", "apart"]  # not the frozen one
    assert all("never ran: dvc.lock does not have it" in reasons for reasons in found.values())
    assert not any("modified" in reason for reason in found["apart"])


def test_what_stays_when_more_is_asked(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {
        "prompts": {"params": ["prompts.sample_cap", "prompts.seed"]},
        "generate": {"params": ["generate.top_k"]},
    }
    before = {"prompts": {"sample_cap": 4, "seed": 0}, "generate": {"top_k": 0}}
    lock = {
        "prompts": {"params": {"params.yaml": {"prompts.sample_cap": 4, "prompts.seed": 0}}},
        "generate": {"params": {"params.yaml": {"generate.top_k": 0}}},
    }
    Path("data/traces").mkdir(parents=True)
    Path("data/traces/part").write_text("12345")
    Path("reports").mkdir()
    Path("reports/prompts.json").write_text('{"train": 4, "held_out": 1}')
    report = {"rows_in": 5, "prompt_tokens": 50, "generated_tokens": 500}
    Path("reports/generate.json").write_text(json.dumps(report))

    def looked(values: Any, **status: list[Any]) -> Place:
        return plan.look_around(stages, lock, values, status, frozenset())

    assert looked(before).there == {"generate": 5}
    assert looked(before).measured == (5, 5, 50, 500)
    more = {**before, "prompts": {"sample_cap": 40, "seed": 0}}
    assert looked(more).there == {"generate": 5}
    assert looked(more).measured is None
    assert looked({**before, "prompts": {"sample_cap": 4, "seed": 1}}).there == {}
    assert looked({**before, "generate": {"top_k": 1}}).there == {}
    # Other questions under the same params: nothing of the old answers counts.
    others = looked(before, prompts=[{"changed deps": {"data/raw": "modified"}}])
    assert (others.there, others.measured) == ({}, None)
    code = looked(before, prompts=[{"changed deps": {"pipeline/prompts.py": "modified"}}])
    assert code.there == {"generate": 5}


def test_outside_of_dvc_it_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(plan.UserError, match="dvc status --json: ERROR: you are not inside"):
        plan.dvc_status()


# The commands


def commands_of(params: Params, here: Params, name: str) -> dict[str, str]:
    found = plan.commands(params, Path(f"profiles/{name}.yaml"), here, place())
    return {what.split()[0]: command for what, command in found}


def test_commands_of_a_profile(kimi: Params, laptop: Params) -> None:
    found = commands_of(kimi, laptop, "kimi_k2_5")
    assert list(found) == ["puts", "prints", "fetches", "all", "generate", "extract", "train"]
    assert found["puts"] == "make use PROFILE=kimi_k2_5"
    assert found["fetches"] == "make raw"
    assert found["train"].endswith(" ".join(torchrun_command(8)[1:]))
    for flags in (
        "vllm serve moonshotai/Kimi-K2.5 --dtype bfloat16 --max-model-len 11264 ",
        "--reasoning-parser kimi_k2 --trust-remote-code",
        "--tensor-parallel-size 8 --gpu-memory-utilization 0.92",
    ):
        assert flags in found["generate"]
    assert "--max-model-len 11265" in found["extract"]
    assert '"eagle_aux_hidden_state_layer_ids":[2,30,58,61]' in found["extract"]
    assert '"kv_connector": "ExampleHiddenStatesConnector"' in found["extract"]
    assert "cpu_connector" not in found["extract"]


def test_commands_of_the_folder_itself_on_a_cpu(laptop: Params) -> None:
    found = commands_of(laptop, laptop, "laptop")
    assert list(found) == ["all", "generate", "extract"]
    assert found["all"] == "make repro"
    assert found["generate"].startswith("VLLM_ENABLE_V1_MULTIPROCESSING=0 ")
    assert "--reasoning-parser qwen3" in found["generate"]
    assert '"kv_connector_module_path": "pipeline.cpu_connector"' in found["extract"]
    assert "/dev/shm/hidden-states" in found["extract"]
    on_disk = plan.states_command(laptop, place(shared_memory=0))
    assert "data/.staging/hidden-states" in on_disk
    unknown = with_facts(laptop, num_hidden_layers=None)
    assert plan.states_command(unknown, place()).startswith("unknown: ")


def test_named_servers_are_said_to_be_asked(
    laptop: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_GENERATE_ENDPOINTS", "http://there:8000/v1")
    whats = [what for what, _ in plan.server_commands(laptop, place())]
    assert whats[0] == "generate asks http://there:8000/v1, started like this"


@pytest.mark.parametrize(
    ("has_gpu", "connector"), [(True, plan.GPU_CONNECTOR), (False, plan.CPU_CONNECTOR)]
)
def test_the_connectors_are_those_of_the_states_server(
    has_gpu: bool, connector: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    assert states_server.connector() == connector


# On the screen


@pytest.mark.parametrize(("number", "words"), [(8.2, "8 s"), (600, "10 min"), (36_000, "10.0 h")])
def test_durations(number: float, words: str) -> None:
    assert plan.duration(number) == words


def printed(
    *arguments: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """What main() prints in this project, and the line it exits with."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["plan", *arguments])
    refused = ""
    try:
        plan.main()
    except SystemExit as end:
        refused = str(end)
    return " ".join(capsys.readouterr().out.split()), refused


def test_the_whole_plan_is_printed_before_it_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "disk_of", lambda *_: Disk(100 * GB, None, "ext4"))
    out, refused = printed("kimi_k2_5", capsys=capsys, monkeypatch=monkeypatch)
    assert 'verifier.model: "models/verifier" -> "moonshotai/Kimi-K2.5"' in out
    assert "tokens of prompts unknown plan.prompt_tokens is null" in out
    assert "generate unknown plan.generate_tokens_per_s is null" in out
    assert "make use PROFILE=kimi_k2_5" in out
    assert refused.startswith("plan: refused: the outputs need ≥ ")


def test_the_plan_of_the_folder_and_of_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, refused = printed("", capsys=capsys, monkeypatch=monkeypatch)  # as make calls it
    assert "Plan of params.yaml" in out
    assert refused == ""
    _, refused = printed("nobody", capsys=capsys, monkeypatch=monkeypatch)
    assert refused.startswith("plan: there is no nobody; name a profile: PROFILE=")


def test_nothing_to_do_is_said() -> None:
    assert "nothing to do" in str(plan.stages_table(["generate"], {}).caption)
