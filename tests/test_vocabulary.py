"""The draft's vocabulary: a mapping that others read as we do, and what it leaves out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ParamsError
from pipeline.sequences import SequenceWriter, load_split
from pipeline.verifier import VerifierIdentity
from pipeline.vocabulary import (
    coverage,
    save_vocabulary,
    token_frequency,
    vocabulary_mapping,
    vocabulary_sha256,
)
from tests.conftest import verifier_json

pytestmark = pytest.mark.timeout(120)  # the first import of speculators takes its time


def verifier_of(**changes: Any) -> VerifierIdentity:
    """A verifier of 8 tokens: 5 and 7 think, 2 ends a turn."""
    small = {"think_start_id": 5, "think_end_id": 7, "end_ids": [2], "vocab_size": 8}
    return VerifierIdentity.model_validate(verifier_json() | small | changes)


def mapping(
    frequency: dict[int, int], num: int, **changes: Any
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """d2t, t2d and the verifier's ids that the draft knows."""
    verifier = verifier_of(**changes)
    counts = np.zeros(verifier.vocab_size, dtype=np.int64)
    for token, count in frequency.items():
        counts[token] = count
    d2t, t2d = vocabulary_mapping(counts, num, verifier)
    return d2t, t2d, [index + offset for index, offset in enumerate(d2t.tolist())]


# the mapping


def test_the_mapping_is_offsets_and_a_mask():
    """Targets {0, 2, 5, 7} of 8: the known example d2t [0, 1, 3, 4]."""
    d2t, t2d, targets = mapping({0: 9, 2: 8, 5: 7, 7: 6, 1: 1}, 4)
    assert d2t.tolist() == [0, 1, 3, 4]
    assert t2d.astype(int).tolist() == [1, 0, 1, 0, 0, 1, 0, 1]
    assert targets == [0, 2, 5, 7]
    assert d2t.dtype == "int64"
    assert t2d.dtype == "bool"


@pytest.mark.parametrize(
    "frequency",
    [
        {},
        {0: 100, 1: 90, 3: 80, 4: 70, 6: 60},  # think and end tokens never seen
        {0: 1, 1: 1, 3: 1, 4: 1, 6: 1},
        {5: 1},
        dict.fromkeys(range(8), 3),
    ],
)
@pytest.mark.parametrize("num", [3, 4, 6, 8])
def test_think_and_end_tokens_are_always_in_and_the_size_is_exact(frequency, num):
    _, t2d, targets = mapping(frequency, num)
    assert len(targets) == num
    assert targets == sorted(set(targets))
    assert np.flatnonzero(t2d).tolist() == targets
    assert {2, 5, 7} <= set(targets) <= set(range(8))


@settings(deadline=None)
@given(
    frequency=st.dictionaries(st.integers(0, 39), st.integers(1, 10**12), max_size=40),
    num=st.integers(5, 40),
)
def test_the_mapping_is_one_to_one_whatever_is_frequent(frequency, num):
    markers = {"think_start_id": 38, "think_end_id": 39, "end_ids": [17, 21], "bos_id": 0}
    d2t, t2d, targets = mapping(frequency, num, **markers, vocab_size=40)
    assert len(d2t) == t2d.sum() == num
    assert t2d.shape == (40,)
    assert targets == sorted(set(targets))
    assert np.flatnonzero(t2d).tolist() == targets
    assert {38, 39, 17, 21, 0} <= set(targets)
    # Whoever is left out is no more frequent than any that came in by its frequency.
    chosen = set(targets) - {38, 39, 17, 21, 0}
    left_out = set(range(40)) - set(targets)
    least = min((frequency.get(token, 0) for token in chosen), default=np.inf)
    assert all(frequency.get(token, 0) <= least for token in left_out)


def test_the_most_frequent_tokens_get_the_places_that_are_left():
    assert mapping({0: 1, 1: 5, 3: 9, 4: 7, 6: 2}, 5)[2] == [2, 3, 4, 5, 7]


def test_a_begin_token_is_always_in_where_there_is_one():
    assert mapping({0: 9, 1: 8, 3: 7}, 5, bos_id=6)[2] == [0, 2, 5, 6, 7]
    assert mapping({0: 9, 1: 8, 3: 7}, 5, bos_id=None)[2] == [0, 1, 2, 5, 7]


def test_every_end_token_is_always_in():
    assert mapping({0: 9, 1: 8, 3: 7}, 5, end_ids=[2, 6])[2] == [0, 2, 5, 6, 7]


def test_the_whole_vocabulary_maps_onto_itself():
    d2t, t2d, targets = mapping({3: 1}, 8)
    assert targets == list(range(8))
    assert not d2t.any()
    assert t2d.all()


@pytest.mark.parametrize(
    ("num", "changes"), [(2, {}), (3, {"bos_id": 0}), (3, {"end_ids": [2, 6]})]
)
def test_a_draft_vocabulary_too_small_for_the_markers_is_refused(num, changes):
    with pytest.raises(ParamsError, match=rf"reassemble\.draft_vocab_size {num} has no room"):
        mapping({}, num, **changes)


def test_a_draft_vocabulary_larger_than_the_verifiers_is_refused():
    with pytest.raises(ParamsError, match="is 9, more than the verifier's 8"):
        mapping({}, 9)


# what is counted


@pytest.fixture
def written(tmp_path):
    """`written(rows)`: (input_ids, loss_mask, spans) as a split on disk."""

    def write(rows: list[tuple[list[int], list[int], tuple[int, int, int, int]]]) -> Dataset:
        with SequenceWriter(tmp_path / "train") as writer:
            for index, (ids, mask, spans) in enumerate(rows):
                names = ("reasoning_start", "reasoning_end", "answer_start", "answer_end")
                writer.add(
                    {
                        "input_ids": np.array(ids, dtype=np.int64),
                        "loss_mask": np.array(mask, dtype=np.int8),
                        "seq_len": len(ids),
                        "sample_id": f"q{index}_gen0",
                        "key": "k",
                        "prompt_index": index,
                        "source": "test",
                        "status": "ok",
                        "generated_start": 1,
                        **dict(zip(names, spans, strict=True)),
                        "rebuilt": False,
                        "control_text": False,
                        "cut_in": "none",
                        "ablation": "none",
                    }
                )
        return load_split(tmp_path / "train")

    return write


# The question 4, then think-start, reasoning, think-end, answer, end of turn.
ROWS = [
    ([4, 5, 0, 0, 1, 7, 3, 3, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1], (2, 5, 6, 8)),
    ([4, 5, 6, 7, 0, 2], [0, 1, 1, 1, 1, 1], (2, 3, 4, 5)),
    ([4, 5, 0, 6], [0, 1, 1, 1], (2, 4, 4, 4)),  # cut in the reasoning
]


def test_the_frequency_is_that_of_learnt_tokens(written):
    #                                            id: 0  1  2  3  4  5  6  7
    assert token_frequency(written(ROWS), 8).tolist() == [4, 1, 2, 2, 0, 3, 2, 2]


def test_a_token_that_is_not_learnt_does_not_count(written):
    ids, _, spans = ROWS[0]
    rows = [(ids, [0, 0, 0, 0, 0, 1, 1, 1, 1], spans)]
    assert token_frequency(written(rows), 10).tolist() == [0, 0, 1, 2, 0, 0, 0, 1, 0, 0]


def test_the_frequency_is_taken_over_all_batches(written, monkeypatch):
    monkeypatch.setattr("pipeline.sequences.ROWS_A_BATCH", 2)
    found = written(ROWS * 3)
    assert len(found.data.to_batches()) == 5
    assert token_frequency(found, 8).tolist() == [12, 3, 6, 6, 0, 9, 6, 6]


def test_the_coverage_is_told_by_phase(written):
    """Reasoning 0 0 1, 6 and 0 6; answers 3 3 and 0; the draft knows 0, 2, 5, 7."""
    t2d = np.isin(np.arange(8), [0, 2, 5, 7])
    assert coverage(written(ROWS), t2d) == {
        "reasoning": {"tokens": 6, "outside": 3, "fraction": 0.5},
        "answer": {"tokens": 3, "outside": 2, "fraction": 0.333333},
        "end": {"tokens": 2, "outside": 0, "fraction": 1.0},
    }


def test_of_what_is_not_there_nothing_is_said(written):
    found = coverage(written([ROWS[2]]), np.zeros(8, dtype=bool))
    assert found["reasoning"] == {"tokens": 2, "outside": 2, "fraction": 0.0}
    assert found["answer"] == found["end"] == {"tokens": 0, "outside": 0, "fraction": None}


def test_a_vocabulary_that_knows_all_covers_all(written):
    found = coverage(written(ROWS), np.ones(8, dtype=bool))
    assert [found[phase]["fraction"] for phase in ("reasoning", "answer", "end")] == [1.0] * 3


# on disk


def saved(folder: Path, frequency: dict[int, int], num: int = 5, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    d2t, t2d, _ = mapping(frequency, num, **changes)
    save_vocabulary(folder, d2t, t2d)
    return vocabulary_sha256(d2t)


def test_what_is_saved_is_loaded(tmp_path):
    saved(tmp_path, {0: 9}, 4)
    assert np.load(tmp_path / "d2t.npy").tolist() == [0, 1, 3, 4]
    assert np.load(tmp_path / "t2d.npy").tolist() == [1, 0, 1, 0, 0, 1, 0, 1]


def test_the_hash_changes_with_the_mapping_alone(tmp_path):
    first = saved(tmp_path / "a", {0: 9, 1: 8})
    assert len(first) == 64
    assert saved(tmp_path / "b", {0: 90, 1: 80, 3: 70}) == first  # the same places
    assert saved(tmp_path / "b", {0: 9, 3: 8}) != first
    assert saved(tmp_path / "b", {0: 9, 1: 8}, 6) != first
    assert saved(tmp_path / "b", {0: 9, 1: 8}, bos_id=6) != first
    assert saved(tmp_path / "b", {0: 9, 1: 8}) == first
