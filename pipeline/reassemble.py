"""Stage 4, reassemble: the exact token sequence of each answer, and what the draft may learn of it.

Reads    data/traces/part-*.jsonl, data/prompts/prompts.jsonl, data/verifier.json, the verifier's
         tokenizer and chat template; params `reassemble.*`, `family.*`, `generate.thinking`,
         `generate.thinking_switch`, `verifier.trust_remote_code`
Writes   data/sequences/train and data/sequences/held_out (`datasets` folders that speculators
         loads as they are, columns in records.SEQUENCE_COLUMNS), data/sequences/d2t.npy and
         t2d.npy (pipeline.vocabulary), data/sequences/rejected.jsonl (each row with its reason),
         data/sequences/disagreements.jsonl (answers whose text does not give their ids back),
         reports/reassemble.json
Run      python -m pipeline.reassemble

Rows go from disk to disk one by one (pipeline.assembly says what becomes of each), so that memory
does not grow with their number. On every run some answers are also rebuilt from their text and
compared: the metric `text_agreement` says what a data set without ids would be worth.
"""

from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from datasets import disable_progress_bars

from pipeline.agreement import TOKENS_COMPARED, Agreement, ComparisonSample
from pipeline.assembly import ABLATIONS, Assembler, load_assembler
from pipeline.errors import DataError
from pipeline.params import load_params
from pipeline.progress import progress_bar
from pipeline.records import (
    DISAGREEMENTS_PATH,
    PROMPTS_PATH,
    SEQUENCES,
    TRACES,
    TRAINABLE,
    Ablation,
    Prompt,
    Rejected,
    SequenceRejection,
    Split,
    Status,
    Trace,
    count_by,
    in_words,
    trace_problem,
    turn_id,
)
from pipeline.resume import atomic_path, jsonl, one_writer, read_jsonl, write_bytes, write_json
from pipeline.sequences import SequenceWriter, load_split
from pipeline.stage import run_stage
from pipeline.verifier import load_verifier
from pipeline.vocabulary import (
    check_size,
    coverage,
    save_vocabulary,
    token_frequency,
    vocabulary_mapping,
    vocabulary_sha256,
)

METRICS_PATH = Path("reports/reassemble.json")
REJECTED_PATH = SEQUENCES / "rejected.jsonl"


def main() -> None:
    disable_progress_bars()  # one bar is enough, and it is ours
    params, verifier = load_params(), load_verifier()
    check_size(params.reassemble.draft_vocab_size, verifier)
    assembler = load_assembler(params, verifier)
    tally, compared = Tally(verifier.think_end_id), ComparisonSample(TOKENS_COMPARED)
    with one_writer(SEQUENCES):
        write_sequences(assembler, tally, compared)
    train, held_out = (load_split(SEQUENCES / split) for split in (Split.TRAIN, Split.HELD_OUT))
    frequency = token_frequency(train, verifier.vocab_size)
    d2t, t2d = vocabulary_mapping(frequency, params.reassemble.draft_vocab_size, verifier)
    save_vocabulary(SEQUENCES, d2t, t2d)
    agreements, examples = compared.judge(assembler.rebuilder)
    write_bytes(DISAGREEMENTS_PATH, jsonl(examples))
    metrics = {
        "rows_in": tally.num_traces,
        "train": len(train),
        "held_out": len(held_out),
        **tally.metrics(),
        "held_out_vocabulary": coverage(held_out, t2d),
        "vocabulary_sha256": vocabulary_sha256(d2t),
        "text_agreement": agreements,
    }
    write_json(METRICS_PATH, metrics)
    say(metrics, ABLATIONS[params.reassemble.reasoning])


def write_sequences(assembler: Assembler, tally: "Tally", compared: ComparisonSample) -> None:
    """Both splits and what was rejected, row by row.

    Raises:
        DataError: a split is left without a row.
    """
    with (
        progress_bar("reassembling", num_prompts(), "questions") as bar,
        SequenceWriter(SEQUENCES / Split.TRAIN) as train,
        SequenceWriter(SEQUENCES / Split.HELD_OUT) as held_out,
        atomic_path(REJECTED_PATH) as path,
        path.open("wb") as rejected,
    ):
        writers = {Split.TRAIN: train, Split.HELD_OUT: held_out}
        for prompt, traces in prompts_and_traces():
            for trace in traces:
                compared.add(trace)
                try:
                    row = assembler.row(prompt, trace)
                    writers[Split(prompt["split"])].add(row)
                    tally.keep(row)
                except Rejected as rejection:
                    tally.reject(rejection)
                    lost = {"sample_id": trace["sample_id"], "reason": rejection.reason.value}
                    rejected.write(jsonl([lost]))
            bar.advance(1, f"{tally.num_rejected} rejected")
        for split, writer in writers.items():
            if not writer.num_rows:
                without_ids = tally.rejected[SequenceRejection.NO_TOKEN_IDS]
                raise DataError(
                    f"no {split} sequence is left of {tally.num_traces} traces; rejected: "
                    f"{in_words(tally.rejected)}"
                    + ("; reassemble.source: ids_else_text takes texts" if without_ids else "")
                )


def say(metrics: dict[str, Any], ablation: Ablation) -> None:
    rejected, agreements = metrics["rejected"], metrics["text_agreement"]
    print(
        f"{metrics['rows_in']} traces: {metrics['train']} sequences to train on, "
        f"{metrics['held_out']} held out, {sum(rejected.values())} rejected: {in_words(rejected)}; "
        f"{metrics['reasoning_tokens']['mean']} reasoning tokens a row"
        + ("" if ablation is Ablation.NONE else f"; an ablation: {ablation}")
    )
    cut = {phase: metrics[f"cut_in_{phase}"] for phase in ("reasoning", "answer")}
    if any(cut.values()):
        print(f"cut at reassemble.max_tokens: {in_words(cut)}")
    if metrics["rebuilt"]:
        print(f"{metrics['rebuilt']} of them rebuilt from text: perhaps not what was generated")
    if agreements["compared"]:
        print(
            f"of {agreements['compared']} compared, {agreements['share']:.1%} of the texts give "
            f"their ids back: {in_words({kind: agreements[kind] for kind in Agreement})}; stripped "
            f"of white space at their ends, {agreements['stripped_exact']}"
        )


class Tally:
    """Counts what became of each trace."""

    def __init__(self, think_end_id: int) -> None:
        self.rejected: Counter[str] = Counter()
        self._think_end_id = think_end_id
        self._kept: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._reasoning_tokens, self._answer_tokens = array("q"), array("q")

    @property
    def num_rejected(self) -> int:
        return self.rejected.total()

    @property
    def num_traces(self) -> int:
        return self._kept.total() + self.num_rejected

    def keep(self, row: dict[str, Any]) -> None:
        self._kept[row["status"]] += 1
        self._reasoning_tokens.append(row["reasoning_end"] - row["reasoning_start"])
        self._answer_tokens.append(row["answer_end"] - row["answer_start"])
        answer = row["input_ids"][row["answer_start"] : row["answer_end"]]
        self._counts.update(
            tokens=row["seq_len"],
            supervised_tokens=int(row["loss_mask"].sum()),
            rebuilt=row["rebuilt"],
            with_control_text=row["control_text"],
            ablated=row["ablation"] != Ablation.NONE,
            think_ends_in_answers=int(np.count_nonzero(answer == self._think_end_id)),
            cut_in_reasoning=row["cut_in"] == "reasoning",
            cut_in_answer=row["cut_in"] == "answer",
        )

    def reject(self, rejection: Rejected) -> None:
        self.rejected[rejection.reason.value] += 1

    def metrics(self) -> dict[str, Any]:
        reasons = [*SequenceRejection, *(s for s in Status if s not in TRAINABLE)]
        return {
            "rejected": {reason.value: self.rejected[reason.value] for reason in reasons},
            "kept_by_status": count_by(self._kept.elements(), Status),
            "reasoning_tokens": summary(self._reasoning_tokens),
            "answer_tokens": summary(self._answer_tokens),
            **self._counts,
        }


def num_prompts() -> int:
    return sum(1 for _ in read_jsonl(PROMPTS_PATH))


def prompts_and_traces() -> Iterator[tuple[Prompt, list[Trace]]]:
    """Each prompt with the traces of its turns, as `generate` leaves them: prompt by prompt,
    `_gen0`, `_gen1` … up to its last turn, or to the one that the conversation stopped at."""
    stored = (
        checked(row, f"{part}:{number}")
        for part in sorted(TRACES.glob("part-*.jsonl"))
        for number, row in enumerate(read_jsonl(part), start=1)
    )
    by_prompt = groupby(stored, key=lambda row: row["sample_id"].rpartition("_gen")[0])
    for prompt, group in zip_longest(read_jsonl(PROMPTS_PATH), by_prompt):
        traces = list(group[1]) if group else []
        found = [trace["sample_id"] for trace in traces]
        turns = range(1 + len(prompt["later_turns"])) if prompt else ()
        expected = [turn_id(prompt, turn) for turn in turns]  # type: ignore[arg-type]
        if not found or found != expected[: len(found)]:
            raise DataError(f"{TRACES} does not answer {PROMPTS_PATH}; `dvc repro generate` does")
        yield prompt, traces  # type: ignore[misc]  # TypedDicts as stored


def checked(row: Any, place: str) -> Trace:
    """
    Raises:
        DataError: it is no trace; generate writes none like it.
    """
    if problem := trace_problem(row):
        raise DataError(f"{place} is no trace: {problem}")
    trace: Trace = row
    return trace


def summary(tokens: "array[int]") -> dict[str, float]:
    values = np.asarray(tokens)
    p50, p95 = np.quantile(values, [0.5, 0.95])
    return {
        "mean": round(float(values.mean()), 1),
        "p50": round(float(p50), 1),
        "p95": round(float(p95), 1),
        "max": int(values.max()),
    }


if __name__ == "__main__":
    run_stage("reassemble", main)
