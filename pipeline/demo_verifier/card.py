"""The model card, written with the numbers of the report."""

CARD = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
---
# A demo verifier

A reasoning model of {millions:.1f} million parameters (Qwen3's architecture, 4 layers, hidden size
256, {num_tokens} tokens), small enough to train, serve and draft for on a laptop's CPU. It thinks
between `<think>` and `</think>` and then answers one sentence; `enable_thinking=false` in the chat
template switches the thinking off, and so does `/no_think` at the end of a question.

It is there so that every stage of this pipeline runs for real without a GPU. It is **not** a useful
assistant: it knows twelve kinds of small question (those of `stories.py` and `puzzles.py` in
`pipeline/demo_verifier`) and answers anything else with nonsense. Speed-ups measured on it say
nothing about a large model.

## How good it is

{num_questions} held-out questions, greedy, up to {max_new_tokens} new tokens, the stored bf16
weights loaded as float32:

| | thinking on | thinking off |
|---|---|---|
| right answers | {on[fraction_right]:.1%} | {off[fraction_right]:.1%} |
| ended by themselves | {on[num_ended]} | {off[num_ended]} |
| closed, non-empty reasoning | {on[num_closed_reasoning]} | - |
| tokens of reasoning, mean | {on[mean_reasoning_tokens]:.1f} | - |
| decode → encode gives other ids | {on[num_not_reencoded]} | {off[num_not_reencoded]} |

The last row is on purpose: where the answer is Wednesday or Saturday, the model writes the day in
two tokens that its tokenizer would not choose, as real models do now and then. Text is not a safe
record of what was generated; token ids are.

| kind | questions | right, thinking on | right, thinking off |
|---|---|---|---|
{kinds}

## How it was made

`make verifier` (`python -m pipeline.demo_verifier`), from scratch, on generated questions only, in
about half an hour on one CPU core. Training, `data/raw` and the held-out questions are disjoint
by a hash of the question's text. The weights are stored in bf16; the folder is under 8 MB.
"""


def model_card(report: dict, num_parameters: int, num_tokens: int) -> str:
    kinds = "\n".join(
        f"| {kind} | {row['num_questions']} | {row['num_right_thinking_on']} "
        f"| {row['num_right_thinking_off']} |"
        for kind, row in report["by_kind"].items()
    )
    return CARD.format(
        millions=num_parameters / 1e6,
        num_tokens=num_tokens,
        on=report["thinking_on"],
        off=report["thinking_off"],
        num_questions=report["num_questions"],
        max_new_tokens=report["max_new_tokens"],
        kinds=kinds,
    )
