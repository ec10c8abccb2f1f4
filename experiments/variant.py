"""pipeline.train with what params.yaml has no key for.

python -m experiments.variant '{"trainer": {"scheduler_type": "linear"}}'     # in a project

trainer   fields of speculators' TrainerConfig
draft     arguments of speculators' Eagle3DraftModel.from_training_args
loss      arguments of its get_trainer_kwargs
top_k     the target distribution is cut to its k largest logits before the loss sees it, as it
          would be if those were stored instead of the last layer's states
"""

import json
import sys
from functools import partial
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.functional import linear

from pipeline import train
from pipeline.stage import run_stage

NEVER = -1e4  # a logit; minus infinity would make 0 · log 0 of the loss


def cut(logits: torch.Tensor, k: int) -> torch.Tensor:  # both […, draft vocabulary]
    top = logits.topk(k, dim=-1)
    return torch.full_like(logits, NEVER).scatter(-1, top.indices, top.values)


def main() -> None:
    changes: dict[str, Any] = json.loads(sys.argv[1])
    new_draft, trainer_config = train.new_draft, train.trainer_config
    from_training_args = Eagle3DraftModel.from_training_args
    get_trainer_kwargs = Eagle3DraftModel.get_trainer_kwargs

    def changed_draft(*args: Any) -> Any:
        draft = new_draft(*args)
        if k := changes.get("top_k"):
            weight = draft.verifier_lm_head.weight
            draft.verifier_lm_head.forward = lambda states: cut(linear(states, weight), k)
        return draft

    def changed_config(*args: Any) -> Any:
        return trainer_config(*args)._replace(**changes.get("trainer", {}))

    patched: Any = train
    patched.new_draft, patched.trainer_config = changed_draft, changed_config
    draft_model: Any = Eagle3DraftModel
    draft_model.from_training_args = partial(from_training_args, **changes.get("draft", {}))
    draft_model.get_trainer_kwargs = staticmethod(
        lambda **kwargs: get_trainer_kwargs(**{**kwargs, **changes.get("loss", {})})
    )
    train.main()


if __name__ == "__main__":
    run_stage("train", main)
