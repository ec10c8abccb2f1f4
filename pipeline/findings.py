"""What is wrong with hidden states, and the likely cause. Nothing here asks a server.

    states that a server gave ─┬─ check_payload       shape, tokens, dtype
                               ├─ compare_reference   with transformers' states of every layer
                               ├─ compare_top1        with the server's own likeliest tokens
                               └─ compare_together    asked all at once with asked one by one

Each returns what it measured and a list of findings, empty when all is well. The error of a token
is |ours − theirs| / |theirs| over the hidden size: the few huge values that large models have in
some channel of their first token hide nothing of the other tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import torch

MIN_TOP1_AGREEMENT = 0.99
VOCABULARY_CHUNK = 16384  # rows of lm_head at a time, for the memory's sake
ROWS_LOOKED_FOR = 64  # rows of which the true owner is looked for
WILD = 0.5  # an error that no rounding explains
# What agreement of the top-1 is left when the last layer is missing, and when rounding differs.
# A guess that decides between causes, never whether the gate passes.
SAME_MODEL, ROUNDED = 0.3, 0.95


class Tolerance(NamedTuple):
    error: float  # of a token
    outside: float  # fraction of tokens that may be beyond it (experts flip at near ties)


# By verifier.dtype. A residual stream is rounded after every layer, so halves drift.
TOLERANCES = {
    "float32": Tolerance(1e-4, 0.0),
    "float16": Tolerance(1e-2, 0.01),
    "bfloat16": Tolerance(5e-2, 0.01),
}
LOOSEST = max(tolerance.error for tolerance in TOLERANCES.values())


class Cause(StrEnum):
    OFF_BY_ONE = "layers off by one"
    OTHER_LAYER = "another layer"
    WRONG_ORDER = "layers in the wrong order"
    FINAL_NORM = "the final norm is applied already"
    OTHER_NORM = "the verifier's final norm is no plain RMSNorm"
    ROWS_SWAPPED = "rows swapped"
    WRONG_DTYPE = "wrong dtype"
    PREFIX_CACHE = "prefix cache on"
    OTHER_VERIFIER = "another verifier"
    UNKNOWN = "cause unknown"


class Finding(NamedTuple):
    cause: Cause
    detail: str
    slot: int | None = None  # place in the list of layers; None: not of one slot alone
    layer: int | None = None

    def __str__(self) -> str:
        where = "" if self.slot is None else f"slot {self.slot} (layer {self.layer}): "
        return f"{where}{self.cause.value}: {self.detail}"


@dataclass(frozen=True)
class Captured:
    """What a server gave for one sequence."""

    sample_id: str
    asked: torch.Tensor  # [T]
    token_ids: torch.Tensor  # [T], as the server wrote them beside the states
    hidden_states: torch.Tensor  # [T, L, H]
    top1: torch.Tensor | None = None  # [T - 1], the likeliest token after each but the last


class Reference(NamedTuple):
    """transformers' states of the first R tokens of a sequence."""

    layers: torch.Tensor  # [R, n + 1, H]: 0 = embeddings, k = after layer k; n before the norm
    normed: torch.Tensor  # [R, H], after the final norm


class Head(NamedTuple):
    """The two weights that turn the last state into a token."""

    norm: torch.Tensor  # [H]
    eps: float
    lm_head: torch.Tensor  # [V, H]

    def normed(self, states: torch.Tensor, offset: float = 0.0) -> torch.Tensor:  # both [T, H]
        """RMSNorm as Llama, Qwen3 and DeepSeek have it; Gemma's weighs by 1 + w (`offset`)."""
        wide = states.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (unit * (offset + self.norm.float())).to(states.dtype)


class TokenErrors(NamedTuple):
    """Errors of the tokens of one slot, boiled down."""

    largest: float
    outside: float  # fraction beyond the tolerance
    ok: bool


def token_errors(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """[…, H] twice → […]."""
    theirs = theirs.float()
    return (ours.float() - theirs).norm(dim=-1) / theirs.norm(dim=-1).clamp_min(1e-12)


def judge(errors: torch.Tensor, dtype: str) -> TokenErrors:  # [N]
    tolerance = TOLERANCES[dtype]
    outside = float((errors > tolerance.error).float().mean())
    largest = float(errors.max())
    return TokenErrors(largest, outside, outside <= tolerance.outside and largest <= WILD)


# One payload by itself


def check_payload(
    captured: Sequence[Captured], layer_ids: Sequence[int], hidden_size: int, dtype: str
) -> list[Finding]:
    """Whether the states have the shape, tokens and precision that they must have."""
    findings = [
        finding
        for one in captured
        if (finding := _payload_finding(one, captured, layer_ids, hidden_size, dtype))
    ]
    return findings or _rounded(captured, len(layer_ids), layer_ids[-1], dtype)


def _payload_finding(
    one: Captured, all_of_them: Sequence[Captured], layers: Sequence[int], size: int, dtype: str
) -> Finding | None:
    who, states = one.sample_id, one.hidden_states
    if len(states) < len(one.asked):
        return Finding(
            Cause.PREFIX_CACHE, f"{len(states)} states for the {len(one.asked)} tokens of {who}"
        )
    if not torch.equal(one.token_ids, one.asked):
        owner = [o.sample_id for o in all_of_them if torch.equal(one.token_ids, o.asked)]
        return Finding(
            Cause.ROWS_SWAPPED, f"{who} got the states of {owner[0] if owner else 'other tokens'}"
        )
    if states.shape[2] != size:
        return Finding(
            Cause.OTHER_VERIFIER, f"states have {states.shape[2]} values, its hidden size is {size}"
        )
    if states.shape[:2] != (len(one.asked), len(layers)):
        return Finding(
            Cause.UNKNOWN if states.shape[1] == len(layers) else Cause.OTHER_LAYER,
            f"{who}: {states.shape[0]} tokens × {states.shape[1]} layers instead of "
            f"{len(one.asked)} × {len(layers)}",
        )
    if str(states.dtype).removeprefix("torch.") != dtype:
        return Finding(Cause.WRONG_DTYPE, f"{states.dtype} states, but verifier.dtype is {dtype}")
    if not bool(torch.isfinite(states).all()):
        where = [(s, layers[s]) for s in range(len(layers)) if not states[:, s].isfinite().all()]
        slot, layer = where[0]
        return Finding(Cause.WRONG_DTYPE, f"{who} holds infinity or NaN", slot, layer)
    return None


def _rounded(
    captured: Sequence[Captured], num_slots: int, last_layer: int, dtype: str
) -> list[Finding]:
    """float32 states of which every value is one of a half type were calculated in that. Of the
    last layer alone: embeddings that are stored in a half type are no news."""
    if dtype != "float32":
        return []
    last = torch.cat([one.hidden_states[:, -1] for one in captured])  # [N, H]
    for half in (torch.bfloat16, torch.float16):
        if torch.equal(last.to(half).float(), last):
            detail = f"every value is one of {str(half).removeprefix('torch.')}"
            return [Finding(Cause.WRONG_DTYPE, detail, num_slots - 1, last_layer)]
    return []


# (1) transformers


def compare_reference(
    captured: Sequence[Captured],
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    dtype: str,
) -> tuple[list[TokenErrors], list[Finding]]:
    """Each slot is as near as it must be to its layer, and nearer to no other."""
    errors = torch.cat(  # [N, L, n + 2], the last column: after the final norm
        [
            torch.stack(
                [
                    token_errors(one.hidden_states[: len(theirs)], theirs[:, None])
                    for theirs in (*reference.layers.unbind(1), reference.normed)
                ],
                dim=-1,
            )
            for one, reference in zip(captured, references, strict=True)
        ]
    )
    typical = errors.median(dim=0).values  # [L, n + 2]
    names = [one.sample_id for one in captured]
    measured, findings = [], []
    for slot, layer in enumerate(layer_ids):
        own = errors[:, slot, layer]  # [N]
        measured.append(judge(own, dtype))
        if measured[-1].ok and bool(typical[slot, layer] <= typical[slot].min()):
            continue
        theirs = [reference.layers[:, layer] for reference in references]
        ours = [one.hidden_states[: len(t), slot] for one, t in zip(captured, theirs, strict=True)]
        cause, detail = _other_layer(slot, layer_ids, typical) or _other_rows(
            ours, theirs, names, own, dtype
        )
        findings.append(Finding(cause, detail, slot, layer))
    if len(findings) < len(layer_ids):  # the verifier is the right one, for other slots are right
        findings = [
            finding._replace(cause=Cause.UNKNOWN)
            if finding.cause == Cause.OTHER_VERIFIER
            else finding
            for finding in findings
        ]
    return measured, findings


def _other_layer(
    slot: int,
    layer_ids: Sequence[int],
    typical: torch.Tensor,  # [L, n + 2]
) -> tuple[Cause, str] | None:
    """Whether the slot holds another layer's states than its own."""
    nearest: list[int] = typical.argmin(dim=1).tolist()
    layer, found = layer_ids[slot], nearest[slot]
    if found == layer or typical[slot, found] > LOOSEST:
        return None
    if found == typical.shape[1] - 1:
        return Cause.FINAL_NORM, "holds the states after the final norm"
    detail = f"holds the states after layer {found}" if found else "holds the embeddings"
    if sorted(nearest) == sorted(layer_ids):
        return Cause.WRONG_ORDER, detail
    return (Cause.OFF_BY_ONE if abs(found - layer) == 1 else Cause.OTHER_LAYER), detail


def _other_rows(
    ours: Sequence[torch.Tensor],  # [R_i, H] each
    theirs: Sequence[torch.Tensor],
    names: Sequence[str],
    errors: torch.Tensor,  # [R_1 + …]
    dtype: str,
) -> tuple[Cause, str]:
    """Why states of the right layer differ."""
    swapped = find_owner(ours, theirs, names, errors, dtype)
    if swapped:
        return Cause.ROWS_SWAPPED, swapped
    usual, limit = float(errors.median()), TOLERANCES[dtype].error
    detail = f"error {usual:.1g} (median), {float(errors.max()):.1g} (largest)"
    if usual <= limit:
        return Cause.UNKNOWN, detail
    if usual <= LOOSEST:
        return Cause.WRONG_DTYPE, f"{detail}: as rounding makes it in a half type"
    return Cause.OTHER_VERIFIER, f"{detail}: these are the states of other weights"


def find_owner(
    ours: Sequence[torch.Tensor],  # [T_i, H] each
    theirs: Sequence[torch.Tensor],
    names: Sequence[str],
    errors: torch.Tensor,  # [T_1 + …]
    dtype: str,
) -> str | None:
    """Whose states the wrong rows are, when half of them or more are another row's."""
    limit, outside = TOLERANCES[dtype]
    # Where some noise is allowed, what no noise can be tells more.
    wrong_from = WILD if outside and bool((errors > WILD).any()) else limit
    parts = zip(names, theirs, strict=True)
    places = [(name, row) for name, part in parts for row in range(len(part))]
    wrong = torch.nonzero(errors > wrong_from).flatten()
    wrong = wrong[:: max(1, -(-len(wrong) // ROWS_LOOKED_FOR))]
    if not len(wrong):
        return None
    rows, among = torch.cat(list(ours))[wrong].float(), torch.cat(list(theirs)).float()
    distance = torch.cdist(rows, among, compute_mode="donot_use_mm_for_euclid_dist")
    error, owner = (distance / among.norm(dim=-1).clamp_min(1e-12)).min(dim=1)
    matched = torch.nonzero(error <= limit).flatten()
    if 2 * len(matched) < len(wrong):
        return None
    # The last one: first tokens are often the same, with the same states.
    mine, other = places[int(wrong[matched[-1]])], places[int(owner[matched[-1]])]
    return (
        f"{int((errors > wrong_from).sum())} of {len(errors)} rows are others', token {mine[1]} of "
        f"{mine[0]} has that of token {other[1]} of {other[0]}"
    )


# (2) the server's own top-1


def compare_top1(
    captured: Sequence[Captured], head: Head, layer_ids: Sequence[int]
) -> tuple[float, list[Finding]]:
    """argmax(lm_head(norm(last))) at each position but the last, against what the server says."""
    slot, layer = len(layer_ids) - 1, layer_ids[-1]
    last = torch.cat([one.hidden_states[:-1, -1] for one in captured])  # [N, H]
    top1 = torch.cat([_top1(one) for one in captured])  # [N]
    agreement = agreement_with(head, head.normed(last), top1)
    if _unit_rms(last, head):
        detail = "divided by the norm's weight, every state has length 1"
        return agreement, [Finding(Cause.FINAL_NORM, detail, slot, layer)]
    if agreement >= MIN_TOP1_AGREEMENT:
        return agreement, []
    cause, detail = _top1_cause(captured, head, last, top1, agreement)
    detail += f"; the server's top-1 is reproduced at {agreement:.1%} of {len(top1)} positions"
    return agreement, [Finding(cause, detail, slot, layer)]


def _top1(one: Captured) -> torch.Tensor:
    assert one.top1 is not None
    return one.top1


def agreement_with(head: Head, states: torch.Tensor, top1: torch.Tensor) -> float:
    """Fraction of positions where `top1` is the likeliest token; a tie after rounding to the
    states' dtype, in which the server had its logits, is none of ours."""
    best = torch.full((len(states),), -torch.inf)
    for start in range(0, len(head.lm_head), VOCABULARY_CHUNK):
        rows = head.lm_head[start : start + VOCABULARY_CHUNK].to(states.dtype).float()
        best = torch.maximum(best, (states.float() @ rows.T).max(dim=1).values)
    chosen = (states.float() * head.lm_head[top1].to(states.dtype).float()).sum(-1)
    slack = 8 * torch.finfo(torch.float32).eps * best.abs()  # sums in another order
    return float((chosen.to(states.dtype) >= (best - slack).to(states.dtype)).float().mean())


def _unit_rms(last: torch.Tensor, head: Head) -> bool:
    """Whether the norm was applied: no residual stream has the same length at every token."""
    if bool((head.norm == 0).any()):
        return False
    rms = (last.float() / head.norm.float()).square().mean(-1).sqrt()
    return bool(((rms - 1).abs() < 0.02).float().mean() > MIN_TOP1_AGREEMENT)


def _top1_cause(
    captured: Sequence[Captured],
    head: Head,
    last: torch.Tensor,  # [N, H]
    top1: torch.Tensor,  # [N]
    agreement: float,
) -> tuple[Cause, str]:
    def holds(states: torch.Tensor, tokens: torch.Tensor) -> bool:
        return len(tokens) > 0 and agreement_with(head, states, tokens) >= MIN_TOP1_AGREEMENT

    if holds(last, top1):
        return Cause.FINAL_NORM, "it holds without the norm"
    if holds(head.normed(last, offset=1.0), top1):
        return (
            Cause.OTHER_NORM,
            "it holds with weights 1 + w, as Gemma's, and speculators' EAGLE-3 trains with w",
        )
    num_slots = captured[0].hidden_states.shape[1]
    for slot in range(num_slots - 1):
        aux = torch.cat([one.hidden_states[:-1, slot] for one in captured])
        if holds(head.normed(aux), top1):
            return Cause.WRONG_ORDER, f"slot {slot} holds what belongs here"
    for one in captured:
        states = head.normed(one.hidden_states[:, -1])
        if holds(states[:-1], _top1(one)):
            continue
        for other in captured:
            n = min(len(_top1(one)), len(_top1(other)))
            if other is not one and holds(states[:n], _top1(other)[:n]):
                return Cause.ROWS_SWAPPED, f"{one.sample_id} has the states of {other.sample_id}"
        if holds(states[1:-1], _top1(one)[:-1]) or holds(states[:-2], _top1(one)[1:]):
            return Cause.ROWS_SWAPPED, f"{one.sample_id} has each state one row from its token"
    if agreement >= ROUNDED:
        return Cause.WRONG_DTYPE, "most tokens are the same"
    if agreement >= SAME_MODEL:
        return Cause.OFF_BY_ONE, "the tokens are similar, as from a layer before the last"
    return Cause.OTHER_VERIFIER, "the states do not belong to its lm_head, or are an early layer's"


# (3) one by one and all at once


def compare_together(
    alone: Sequence[Captured], together: Sequence[Captured], layer_ids: Sequence[int], dtype: str
) -> tuple[float, list[Finding]]:
    """States do not depend on what else the server computes at that moment."""
    names = [one.sample_id for one in alone]
    largest, findings = 0.0, []
    for slot, layer in enumerate(layer_ids):
        ours = [one.hidden_states[:, slot] for one in together]
        theirs = [one.hidden_states[:, slot] for one in alone]
        parts = [token_errors(a, b) for a, b in zip(ours, theirs, strict=True)]
        errors = torch.cat(parts)
        measured = judge(errors, dtype)
        largest = max(largest, measured.largest)
        if measured.ok:
            continue
        swapped = find_owner(ours, theirs, names, errors, dtype)
        detail = f"asked at once the error is {measured.largest:.1g}"
        if swapped:
            cause, detail = Cause.ROWS_SWAPPED, f"asked at once, {swapped}"
        elif _stale_prefixes(parts, TOLERANCES[dtype].error):
            cause, detail = Cause.PREFIX_CACHE, f"{detail}, and only where sequences begin"
        else:
            cause = Cause.UNKNOWN
        findings.append(Finding(cause, detail, slot, layer))
    return largest, findings


def _stale_prefixes(parts: Sequence[torch.Tensor], limit: float) -> bool:
    """Whether in each sequence the wrong tokens are its first ones, and never all."""
    wrong = [part > limit for part in parts]
    return all(not bool(w.all()) and bool(w[: int(w.sum())].all()) for w in wrong)
