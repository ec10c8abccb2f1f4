"""What the reasoning in the training data is worth: the experiment that this project rests on.

    make experiment-reasoning        (python -m experiments.reasoning)

Three data sets from the same questions and answers: with the reasoning (keep), without the think
block (drop), with an empty one (empty). Each has the same number of supervised tokens, so those
without reasoning have many more questions; and each is trained the same number of steps over
batches that hold as many supervised tokens, so all see their data equally often. Every draft is
judged on the held-out answers as the verifier writes them, with their reasoning; beside it stands
the trainer's own accuracy, which each draft earns on held-out data of its own kind.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from experiments.trial import Arm, prepared, run_all, step, summary
from perf.project import ROOT, scratch_project
from pipeline.devices import ATTENTION_BLOCK
from pipeline.params import load_params
from pipeline.progress import waiting
from pipeline.records import Split
from pipeline.sequences import SequenceWriter, load_split

SEEDS = [0, 1, 2]
NUM_QUESTIONS = 3400  # of the 3,471 that there are
SUPERVISED_TOKENS = 35_000  # as many as 3,200 answers without their reasoning have
KINDS = ("keep", "drop", "empty")


@contextmanager
def all_answers() -> Iterator[Path]:
    """The data folder of a project that asked every question."""
    with scratch_project({"prompts.sample_cap": NUM_QUESTIONS}) as project:
        project.take_questions(ROOT / "data/raw")
        with waiting(f"asking {NUM_QUESTIONS} questions"):
            step(project, "pipeline.generate")
        yield project.folder / "data"


def cut(folder: Path, num_supervised: int) -> int:
    """Leave the first rows with so many supervised tokens; returns their number of tokens."""
    rows, left, num_tokens = load_split(folder), num_supervised, 0
    with SequenceWriter(folder) as writer:
        for row in rows:
            if left <= 0:
                break
            writer.add(row)
            left -= sum(row["loss_mask"])
            num_tokens += row["seq_len"]
    if left > 0:
        raise ValueError(f"{folder} has {left} supervised tokens too few")
    return num_tokens


def main() -> None:
    with ExitStack() as stack:
        answers = stack.enter_context(all_answers())
        folders, num_tokens = {}, {}
        for kind in KINDS:
            changes = {"prompts.sample_cap": NUM_QUESTIONS, "reassemble.reasoning": kind}
            with waiting(f"{kind}: sequences"):
                data = stack.enter_context(prepared(answers, changes, ["reassemble"]))
            num_tokens[kind] = cut(data / "sequences" / Split.TRAIN, SUPERVISED_TOKENS)
            with waiting(f"{kind}: hidden states"):
                folders[kind] = stack.enter_context(prepared(data, changes, ["extract"]))
        arms, batch = [], load_params(ROOT / "params.yaml").train.max_tokens_per_batch
        for kind in KINDS:
            blocks = round(batch * num_tokens[kind] / num_tokens["keep"] / ATTENTION_BLOCK)
            changes = {"train.max_tokens_per_batch": blocks * ATTENTION_BLOCK}
            arms.append(Arm(kind, changes, folders[kind]))
        rows = run_all("reasoning", arms, SEEDS, judged_on=folders["keep"])
    print(summary(rows).to_string())


if __name__ == "__main__":
    main()
