"""The draft's vocabulary: the tokens it can propose, and how much of the data they cover.

    d2t.npy [draft_vocab_size] int64     verifier id of draft id i is i + d2t[i]
    t2d.npy [vocab_size] bool            whether a verifier id is in the draft vocabulary

The most frequent tokens of what is learnt in the training set, and always those that structure a
turn: think-start, think-end, the ends of a turn and BOS. The mapping itself is speculators'.
"""

import hashlib
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from datasets import Dataset
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from pipeline.errors import ParamsError
from pipeline.verifier import VerifierIdentity

PHASES = ("reasoning", "answer", "end")


def token_frequency(sequences: Dataset, vocab_size: int) -> np.ndarray:  # [vocab_size] int64
    """How often each token is learnt."""
    frequency = np.zeros(vocab_size, dtype=np.int64)
    for batch in sequences.data.to_batches():
        ids = batch["input_ids"].flatten().to_numpy()
        is_learnt = batch["loss_mask"].flatten().to_numpy() != 0
        frequency += np.bincount(ids[is_learnt], minlength=vocab_size)
    return frequency


def vocabulary_mapping(
    frequency: np.ndarray, draft_vocab_size: int, verifier: VerifierIdentity
) -> tuple[np.ndarray, np.ndarray]:
    """d2t and t2d, see the module. Raises what `check_size` does."""
    always = check_size(draft_vocab_size, verifier)
    wanted = {int(token): int(frequency[token]) for token in np.flatnonzero(frequency)}
    wanted |= dict.fromkeys(always, int(frequency.max()) + 1)
    d2t, t2d = build_vocab_mappings_from_distribution(wanted, draft_vocab_size, verifier.vocab_size)
    return d2t.numpy(), t2d.numpy()


def check_size(draft_vocab_size: int, verifier: VerifierIdentity) -> set[int]:
    """The tokens that are always in.

    Raises:
        ParamsError: draft_vocab_size has no room for them, or is larger than the verifier's
            vocabulary.
    """
    if draft_vocab_size > verifier.vocab_size:
        raise ParamsError(
            f"reassemble.draft_vocab_size is {draft_vocab_size}, more than the verifier's "
            f"{verifier.vocab_size}"
        )
    always = {verifier.think_start_id, verifier.think_end_id, *verifier.end_ids}
    if verifier.bos_id is not None:
        always.add(verifier.bos_id)
    if len(always) > draft_vocab_size:
        raise ParamsError(
            f"reassemble.draft_vocab_size {draft_vocab_size} has no room for the {len(always)} "
            "think, end and begin tokens"
        )
    return always


def coverage(sequences: Dataset, t2d: np.ndarray) -> dict[str, dict[str, int | float | None]]:
    """How many tokens of each phase the draft can propose at all. Think tokens are always in; the
    end is the end of the turn."""
    tokens, outside = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
    for ids, spans in _phases(sequences):
        for phase, span in zip(PHASES, spans, strict=True):
            is_known = t2d[ids[slice(*span)]]
            tokens[phase] += len(is_known)
            outside[phase] += int(np.count_nonzero(~is_known))
    return {
        phase: {
            "tokens": tokens[phase],
            "outside": outside[phase],
            "fraction": round(1 - outside[phase] / tokens[phase], 6) if tokens[phase] else None,
        }
        for phase in PHASES
    }


def save_vocabulary(folder: Path, d2t: np.ndarray, t2d: np.ndarray) -> None:
    np.save(folder / "d2t.npy", d2t)
    np.save(folder / "t2d.npy", t2d)


def vocabulary_sha256(d2t: np.ndarray) -> str:
    """The mapping's identity, which d2t alone determines: the checksum of d2t.npy."""
    file = BytesIO()
    np.save(file, d2t)
    return hashlib.sha256(file.getvalue()).hexdigest()


def _phases(sequences: Dataset) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    names = ("reasoning_start", "reasoning_end", "answer_start", "answer_end", "seq_len")
    columns = sequences.select_columns(["input_ids", *names]).with_format("numpy")
    for row in columns:
        begin, end, answer_start, answer_end, length = (int(row[name]) for name in names)
        yield row["input_ids"], [(begin, end), (answer_start, answer_end), (answer_end, length)]
