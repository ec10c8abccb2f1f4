"""Stage 4, reassemble: the exact token sequence of each answer, and what the draft may learn of it.

Reads    data/traces/part-*.jsonl, data/prompts/prompts.jsonl, data/verifier.json;
         params `reassemble.*`, `generate.thinking`
Writes   data/sequences/train and data/sequences/held_out (`datasets` folders that speculators
         loads as they are, columns in records.SEQUENCE_COLUMNS), data/sequences/d2t.npy and
         t2d.npy (draft vocabulary), data/sequences/rejected.jsonl, reports/reassemble.json
Run      python -m pipeline.reassemble

A sequence is the server's own prompt ids followed by its own generated ids: no chat template ever
renders a finished turn and nothing is tokenized again. What breaks an invariant is rejected with
its reason; nothing is repaired. Each turn of a conversation is a sequence of its own.
"""

import hashlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from datasets.table import InMemoryTable
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

from pipeline.errors import DataError, ParamsError
from pipeline.params import Reassemble, load_params
from pipeline.progress import progress_bar
from pipeline.reasoning import Spans, is_prefilled, spans_of
from pipeline.records import (
    PROMPTS_PATH,
    SEQUENCE_COLUMNS,
    SEQUENCES,
    TRACES,
    TRUNCATED,
    Prompt,
    Rejected,
    SequenceRejection,
    Split,
    Status,
    Trace,
    count_by,
    in_words,
    turn_id,
)
from pipeline.resume import jsonl, read_jsonl, write_bytes, write_json
from pipeline.stage import run_stage
from pipeline.verifier import VerifierIdentity, load_verifier

METRICS_PATH = Path("reports/reassemble.json")
TRAINABLE = TRUNCATED | {Status.OK}


def main() -> None:
    disable_progress_bars()  # one bar is enough, and it is ours
    params = load_params()
    verifier = load_verifier()
    if params.reassemble.draft_vocab_size > verifier.vocab_size:
        raise ParamsError(
            f"reassemble.draft_vocab_size is {params.reassemble.draft_vocab_size}, more than the "
            f"verifier's {verifier.vocab_size}"
        )
    rows: dict[str, list[dict[str, Any]]] = {split: [] for split in Split}
    rejected: list[dict[str, Any]] = []
    num_traces, thinking = 0, params.generate.thinking
    with progress_bar("reassembling", num_prompts(), "questions") as bar:
        for prompt, traces in prompts_and_traces():
            num_traces += len(traces)
            for trace in traces:
                try:
                    row = sequence_of(prompt, trace, verifier, params.reassemble, thinking=thinking)
                    rows[prompt["split"]].append(row)
                except Rejected as rejection:
                    reason = rejection.reason.value
                    rejected.append({"sample_id": trace["sample_id"], "reason": reason})
            bar.advance(1, f"{len(rejected)} rejected")
    for split in Split:
        if not rows[split]:
            raise DataError(
                f"no {split} sequence is left of {num_traces} traces; rejected: "
                f"{in_words(Counter(row['reason'] for row in rejected))}"
            )
    frequency = token_frequency(rows[Split.TRAIN])
    d2t, t2d = vocabulary_mapping(frequency, params.reassemble.draft_vocab_size, verifier)
    for split in Split:
        save_dataset(rows[split], SEQUENCES / split)
    np.save(SEQUENCES / "d2t.npy", d2t)
    np.save(SEQUENCES / "t2d.npy", t2d)
    write_bytes(SEQUENCES / "rejected.jsonl", jsonl(rejected))
    metrics = metrics_of(rows, rejected, num_traces, t2d)
    write_json(METRICS_PATH, metrics)
    print(
        f"{num_traces} traces: {metrics['train']} sequences to train on, {metrics['held_out']} "
        f"held out, {len(rejected)} rejected: {in_words(metrics['rejected'])}; "
        f"{metrics['reasoning_tokens']['mean']} reasoning tokens a row"
    )


def num_prompts() -> int:
    return sum(1 for _ in read_jsonl(PROMPTS_PATH))


def prompts_and_traces() -> Iterator[tuple[Prompt, list[Trace]]]:
    """Each prompt with the traces of its turns, as `generate` leaves them: prompt by prompt,
    `_gen0`, `_gen1` … up to its last turn, or to the one that the conversation stopped at."""
    stored = (row for part in sorted(TRACES.glob("part-*.jsonl")) for row in read_jsonl(part))
    by_prompt = groupby(stored, key=lambda row: row["sample_id"].rpartition("_gen")[0])
    for prompt, group in zip_longest(read_jsonl(PROMPTS_PATH), by_prompt):
        traces = list(group[1]) if group else []
        found = [trace["sample_id"] for trace in traces]
        turns = range(1 + len(prompt["later_turns"])) if prompt else ()
        expected = [turn_id(prompt, turn) for turn in turns]  # type: ignore[arg-type]
        if not found or found != expected[: len(found)]:
            raise DataError(f"{TRACES} does not answer {PROMPTS_PATH}; `dvc repro generate` does")
        yield prompt, traces  # type: ignore[misc]  # TypedDicts as stored


def sequence_of(
    prompt: Prompt,
    trace: Trace,
    verifier: VerifierIdentity,
    params: Reassemble,
    *,
    thinking: bool,
) -> dict[str, Any]:
    """One row of data/sequences.

    Raises:
        Rejected: the status is not for training, or the ids break an invariant.
    """
    status = Status(trace["status"])
    if status not in TRAINABLE:
        raise Rejected(status)
    prompt_ids, token_ids = trace["prompt_token_ids"], trace["token_ids"]
    if not prompt_ids and not token_ids:
        raise Rejected(SequenceRejection.NO_TOKEN_IDS)
    if status in TRUNCATED and params.truncated == "drop":
        raise Rejected(SequenceRejection.TRUNCATED)
    spans = spans_of(prompt_ids, token_ids, verifier)
    check_ids(trace, status, spans, verifier, thinking=thinking)
    length = len(prompt_ids) + len(token_ids)
    # Without a think block (thinking off) the reasoning is the empty range before the answer.
    answer = spans.answer or (length, length)
    reasoning = spans.reasoning or (answer[0], answer[0])
    row = {
        "input_ids": [*prompt_ids, *token_ids],
        "loss_mask": [0] * len(prompt_ids) + [1] * len(token_ids),
        "seq_len": length,
        "sample_id": trace["sample_id"],
        "key": trace["key"],
        "prompt_index": prompt["index"],
        "source": prompt["source"],
        "status": status.value,
        "reasoning_start": reasoning[0],
        "reasoning_end": reasoning[1],
        "answer_start": answer[0],
        "answer_end": answer[1],
    }
    assert tuple(row) == SEQUENCE_COLUMNS
    return row


def check_ids(
    trace: Trace, status: Status, spans: Spans, verifier: VerifierIdentity, *, thinking: bool
) -> None:
    """The invariants of a generated turn, on ids alone.

    Raises:
        Rejected: with the invariant that does not hold.
    """
    token_ids = trace["token_ids"]
    num_starts = token_ids.count(verifier.think_start_id)
    num_starts += is_prefilled(trace["prompt_token_ids"], verifier)
    if thinking and num_starts != 1:
        raise Rejected(SequenceRejection.THINK_START)
    if thinking and (spans.answer is None) != (status is Status.TRUNCATED_IN_REASONING):
        raise Rejected(SequenceRejection.THINK_END)
    if status is Status.OK and (spans.answer is None or spans.answer[0] == spans.answer[1]):
        raise Rejected(SequenceRejection.NO_ANSWER)
    if spans.ends_turn != (trace["finish_reason"] == "stop"):
        raise Rejected(SequenceRejection.END_OF_TURN)
    inside = token_ids[:-1] if spans.ends_turn else token_ids
    if not {*verifier.control_ids, *verifier.end_ids}.isdisjoint(inside):
        raise Rejected(SequenceRejection.CONTROL_TOKEN)
    billed = (trace["usage"].get("prompt_tokens"), trace["usage"].get("completion_tokens"))
    if billed != (len(trace["prompt_token_ids"]), len(token_ids)):
        raise Rejected(SequenceRejection.USAGE)


def token_frequency(rows: Iterable[dict[str, Any]]) -> Counter[int]:
    """How often each token is supervised in the training set."""
    frequency: Counter[int] = Counter()
    for row in rows:
        first = row["loss_mask"].index(1)  # the mask is 0 on the prompt, 1 on all after it
        frequency.update(row["input_ids"][first:])
    return frequency


def vocabulary_mapping(
    frequency: Counter[int], draft_vocab_size: int, verifier: VerifierIdentity
) -> tuple[np.ndarray, np.ndarray]:
    """speculators' mapping of the most frequent tokens, think and end tokens always among them.

    Returns:
        d2t [draft_vocab_size] int64: verifier id of draft id i is i + d2t[i];
        t2d [vocab_size] bool: whether a verifier id is in the draft vocabulary.

    Raises:
        ParamsError: draft_vocab_size is too small even for the think and end tokens.
    """
    always = {verifier.think_start_id, verifier.think_end_id, *verifier.end_ids}
    if len(always) > draft_vocab_size:
        raise ParamsError(
            f"reassemble.draft_vocab_size {draft_vocab_size} has no room for the "
            f"{len(always)} think and end tokens"
        )
    above_all = max(frequency.values(), default=0) + 1
    wanted = {**frequency, **dict.fromkeys(always, above_all)}
    d2t, t2d = build_vocab_mappings_from_distribution(wanted, draft_vocab_size, verifier.vocab_size)
    return d2t.numpy(), t2d.numpy()


def save_dataset(rows: list[dict[str, Any]], folder: Path) -> None:
    """Write `rows` as a `datasets` folder whose bytes depend on the rows alone.

    `datasets` puts a random fingerprint into state.json unless it is given one.
    """
    table = pa.Table.from_pylist(rows)
    digest = hashlib.sha256()
    for batch in table.to_batches():
        digest.update(batch.serialize())
    fingerprint = digest.hexdigest()[:16]
    temp = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temp, ignore_errors=True)
    Dataset(InMemoryTable(table), fingerprint=fingerprint).save_to_disk(str(temp))
    shutil.rmtree(folder, ignore_errors=True)
    temp.rename(folder)


def metrics_of(
    rows: dict[str, list[dict[str, Any]]],
    rejected: list[dict[str, Any]],
    num_traces: int,
    t2d: np.ndarray,
) -> dict[str, Any]:
    table = pd.DataFrame([row for split in Split for row in rows[split]])
    reasoning = table["reasoning_end"] - table["reasoning_start"]
    answer = table["answer_end"] - table["answer_start"]
    reasons = [*SequenceRejection, *(s for s in Status if s not in TRAINABLE)]
    found = Counter(row["reason"] for row in rejected)
    return {
        "rows_in": num_traces,
        **{split.value: len(rows[split]) for split in Split},
        "rejected": {reason.value: found[reason.value] for reason in reasons},
        "kept_by_status": count_by(table["status"], Status),
        "tokens": int(table["seq_len"].sum()),
        "supervised_tokens": int(sum(sum(mask) for mask in table["loss_mask"])),
        "reasoning_tokens": summary(reasoning),
        "answer_tokens": summary(answer),
        "held_out_tokens_outside_draft_vocabulary": outside_vocabulary(rows[Split.HELD_OUT], t2d),
    }


def summary(tokens: "pd.Series[int]") -> dict[str, float]:
    return {
        "mean": round(float(tokens.mean()), 1),
        "p50": round(float(tokens.quantile(0.5)), 1),
        "p95": round(float(tokens.quantile(0.95)), 1),
        "max": int(tokens.max()),
    }


def outside_vocabulary(rows: list[dict[str, Any]], t2d: np.ndarray) -> dict[str, int]:
    """Held-out tokens that the draft can never propose, by phase."""
    missing = {"reasoning": 0, "answer": 0}
    for row in rows:
        known = t2d[row["input_ids"]]  # [seq_len] bool
        for phase in missing:
            span = known[row[f"{phase}_start"] : row[f"{phase}_end"]]
            missing[phase] += int(np.count_nonzero(~span))
    return missing


if __name__ == "__main__":
    run_stage("reassemble", main)
