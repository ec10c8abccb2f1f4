"""This project's recipe beside speculators' own defaults, and what each difference is worth.

    python -m experiments.recipe

All drafts see the same batches of the same data. `ours` is params.yaml; it has more seeds, for the
floor of the tests comes from them. `stock` is what `speculators train` does when nothing is said
(0.9.0: linear decay of the rates, 0.001 for Muon and AdamW alike, every draft token counts the
same, norms before the projection and behind the last layer). The others change one thing: of ours,
or of ours without the loss decay (`loss decay 1.0, …`), as it was when they were tried first.
"""

from experiments.trial import Arm, run_all, summary

SEEDS = [0, 1, 2]
MORE_SEEDS = [3, 4]
STOCK_NORMS = {"draft": {"norm_before_fc": True, "norm_output": True}}
LINEAR = {"trainer": {"scheduler_type": "linear"}}
FIRST = "loss decay 1.0"
FIRST_CHANGES = {"train.ttt_step_loss_decay": 1.0}
STOCK_CHANGES = {**FIRST_CHANGES, "train.muon_learning_rate": 0.001}


def first(change: str, changes: dict[str, object], **variant: object) -> Arm:
    return Arm(f"{FIRST}, {change}", {**FIRST_CHANGES, **changes}, variant=variant)


ARMS = [
    Arm("ours"),
    Arm("stock", STOCK_CHANGES, variant={**STOCK_NORMS, **LINEAR}),
    Arm(FIRST, FIRST_CHANGES),
    first("muon rate 0.001", {"train.muon_learning_rate": 0.001}),
    first("norms of stock", {}, **STOCK_NORMS),
    first("1 ttt step", {"train.ttt_steps": 1}),
    first("2 layers", {"train.num_layers": 2}),
    first("cross entropy", {}, loss={"loss_fn": "ce"}),
    Arm("muon rate 0.003", {"train.muon_learning_rate": 0.003}),
    Arm("linear decay of rates", variant=LINEAR),
    Arm("loss decay 0.6", {"train.ttt_step_loss_decay": 0.6}),
    Arm("reasoning weight 0.5", {"train.reasoning_weight": 0.5}),
]


def main() -> None:
    run_all("recipe", ARMS[:1], MORE_SEEDS)
    print(summary(run_all("recipe", ARMS, SEEDS)).to_string())


if __name__ == "__main__":
    main()
