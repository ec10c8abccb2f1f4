"""The sequences of the real run: how many there are, what speculators makes of them and of text."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_from_disk
from speculators.train.data import ArrowDataset
from transformers import AutoTokenizer

from pipeline.params import load_params
from pipeline.server import serve
from pipeline.shards import HiddenStates, ShardTransfer
from tests.e2e.conftest import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


def report(project: Project) -> Any:
    return json.loads((project.root / "reports/reassemble.json").read_text())


def sequences(project: Project, split: str) -> Dataset:
    return load_from_disk(str(project.root / "data/sequences" / split)).with_format(None)


def test_of_a_hundred_answers_99_are_kept_and_each_other_has_its_reason(finished: Project) -> None:
    found = report(finished)
    assert found["train"] + found["held_out"] >= 0.99 * found["rows_in"]
    lines = (finished.root / "data/sequences/rejected.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in lines]
    counted = {reason: n for reason, n in found["rejected"].items() if n}
    assert counted == {reason: reasons.count(reason) for reason in set(reasons)}
    assert found["rows_in"] == found["train"] + found["held_out"] + len(reasons)


def test_of_a_hundred_texts_95_give_their_ids_back_and_each_other_has_its_kind(
    finished: Project,
) -> None:
    found = report(finished)["text_agreement"]
    kinds = {kind: found[kind] for kind in ("exact", "whitespace", "retokenized", "other")}
    assert sum(kinds.values()) == found["compared"] > 400
    assert kinds["exact"] >= 0.95 * found["compared"]
    lines = (finished.root / "data/sequences/disagreements.jsonl").read_text().splitlines()
    shown = Counter(json.loads(line)["kind"] for line in lines)
    assert shown == {kind: min(n, 10) for kind, n in kinds.items() if n and kind != "exact"}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_speculators_loads_the_folder_as_it_is(finished: Project, split: str) -> None:
    ours = sequences(finished, split)
    states = HiddenStates(finished.root / "data/hidden_states")
    theirs = ArrowDataset(
        2048,
        finished.root / "data/sequences" / split,
        transfer=ShardTransfer(states, list(ours["key"])),
        on_missing="raise",
    )
    assert len(theirs) == len(ours) == report(finished)[split]
    for number in (0, len(ours) - 1):
        sample = theirs[number]
        assert sample["input_ids"].tolist() == ours[number]["input_ids"]
        assert sample["loss_mask"].tolist() == ours[number]["loss_mask"]


@pytest.mark.server
def test_speculators_makes_the_same_of_the_text(
    finished: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way renders the finished turn with the chat template. That is right where the template
    keeps the reasoning under the name `reasoning_content` (case B3), the newlines are those the
    verifier writes, and the tokenizer gives the ids back (case B10); else the text is the same."""
    monkeypatch.chdir(finished.root)
    tokenizer = AutoTokenizer.from_pretrained("models/verifier")
    [newline] = tokenizer.encode("\n")
    ours = sequences(finished, "train")
    traces = {trace["sample_id"]: trace for trace in finished.traces()}
    rows = [as_conversation(traces[sample_id]) for sample_id in ours["sample_id"]]
    source = tmp_path / "conversations.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with serve(load_params().verifier, "prepare", ["--enable-scale-out"]) as endpoint:
        finished.run(
            *("speculators", "prepare-data", "--model", "models/verifier", "--seq-length", "1024"),
            *("--data", str(source), "--output", str(tmp_path / "theirs")),
            *("--num-preprocessing-workers", "1"),
            *("--render-endpoint", endpoint.base_url.removesuffix("/v1")),
        )
    made = load_from_disk(str(tmp_path / "theirs")).with_format(None)
    theirs = {tuple(row["input_ids"]): row["loss_mask"] for row in made}
    texts = {tokenizer.decode(row["input_ids"]) for row in made}
    assert len(theirs) == len(ours)
    num_same = 0
    for row in ours:
        ids = (*row["input_ids"], newline)
        if ids in theirs:
            assert theirs[ids] == [*row["loss_mask"], 1]
            num_same += 1
        else:
            assert tokenizer.decode(ids) in texts
    assert num_same >= 0.95 * len(ours)


def as_conversation(trace: dict[str, Any]) -> dict[str, Any]:
    answer = {
        "role": "assistant",
        "reasoning_content": trace["reasoning"],
        "content": trace["content"],
    }
    return {"conversations": [*trace["messages"], answer]}
