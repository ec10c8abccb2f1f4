"""What smaller hidden states cost the draft (docs/hidden_states.md).

    python -m experiments.states

The states as stored here, rounded to each other dtype, and with the target distribution of the k
likeliest tokens instead of the last layer's states; each on three seeds, same steps.
"""

from experiments.trial import Arm, record, run_all, summary

SEEDS = [0, 1, 2]
ARMS = [
    *(
        Arm(dtype, {"extract.dtype": dtype}, ["extract"])
        for dtype in ("float32", "bfloat16", "float16", "float8_e4m3")
    ),
    *(Arm(f"top-{k}", {}, train=["experiments.top_k", str(k)]) for k in (1, 4, 8, 32)),
]


def main() -> None:
    print(summary(record("states", run_all(ARMS, SEEDS))).to_string())


if __name__ == "__main__":
    main()
