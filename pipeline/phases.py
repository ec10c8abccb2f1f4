"""Loss and accuracy of a draft by phase, in every forward pass of training.

    metrics = PhaseMetrics(draft)
    loss_config = {"kl_div": (metrics.hearing(kl_div_loss), 1.0)}     for draft.forward

speculators' model returns its metrics as sums and totals; these are added to them under names of
the same kind, so that its trainer adds them up over batches and processes, divides and logs them
as its own. With p a phase or `all`, and k from 0, each counted where training learns something:

    p_acc_k                   how often the draft tokens 0 … k behind a token are all right
    p_loss_k                  mean loss of draft token k
    p_acc_k_of, p_loss_k_of   of how many; no sum, so that 0 % can be told from nothing there

speculators' own `full_acc_k` counts a draft that crosses the border of a mask as wrong, which says
little about answers of ten tokens. A draft token is right when it is the one that stands there,
and a draft belongs to the phase of its first token, as in pipeline.evaluate.
"""

from collections.abc import Callable
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.functional import pad

from pipeline.draft import verifier_ids

UNLEARNT, REASONING, ANSWER = 0, 1, 2
PHASES = {"reasoning": REASONING, "answer": ANSWER}
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def phase_ids(loss_mask: torch.Tensor, answer_start: int) -> torch.Tensor:  # [T], int8
    """The phase of the token behind each, which is the first that a draft can write there."""
    phases = torch.full_like(loss_mask, REASONING, dtype=torch.int8)
    if answer_start < len(phases):  # else it was cut before one
        phases[max(answer_start - 1, 0) :] = ANSWER
    return torch.where(loss_mask > 0, phases, UNLEARNT)


class PhaseMetrics:
    """Hears the forward passes of a draft whose batches have the key `phase_ids` [1, T]."""

    def __init__(self, draft: Eagle3DraftModel) -> None:
        self._phase_ids = torch.empty(0)  # [1, T]
        self._losses: list[torch.Tensor] = []  # a draft token each, [1, T - k]
        draft.register_forward_pre_hook(self._before, with_kwargs=True)
        draft.register_forward_hook(self._after, with_kwargs=True)

    def hearing(self, loss_function: LossFunction) -> LossFunction:
        """The same loss, heard token for token."""

        def heard(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            losses = loss_function(logits, targets)
            self._hear(losses.detach())
            return losses

        return heard

    @torch.compiler.disable
    def _hear(self, losses: torch.Tensor) -> None:
        self._losses.append(losses)

    def _before(self, draft: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Takes the phases out of the batch: the draft would hand them on to its layers."""
        self._phase_ids = kwargs.pop("phase_ids")
        self._losses = []
        return args, kwargs

    def _after(self, draft: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        draft_ids, loss, metrics = output
        drafts = [verifier_ids(draft, ids) for ids in draft_ids]
        found = phase_metrics(
            kwargs["input_ids"], kwargs["document_ids"], self._phase_ids, drafts, self._losses
        )
        return draft_ids, loss, {**metrics, **found}


def phase_metrics(
    input_ids: torch.Tensor,  # [1, T]
    document_ids: torch.Tensor,  # [1, T]; padding is -1
    phases: torch.Tensor,  # [1, T]
    drafts: list[torch.Tensor],  # a draft token each, [1, T] in ids of the verifier
    losses: list[torch.Tensor],  # a draft token each, [1, T - k]
) -> dict[str, torch.Tensor]:
    """Sums and totals. Draft token k at position j is the guess for input_ids[j + 1 + k]; its
    loss, where it is learnt, stands at the same place."""
    metrics: dict[str, torch.Tensor] = {}

    def add(name: str, values: torch.Tensor, where: torch.Tensor) -> None:
        total = where.sum().float()
        metrics[f"{name}_sum"] = (values * where).sum().float()
        metrics[f"{name}_total"] = metrics[f"{name}_of"] = total

    right = torch.ones_like(input_ids, dtype=torch.bool)
    of_phase = {"all": phases != UNLEARNT}
    of_phase |= {name: phases == phase for name, phase in PHASES.items()}
    for k, draft_ids in enumerate(drafts):
        right &= draft_ids == shifted(input_ids, k + 1)
        inside = document_ids == shifted(document_ids, k + 1)
        learnt = shifted(of_phase["all"], k) & (document_ids == shifted(document_ids, k))
        loss = pad(losses[k], (0, k))
        for name, starts in of_phase.items():
            add(f"{name}_acc_{k}", right, starts & inside)
            add(f"{name}_loss_{k}", loss, starts & learnt)
    return metrics


def shifted(values: torch.Tensor, by: int) -> torch.Tensor:  # [1, T]
    """What stands `by` places further on; nothing behind the end."""
    nothing = -2 if values.dtype != torch.bool else False  # no token, and no document
    return pad(values[:, by:], (0, by), value=nothing)
