"""This project's recipe beside speculators' own defaults, and what each difference is worth.

    python -m experiments.recipe

All drafts see the same batches of the same data for the same number of steps. `stock` is what
`speculators train` does when nothing is said (0.9.0: linear decay, one learning rate for Muon and
AdamW, norms before the projection and behind the last layer). Each further arm changes one thing of
this project's recipe.
"""

from experiments.trial import Arm, run_all, summary

SEEDS = [0, 1, 2]
STOCK_NORMS = {"norm_before_fc": True, "norm_output": True}
STOCK_RATE = {"train.muon_learning_rate": 0.001}
LINEAR = {"trainer": {"scheduler_type": "linear"}}
ARMS = [
    Arm("ours"),
    Arm("stock", STOCK_RATE, variant={"draft": STOCK_NORMS, **LINEAR}),
    Arm("stock: muon rate", STOCK_RATE),
    Arm("stock: norms", variant={"draft": STOCK_NORMS}),
    Arm("stock: linear decay", variant=LINEAR),
    Arm("muon rate x 2", {"train.muon_learning_rate": 0.01}),
    Arm("adamw rate x 3", {"train.learning_rate": 0.003}),
    Arm("5 ttt steps", {"train.ttt_steps": 5}),
    Arm("1 ttt step", {"train.ttt_steps": 1}),
    Arm("2 layers", {"train.num_layers": 2}),
    Arm("loss: cross entropy", variant={"loss": {"loss_fn": "ce"}}),
    Arm("loss: lk_hybrid", variant={"loss": {"loss_fn": "lk_hybrid"}}),
    Arm("loss: decay 0.8", variant={"loss": {"ttt_step_loss_decay": 0.8}}),
]


def main() -> None:
    print(summary(run_all("recipe", ARMS, SEEDS)).to_string())


if __name__ == "__main__":
    main()
