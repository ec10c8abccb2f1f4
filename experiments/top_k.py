"""pipeline.train, with targets as they would be if only the k likeliest tokens were stored.

    python -m experiments.top_k 8        # in a project folder

speculators computes the target distribution over the draft's vocabulary from the last layer's
states. Here all of it but the k largest logits is taken away, before the loss sees it.
"""

import sys
from typing import Any

import torch
from torch.nn.functional import linear

from pipeline import train
from pipeline.stage import run_stage

NEVER = -1e4  # a logit; minus infinity would make 0 · log 0 of the loss


def cut(logits: torch.Tensor, k: int) -> torch.Tensor:  # both […, draft vocabulary]
    top = logits.topk(k, dim=-1)
    return torch.full_like(logits, NEVER).scatter(-1, top.indices, top.values)


def main() -> None:
    k, new_draft = int(sys.argv[1]), train.new_draft

    def with_cut_targets(*args: Any) -> Any:
        draft = new_draft(*args)
        weight = draft.verifier_lm_head.weight
        draft.verifier_lm_head.forward = lambda states: cut(linear(states, weight), k)
        return draft

    train.new_draft = with_cut_targets  # type: ignore[assignment]
    train.main()


if __name__ == "__main__":
    run_stage("train", main)
