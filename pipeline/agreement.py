"""Do the texts of answers give their token ids back? Measured on every run.

    sample = ComparisonSample(TOKENS_COMPARED)
    sample.add(trace)                                    every answer goes by
    counts, examples = sample.judge(rebuilder)           some are rebuilt from text and compared

What agrees is what a data set without ids would be worth (`reassemble.source: text`).
"""

import heapq
from collections import Counter
from enum import StrEnum
from itertools import zip_longest
from typing import Any

from pipeline.progress import progress_bar
from pipeline.reasoning import has_ids
from pipeline.rebuild import Rebuilder, Tokens, decoded
from pipeline.records import TRAINABLE, Rejected, Trace, count_by

TOKENS_COMPARED = 200_000  # enough for a share within one or two per cent, in about a second
EXAMPLES_A_KIND = 10


class Agreement(StrEnum):
    """How an answer rebuilt from its text compares with its token ids."""

    EXACT = "exact"
    WHITESPACE = "whitespace"  # the same but for white space
    RETOKENIZED = "retokenized"  # the same text in other tokens
    OTHER = "other"  # another text, or one that says nothing sure


def stripped(trace: Trace) -> Trace:
    """As a server gives the texts that strips them: the family must put the white space back."""
    reasoning, content = trace.get("reasoning") or "", trace.get("content") or ""
    return {**trace, "reasoning": reasoning.strip(), "content": content.strip()}


class ComparisonSample:
    """The answers to compare: those with the smallest keys, up to so many tokens. A key is a hash,
    so the choice is random and the same on every run."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = self._num_seen = 0
        self._largest_first: list[tuple[int, int, Trace]] = []
        self._bound: int | None = None  # the rank of the last one that had no room

    def add(self, trace: Trace) -> None:
        if trace["status"] not in TRAINABLE or not has_ids(trace):
            return
        rank = -int.from_bytes(trace["key"].encode()[:16], "big")
        if self._bound is not None and rank <= self._bound:
            return
        self._num_seen += 1  # so that no two entries are compared by their traces
        heapq.heappush(self._largest_first, (rank, self._num_seen, trace))
        self._num_tokens += num_tokens(trace)
        while self._num_tokens > self._max_tokens and len(self._largest_first) > 1:
            self._bound, _, left_out = heapq.heappop(self._largest_first)
            self._num_tokens -= num_tokens(left_out)

    def judge(self, rebuilder: Rebuilder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """How many agree, by kind, and examples of those that do not. `stripped_exact` are those
        that agree too when the family must put in the white space next to the markers."""
        counts: Counter[Agreement] = Counter()
        stripped_exact = 0
        examples: list[dict[str, Any]] = []
        with progress_bar("comparing with text", len(self._largest_first), "answers") as bar:
            for _, _, trace in sorted(self._largest_first, key=lambda entry: -entry[0]):
                kind, example = compare(trace, rebuilder)
                counts[kind] += 1
                stripped_exact += gives_ids_back(stripped(trace), rebuilder)
                if example and counts[kind] <= EXAMPLES_A_KIND:
                    examples.append(example)
                bar.advance()
        total = counts.total()
        shares = {
            "compared": total,
            "share": round(counts[Agreement.EXACT] / total, 4) if total else None,
            "stripped_exact": stripped_exact,
        }
        return {**shares, **count_by(counts.elements(), Agreement)}, examples


def num_tokens(trace: Trace) -> int:
    return len(trace["prompt_token_ids"]) + len(trace["token_ids"])


def gives_ids_back(trace: Trace, rebuilder: Rebuilder) -> bool:
    try:
        return rebuilder.rebuild(trace) == generated_of(trace)
    except Rejected:
        return False


def generated_of(trace: Trace) -> Tokens:
    return Tokens(trace["prompt_token_ids"], trace["token_ids"])


def compare(trace: Trace, rebuilder: Rebuilder) -> tuple[Agreement, dict[str, Any] | None]:
    """The kind of agreement, and unless it is exact where the two part."""
    generated = generated_of(trace)
    try:
        rebuilt = rebuilder.rebuild(trace)
    except Rejected as rejection:
        kind, reason = Agreement.OTHER, rejection.reason.value
        return kind, {"sample_id": trace["sample_id"], "kind": kind.value, "reason": reason}
    kind = agreement(generated, rebuilt, rebuilder.tokenizer)
    if kind is Agreement.EXACT:
        return kind, None
    ours, theirs = ([*tokens.prompt_ids, *tokens.token_ids] for tokens in (generated, rebuilt))
    # Where only the border between prompt and turn differs, it is that.
    border = min(len(generated.prompt_ids), len(rebuilt.prompt_ids))
    pairs = enumerate(zip_longest(ours, theirs))
    position = next((index for index, (our, their) in pairs if our != their), border)
    shown = slice(max(position - 4, 0), position + 8)
    return kind, {
        "sample_id": trace["sample_id"],
        "kind": kind.value,
        "position": position,
        "generated": ours[shown],
        "rebuilt": theirs[shown],
    }


def agreement(generated: Tokens, rebuilt: Tokens, tokenizer: Any) -> Agreement:
    if rebuilt == generated:
        return Agreement.EXACT
    ids = [[*tokens.prompt_ids, *tokens.token_ids] for tokens in (generated, rebuilt)]
    texts = [decoded(tokenizer, some) for some in ids]
    if texts[0] == texts[1] and ids[0] != ids[1]:
        return Agreement.RETOKENIZED
    without_space = ["".join(text.split()) for text in texts]
    same = texts[0] != texts[1] and without_space[0] == without_space[1]
    return Agreement.WHITESPACE if same else Agreement.OTHER
