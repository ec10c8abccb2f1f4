"""What smaller hidden states cost the draft (docs/hidden_states.md).

    python -m experiments.states

The states as stored here, rounded to each other dtype, and with the target distribution of the k
likeliest tokens instead of the last layer's states; each on three seeds, same steps.
"""

from contextlib import ExitStack

from experiments.trial import DATA, Arm, prepared, run_all, summary
from pipeline.progress import waiting

SEEDS = [0, 1, 2]
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3")
TOP_K = (1, 4, 8, 32)


def main() -> None:
    with ExitStack() as stack:
        arms = [Arm(f"top-{k}", variant={"top_k": k}) for k in TOP_K]
        for dtype in DTYPES:
            changes = {"extract.dtype": dtype}
            with waiting(f"{dtype} states"):
                data = stack.enter_context(prepared(DATA, changes, ["extract"]))
            arms.append(Arm(dtype, changes, data))
        print(summary(run_all("states", arms, SEEDS)).to_string())


if __name__ == "__main__":
    main()
