"""The whole pipeline for real: vLLM, speculators and DVC, with the params that ship."""

import json
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from pipeline.resume import read_jsonl
from pipeline.sequences import load_split
from tests.e2e.conftest import (
    ROOT,
    Project,
    Run,
    clone_of_the_working_tree,
    ctrl_c,
    kill_dvc,
    kill_the_stage,
    terminate_dvc,
)
from tests.test_probe import AS_VLLM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

AFTER_IDENTIFY = ["generate", "reassemble", "extract", "train", "evaluate", "benchmark"]


def report(project: Project, stage: str) -> Any:
    return json.loads((project.root / f"reports/{stage}.json").read_text())


def test_the_draft_is_worth_serving(finished: Project) -> None:
    served = report(finished, "benchmark")
    assert served["num_draft_tokens"] == 3
    assert served["acceptance_length"]["draft"] > served["acceptance_length"]["ngram"]
    assert served["lossless_fraction"] == 1.0


def test_every_mode_is_measured(finished: Project) -> None:
    """The draft has seen the verifier thinking. Sampled, it is worth about as much as greedy."""
    served = report(finished, "benchmark")
    modes = served["by_mode"]
    assert list(modes) == sorted(modes)
    assert {(mode["thinking"], mode["temperature"]) for mode in modes.values()} == {
        *((True, 0.0), (True, 0.6), (False, 0.0), (False, 0.6))
    }
    for mode in [served, *modes.values()]:
        assert served["num_prompts"] == mode["num_answered"] + sum(mode["rejected"].values())
    lengths = {name: mode["acceptance_length"]["draft"] for name, mode in modes.items()}
    assert lengths["thinking_sampled_0_6"] == pytest.approx(lengths["thinking_greedy"], rel=0.15)
    answers = modes["thinking_sampled_0_6"]["tokens_per_answer"]
    assert answers["draft"] == pytest.approx(answers["plain"], rel=0.25)


def test_the_draft_is_as_good_as_it_was(finished: Project) -> None:
    """The floor: the lowest of the five drafts that `python -m experiments.recipe` made of the
    recipe that ships, less 5 %."""
    table = pd.read_csv(ROOT / "reports/experiments.csv")
    ours = table[(table["experiment"] == "recipe") & (table["arm"] == "ours")]
    assert len(ours) == 5
    floor = 0.95 * ours["acceptance_length"].min()
    assert report(finished, "evaluate")["acceptance_length"]["overall"] >= floor


def test_offline_acceptance_agrees_with_serving(finished: Project) -> None:
    """Within 3 %, of the same questions. The served number is vLLM's own, which counts what is
    drafted beyond the end of an answer."""
    served = report(finished, "benchmark")
    rows = read_jsonl(finished.root / "data/prompts/prompts.jsonl")
    held_out = [row["sample_id"] for row in rows if row["split"] == "held_out"]
    asked = set(held_out[: served["num_prompts"]])
    runs = pd.read_parquet(finished.root / "data/acceptance/runs.parquet")
    tokens = steps = 0
    for sample_id, answer in runs.groupby("sample_id"):
        accepted, done = answer["accepted_run"].tolist(), 0
        while sample_id in asked and done < len(accepted):
            done += min(accepted[done], served["num_draft_tokens"]) + 1
            steps += 1
        tokens += min(done, len(accepted))
    assert tokens == served["generated_tokens"] - served["num_answered"]
    assert tokens / steps == pytest.approx(served["acceptance_length"]["draft"], rel=0.03)


@pytest.mark.full
def test_a_draft_that_guesses_at_random_is_worth_nothing_and_harms_nothing(copy: Project) -> None:
    """Its head has the rows of other tokens; served by vLLM and judged by the same code."""
    path = copy.root / "models/draft/model.safetensors"
    weights = load_file(path)
    order = torch.randperm(len(weights["lm_head.weight"]), generator=torch.manual_seed(0))
    weights["lm_head.weight"] = weights["lm_head.weight"][order].contiguous()
    save_file(weights, path)
    copy.run("python", "-m", "pipeline.benchmark")
    served = report(copy, "benchmark")
    assert 1.0 <= served["acceptance_length"]["draft"] < 1.1
    assert served["lossless_fraction"] == 1.0


def test_every_row_is_accounted_for(finished: Project) -> None:
    num_lines = len((finished.root / "data/raw/questions.jsonl").read_bytes().splitlines())
    prompts, generate = report(finished, "prompts"), report(finished, "generate")
    reassemble, extract = report(finished, "reassemble"), report(finished, "extract")
    asked = prompts["train"] + prompts["held_out"]
    assert asked + prompts["beyond_cap"] + sum(prompts["rejected"].values()) == num_lines
    assert sum(generate["status"].values()) == generate["rows_in"] == asked
    kept = reassemble["train"] + reassemble["held_out"]
    assert kept + sum(reassemble["rejected"].values()) == asked
    assert extract["rows_in"] == kept


def test_sequences_are_what_the_verifier_wrote(finished: Project) -> None:
    """Decoded with the verifier's own tokenizer, it reads as think block and answer."""
    tokenizer = AutoTokenizer.from_pretrained(finished.root / "models/verifier")
    by_id = {trace["sample_id"]: trace for trace in finished.traces()}
    rows = load_split(finished.root / "data/sequences/train")
    for row in rows:
        trace = by_id[row["sample_id"]]
        generated = row["input_ids"][-sum(row["loss_mask"]) :]
        assert generated == trace["token_ids"]
        if row["status"] == "ok":
            text = tokenizer.decode(generated)
            block = f"<think>{trace['reasoning']}</think>{trace['content']}<|im_end|>"
            assert text.split() == block.split()
            assert tokenizer.decode(
                row["input_ids"][row["reasoning_start"] : row["reasoning_end"]]
            ).strip()


def test_the_probe_finds_what_is_true_of_the_shipped_verifier(finished: Project) -> None:
    """Its template opens no think block, and its think tokens are added tokens that stay visible
    (`"special": false` in its tokenizer.json)."""
    [found] = json.loads((finished.root / "data/traces/probe.json").read_text())
    # What the unit tests say of their fake, said of the real one.
    assert found == AS_VLLM | {"server_version": version("vllm").partition("+")[0]}


def test_nothing_to_do_is_said_and_nothing_is_run(finished: Project) -> None:
    again = finished.run("dvc", "repro").stdout
    assert "Data and pipelines are up to date." in again
    assert "Data and pipelines are up to date." in finished.run("dvc", "status").stdout


def test_every_output_of_a_stage_is_declared(finished: Project) -> None:
    """What lies in data, models and reports is in git, an output of dvc.yaml, or hidden by name:
    locks, and what a stage needs to go on."""
    stages = yaml.safe_load((finished.root / "dvc.yaml").read_text())["stages"].values()
    declared = {
        next(iter(out)) if isinstance(out, dict) else out
        for stage in stages
        for kind in ("outs", "metrics", "plots")
        for out in stage.get(kind, [])
    }
    listing = ("git", "ls-files", "--others", "--directory", "data", "models", "reports")
    left = {path.removesuffix("/") for path in finished.run(*listing).stdout.splitlines()}
    assert {path for path in left - declared if not Path(path).name.startswith(".")} == set()
    changed = {line[3:] for line in finished.run("git", "status", "--short").stdout.splitlines()}
    assert changed - declared - {"dvc.lock"} == set()


def test_the_summary_ends_with_the_line_that_serves_the_draft(finished: Project) -> None:
    last = finished.run("python", "-m", "pipeline.summary").stdout.splitlines()[-1]
    assert " vllm serve models/verifier " in last
    assert '"model":"models/draft"' in last


def test_no_path_of_the_machine_is_in_the_draft(finished: Project) -> None:
    for file in (finished.root / "models/draft").iterdir():
        assert str(finished.root).encode() not in file.read_bytes(), file


def test_evaluate_params_rerun_evaluate_alone(copy: Project) -> None:
    copy.set_params(evaluate__context_bins=[100, 200])
    assert copy.repro() == ["evaluate"]


def test_concurrency_reruns_generate_without_one_request_and_nothing_after_it(
    copy: Project,
) -> None:
    (copy.root / "logs/vllm-generate.log").unlink()
    before = copy.traces()
    copy.set_params(generate__concurrency=63)
    assert copy.repro() == ["generate"]
    assert not (copy.root / "logs/vllm-generate.log").exists(), "a server was started"
    assert copy.traces() == before


def test_think_tokens_rerun_identify_and_all_after_it_without_asking(copy: Project) -> None:
    """With another single token as think-end, which no verifier closes its reasoning with."""
    (copy.root / "logs/vllm-generate.log").unlink()
    end_id = AutoTokenizer.from_pretrained(copy.root / "models/verifier").convert_tokens_to_ids(
        "<|endoftext|>"
    )
    copy.set_params(
        think__end="<|endoftext|>",
        think__end_id=end_id,
        generate__gate__min_reasoning_fraction=0.0,
    )
    assert copy.repro("generate") == ["identify", "generate"]
    assert not (copy.root / "logs/vllm-generate.log").exists(), "a server was started"
    assert {trace["status"] for trace in copy.traces()} & {"ok"} == set()
    assert set(AFTER_IDENTIFY[1:]) <= copy.stale()


def test_a_retrained_verifier_reruns_everything_after_identify(copy: Project) -> None:
    weights = copy.root / "models/verifier/model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 1.01
    save_file(tensors, weights, metadata={"format": "pt"})
    assert copy.repro("identify") == ["identify"]
    assert set(AFTER_IDENTIFY) <= copy.stale()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"prompts__sample_capp": 3}, "unknown key prompts.sample_capp"),
        ({"generate__concurrency": "many"}, "generate.concurrency"),
        ({"think__end": "</thinking>"}, "no single token"),
        ({"think__end_id": 17}, "think.end_id is 17"),
    ],
)
def test_wrong_params_get_one_clear_line(copy: Project, edit: dict[str, Any], said: str) -> None:
    copy.set_params(**edit)
    failed = copy.run("python", "-m", "pipeline.identify", check=False)
    assert failed.returncode == 1
    assert said in failed.stdout.splitlines()[-1]
    assert "Traceback" not in failed.stdout


def test_a_missing_params_file_gets_one_clear_line(copy: Project) -> None:
    (copy.root / "params.yaml").unlink()
    failed = copy.run("python", "-m", "pipeline.identify", check=False)
    assert failed.returncode == 1
    assert "params.yaml: No such file or directory" in failed.stdout.splitlines()[-1]


@pytest.fixture
def interrupted(tmp_path: Path) -> Project:
    return clone_of_the_working_tree(tmp_path)


@pytest.mark.parametrize(
    "end",
    [
        ctrl_c,
        pytest.param(kill_dvc, marks=pytest.mark.full),
        pytest.param(terminate_dvc, marks=pytest.mark.full),
        pytest.param(kill_the_stage, marks=pytest.mark.full),
    ],
)
def test_an_end_at_any_moment_leaves_no_process_and_the_next_run_goes_on(
    interrupted: Project, end: Callable[[Run], None]
) -> None:
    project = interrupted
    journal = project.root / "data/traces/journal.jsonl"
    dvc = subprocess.Popen(
        ["dvc", "repro", "generate"],
        cwd=project.root,
        env=project.env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 40):
        assert dvc.poll() is None, "the run ended before it could be interrupted"
        time.sleep(0.05)
    end(dvc)
    dvc.wait()
    assert project.processes_left() == []
    kept = [json.loads(line) for line in journal.read_bytes().split(b"\n")[:-1]]
    assert len(kept) >= 40
    assert project.repro("generate") == ["generate"]
    finished = {trace["key"]: trace for trace in project.traces()}
    assert len(finished) == 464
    assert [finished[trace["key"]] for trace in kept] == kept
