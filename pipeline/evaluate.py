"""Stage 7, evaluate: what the draft is worth on the held-out answers, offline and exact.

    python -m pipeline.evaluate

reads   models/draft, data/sequences/held_out, data/hidden_states, data/verifier.json
writes  reports/evaluate.json, data/acceptance/runs.parquet
params  evaluate.*, benchmark.num_draft_tokens, benchmark.prompt_lookup_*, extract.layer_ids,
        extract.mode, verifier.dtype

A greedy server with k draft tokens walks through an answer like this: its prefill yields the first
token for nothing; then each verification step drafts k tokens, keeps the leading ones that are
what the verifier writes (r of them, the accepted run) and adds the verifier's own next token. What
the verifier writes is known here, and a draft token matters only while all before it were right, so
speculators' teacher-forced forward pass gives the run at every token at once, and the walk is
arithmetic. Acceptance length is the tokens written per step, the last step of an answer cut at its
end: vLLM's own counter goes on counting there and comes out 1 or 2 % higher.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.train.recovery import SampleUnavailable
from torch.nn.functional import pad
from torch.utils.data import DataLoader

from pipeline.devices import ATTENTION_BLOCK, training_device
from pipeline.draft import check_layer_ids, load_draft, verifier_ids
from pipeline.errors import DataError
from pipeline.loading import StatesDataset
from pipeline.params import load_params
from pipeline.progress import progress_bar
from pipeline.records import DRAFT, SEQUENCES, Split
from pipeline.resume import atomic_path, write_json
from pipeline.sequences import load_split
from pipeline.stage import run_stage
from pipeline.streaming import open_states
from pipeline.verifier import load_verifier

HELD_OUT = SEQUENCES / Split.HELD_OUT
RUNS = Path("data/acceptance/runs.parquet")
METRICS_PATH = Path("reports/evaluate.json")
PHASES = ("reasoning", "answer")
NO_DRAFT = -1  # instead of a run: nothing was proposed
FIRST_TOKENS = 4  # of an answer, counted as the boundary


@dataclass(frozen=True)
class Answer:
    """One held-out answer with the draft's accepted runs.

    `runs[i]` belongs to token start + i: how many draft tokens proposed right after it are what the
    verifier wrote next, at most max_draft_tokens. The last token of the answer has none to follow.
    """

    sample_id: str
    source: str
    start: int  # of the generated tokens in the sequence
    reasoning_end: int  # the think-end; as answer_start where there is none
    answer_start: int  # first token after the think-end
    answer_end: int  # first token after the answer: the end of the turn, if it was not cut
    runs: np.ndarray  # [generated tokens - 1]

    def phase(self, position: int) -> str:
        """Of the first token that a step after `position` writes. Think tokens are reasoning."""
        return PHASES[position + 1 >= self.answer_start]


@dataclass(frozen=True)
class Step:
    """One verification step of a server."""

    context: int  # tokens before the first that it writes
    phase: str
    accepted: int  # draft tokens kept
    advanced: int  # tokens written: accepted + 1, but no more than there are
    drafted: bool  # n-gram speculation has nothing to propose at some steps


@torch.inference_mode()
def draft_runs(
    draft: Eagle3DraftModel, sample: dict[str, torch.Tensor], start: int, max_draft_tokens: int
) -> np.ndarray:
    """The accepted run after each generated token but the last, see Answer.runs.

    The draft sees token x[j+1] beside the verifier's states at j, in training as in vLLM's EAGLE-3
    proposer; from there it proposes x[j+2], x[j+3] …
    """
    token_ids, hidden_states = sample["input_ids"], sample["hidden_states"]  # [T], [T, 3H]
    device, dtype = draft.device, draft.dtype
    padding = -(len(token_ids) - 1) % ATTENTION_BLOCK  # P ≥ T - 1 with it
    proposed = draft(
        hidden_states=pad(hidden_states[:-1], (0, 0, 0, padding))[None].to(device, dtype),
        input_ids=pad(token_ids[1:], (0, padding))[None].to(device),  # [1, P]
        document_ids=pad(torch.zeros_like(token_ids[1:]), (0, padding), value=-1)[None].to(device),
        ttt_steps=max_draft_tokens,
    )  # max_draft_tokens × [1, P], draft ids
    written_ids = token_ids.numpy()
    num_runs = len(written_ids) - start - 1
    hits = np.zeros((num_runs, max_draft_tokens), dtype=bool)
    for step, draft_ids in enumerate(proposed):
        ids = verifier_ids(draft, draft_ids[0])
        # After token p the draft stands at j = p - 1; step s proposes x[p + 1 + s].
        written = written_ids[start + 1 + step :]
        hits[: len(written), step] = ids.cpu().numpy()[start - 1 :][: len(written)] == written
    return np.logical_and.accumulate(hits, axis=1).sum(axis=1)


def ngram_runs(
    tokens: list[int], start: int, max_draft_tokens: int, lookup_min: int, lookup_max: int
) -> np.ndarray:
    """The accepted run of vLLM's n-gram speculation after each generated token but the last.

    It looks for the last `lookup_max` … `lookup_min` tokens (the longest found counts) at their
    first earlier place in the text and proposes what followed there; NO_DRAFT where there is none.
    """
    first_end: dict[tuple[int, ...], int] = {}  # n-gram: where it first ends
    runs = np.full(len(tokens) - start - 1, NO_DRAFT)
    for last in range(len(tokens) - 1):
        sizes = range(min(lookup_max, last + 1), lookup_min - 1, -1)
        ngrams = [tuple(tokens[last + 1 - size : last + 1]) for size in sizes]
        if last >= start:
            found = next((first_end[ngram] for ngram in ngrams if ngram in first_end), None)
            if found is not None:
                proposed = tokens[found + 1 : min(found + 1 + max_draft_tokens, last + 1)]
                written = tokens[last + 1 : last + 1 + len(proposed)]
                same = [ours == theirs for ours, theirs in zip(proposed, written, strict=False)]
                runs[last - start] = [*same, False].index(False)
        for ngram in ngrams:
            first_end.setdefault(ngram, last)
    return runs


def walk(answer: Answer, num_draft_tokens: int) -> Iterator[Step]:
    """The steps of a server that drafts `num_draft_tokens`."""
    done = 0  # runs[done] is that of the last token written
    while done < len(answer.runs):
        drafted = answer.runs[done] != NO_DRAFT
        accepted = min(int(answer.runs[done]), num_draft_tokens) if drafted else 0
        left = len(answer.runs) - done
        advanced = min(accepted + 1, left)
        position = answer.start + done
        yield Step(position + 1, answer.phase(position), accepted, advanced, drafted)
        done += advanced


def acceptance_length(steps: Iterable[Step]) -> float | None:
    """Tokens per verification step, 1 … k + 1; None where there is no step."""
    advanced = [step.advanced for step in steps]
    return round(sum(advanced) / len(advanced), 4) if advanced else None


def by_position(steps: list[Step], num_draft_tokens: int) -> dict[str, Any]:
    """How often draft token 1 … k is accepted: of all steps, and of those that reach it."""
    kept = [sum(step.accepted >= k for step in steps) for k in range(num_draft_tokens + 1)]
    return {
        "joint": {
            str(k): round(kept[k] / kept[0], 4) if kept[0] else None
            for k in range(1, num_draft_tokens + 1)
        },
        "conditional": {
            str(k): round(kept[k] / kept[k - 1], 4) if kept[k - 1] else None
            for k in range(1, num_draft_tokens + 1)
        },
    }


def by_context(steps: list[Step], bounds: list[int]) -> dict[str, Any]:
    """Acceptance length by the number of tokens before a step: up to each bound, and above."""
    names = [*(f"to_{bound}" for bound in bounds), f"above_{bounds[-1]}"]
    bins: dict[str, list[Step]] = {name: [] for name in names}
    for step in steps:
        bins[names[int(np.searchsorted(bounds, step.context))]].append(step)
    return {
        name: {"acceptance_length": acceptance_length(inside), "steps": len(inside)}
        for name, inside in bins.items()
    }


def by_source(answers: list[Answer], num_draft_tokens: int) -> dict[str, Any]:
    """Acceptance length by where the question came from."""
    steps: dict[str, list[Step]] = {answer.source: [] for answer in answers}
    for answer in answers:
        steps[answer.source] += walk(answer, num_draft_tokens)
    return {
        source: {"acceptance_length": acceptance_length(inside), "steps": len(inside)}
        for source, inside in sorted(steps.items())
    }


def at_boundaries(answers: list[Answer]) -> dict[str, Any]:
    """How often the tokens between the phases are what the draft proposes right before them. They
    are few, so an acceptance length hides them, and a server that misses the think-end pays at
    each answer."""
    hits: dict[str, list[bool]] = {"think_end": [], "answer_begins": [], "end_of_turn": []}
    for answer in answers:
        first, stop = answer.start + 1, answer.start + 1 + len(answer.runs)  # drafted tokens
        for name, tokens in (
            ("think_end", range(answer.reasoning_end, answer.answer_start)),
            ("answer_begins", range(answer.answer_start, answer.answer_start + FIRST_TOKENS)),
            ("end_of_turn", range(answer.answer_end, answer.answer_end + 1)),
        ):
            hits[name] += [
                bool(answer.runs[token - first] > 0) for token in tokens if first <= token < stop
            ]
    return {
        name: {
            "accepted": round(sum(found) / len(found), 4) if found else None,
            "tokens": len(found),
        }
        for name, found in hits.items()
    }


def lengths(steps: list[Step]) -> dict[str, float | None]:
    phases = {p: acceptance_length(s for s in steps if s.phase == p) for p in PHASES}
    return {"overall": acceptance_length(steps), **phases}


def report(
    answers: list[Answer], num_draft_tokens: int, max_draft_tokens: int, bounds: list[int]
) -> dict[str, Any]:
    """reports/evaluate.json, less rows and n-gram. All but `by_num_draft_tokens` is for
    `num_draft_tokens`."""
    walks = {
        k: [step for answer in answers for step in walk(answer, k)]
        for k in sorted({*range(1, max_draft_tokens + 1), num_draft_tokens})
    }
    steps = walks[num_draft_tokens]
    return {
        "samples": len(answers),
        "tokens": sum(len(answer.runs) + 1 for answer in answers),
        "steps": len(steps),
        "num_draft_tokens": num_draft_tokens,
        "acceptance_length": lengths(steps),
        "acceptance": by_position(steps, num_draft_tokens),
        "by_context": by_context(steps, bounds),
        "by_source": by_source(answers, num_draft_tokens),
        "at_boundaries": at_boundaries(answers),
        "by_num_draft_tokens": {
            str(k): {"acceptance_length": lengths(steps), "steps": len(steps)}
            for k, steps in walks.items()
        },
    }


def save_runs(path: Path, answers: list[Answer]) -> None:
    """A row for every token after which a server could draft: what `inspect` and pandas read."""
    table = pa.table(
        {
            "sample_id": pa.array(
                [answer.sample_id for answer in answers for _ in answer.runs], pa.string()
            ),
            "position": pa.array(
                [answer.start + i for answer in answers for i in range(len(answer.runs))],
                pa.int32(),
            ),
            "phase": pa.array(
                [
                    answer.phase(answer.start + i)
                    for answer in answers
                    for i in range(len(answer.runs))
                ],
                pa.string(),
            ),
            "accepted_run": pa.array(
                [int(run) for answer in answers for run in answer.runs], pa.int16()
            ),
        }
    )
    with atomic_path(path) as temp:
        pq.write_table(table, temp)


def main() -> None:
    params, verifier = load_params(), load_verifier()
    device = training_device()
    num_draft_tokens = params.benchmark.num_draft_tokens
    max_draft_tokens = max(params.evaluate.max_draft_tokens, num_draft_tokens)
    rows = load_split(HELD_OUT)
    layer_ids = [*params.extract.layer_ids, verifier.num_hidden_layers]
    check_layer_ids(DRAFT, params.extract.layer_ids)
    draft = load_draft(DRAFT, getattr(torch, params.verifier.dtype), device)
    lookup = (params.benchmark.prompt_lookup_min, params.benchmark.prompt_lookup_max)
    answers, ngram_answers = [], []
    with open_states(params, verifier) as states:
        held_out = states.of(rows, layer_ids, verifier.weights_fingerprint)
        max_len = params.verifier.max_model_len  # nothing is cut
        samples = StatesDataset(HELD_OUT, held_out, states, max_len, draft.dtype)
        # collate_fn: nothing is padded or packed here.
        batches: Any = DataLoader(samples, params.extract.concurrency, collate_fn=list)
        with progress_bar("evaluating", len(held_out), "answers") as bar:
            for row, sample in zip(held_out, chain.from_iterable(batches), strict=True):
                bar.advance()
                if isinstance(sample, SampleUnavailable):
                    continue
                start = row["generated_start"]
                ends = (row["reasoning_end"], row["answer_start"], row["answer_end"])
                answer = partial(Answer, row["sample_id"], row["source"], start, *ends)
                answers.append(answer(draft_runs(draft, sample, start, max_draft_tokens)))
                runs = ngram_runs(row["input_ids"], start, num_draft_tokens, *lookup)
                ngram_answers.append(answer(runs))
        samples.check_fates()
    if not any(len(answer.runs) for answer in answers):
        raise DataError(f"{HELD_OUT}: no answer of two tokens or more, so nothing to draft")
    save_runs(RUNS, answers)
    found = report(answers, num_draft_tokens, max_draft_tokens, params.evaluate.context_bins)
    # As vLLM counts it: over the steps at which it proposes something.
    ngram_steps = [step for answer in ngram_answers for step in walk(answer, num_draft_tokens)]
    found["ngram_acceptance_length"] = lengths([step for step in ngram_steps if step.drafted])
    # rows_in = samples + rejected
    found["rows_in"] = len(rows)
    found["rejected"] = {"no_states": len(rows) - len(answers)}
    write_json(METRICS_PATH, found)
    print(f"acceptance length with {num_draft_tokens} draft tokens: {found['acceptance_length']}")


if __name__ == "__main__":
    run_stage("evaluate", main)
