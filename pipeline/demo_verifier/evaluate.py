"""How good the verifier is: held-out questions, asked greedily with thinking on and off."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from pipeline.demo_verifier.draw import make_question
from pipeline.demo_verifier.questions import Question
from pipeline.progress import progress_bar

NUM_QUESTIONS = 500
MAX_NEW_TOKENS = 512
QUESTIONS_PER_BATCH = 100


@dataclass(frozen=True)
class Generation:
    """The generated ids, end token included; without one the generation ran into the limit."""

    ids: list[int]
    reasoning: str | None  # None: no closed block
    num_reasoning_tokens: int
    answer: str
    ended: bool


def held_out_questions(seed: int) -> list[Question]:
    """Distinct questions from the evaluation split: neither in training nor in data/raw."""
    rng = Random(f"{seed}:evaluation")
    questions: dict[str, Question] = {}
    while len(questions) < NUM_QUESTIONS:
        question = make_question(rng, "evaluation")
        questions[question.question] = question
    return list(questions.values())


def evaluate(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> dict:
    """The report: counts are integers, fractions have four digits."""
    questions = held_out_questions(seed)
    report: dict = {"num_questions": NUM_QUESTIONS, "max_new_tokens": MAX_NEW_TOKENS}
    right = {}
    for thinking, name in ((True, "thinking_on"), (False, "thinking_off")):
        texts = [question.question for question in questions]
        generations = generate(model, tokenizer, texts, thinking)
        right[name] = [g.answer == q.answer for g, q in zip(generations, questions, strict=True)]
        report[name] = {
            "num_right": sum(right[name]),
            "fraction_right": round(sum(right[name]) / NUM_QUESTIONS, 4),
            "num_ended": sum(g.ended for g in generations),
            "num_generated_tokens": sum(len(g.ids) for g in generations),
            "num_not_reencoded": sum(not reencodes(tokenizer, g.ids) for g in generations),
        }
        if thinking:
            reasoning_tokens = sum(g.num_reasoning_tokens for g in generations)
            report[name] |= {
                "num_closed_reasoning": sum(bool((g.reasoning or "").strip()) for g in generations),
                "num_reasoning_tokens": reasoning_tokens,
                "mean_reasoning_tokens": round(reasoning_tokens / NUM_QUESTIONS, 4),
            }
    asked = Counter(question.source for question in questions)
    report["by_kind"] = {
        kind: {"num_questions": asked[kind]}
        | {
            f"num_right_{name}": sum(
                ok
                for ok, question in zip(right[name], questions, strict=True)
                if question.source == kind
            )
            for name in right
        }
        for kind in sorted(asked)
    }
    return report


def reencodes(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> bool:
    """Whether encoding the decoded text gives the same ids again (see tokenizer.SPLIT_DAYS)."""
    return tokenizer(tokenizer.decode(ids))["input_ids"] == ids


@torch.inference_mode()
def generate(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: list[str],
    thinking: bool,
) -> list[Generation]:
    """Greedy answers to single questions, in batches padded on the left."""
    model.eval()
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
        )
        for question in questions
    ]
    generations = []
    label = f"asking, thinking {'on' if thinking else 'off'}"
    with progress_bar(label, len(prompts), "questions") as bar:
        for start in range(0, len(prompts), QUESTIONS_PER_BATCH):
            batch = prompts[start : start + QUESTIONS_PER_BATCH]
            inputs = tokenizer(batch, padding=True, padding_side="left", return_tensors="pt")
            outputs = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
            )
            new_ids = outputs[:, inputs["input_ids"].shape[1] :].tolist()
            generations += [_parse(tokenizer, ids, thinking) for ids in new_ids]
            bar.advance(len(batch))
    return generations


def _parse(tokenizer: PreTrainedTokenizerFast, ids: list[int], thinking: bool) -> Generation:
    end = tokenizer.eos_token_id
    ended = end in ids
    if ended:
        ids = ids[: ids.index(end) + 1]
    text = tokenizer.decode(ids).removesuffix(tokenizer.eos_token)
    if not thinking:
        return Generation(ids, None, 0, text.strip(), ended)
    head, closed, answer = text.partition("</think>")
    if not closed or not head.startswith("<think>"):
        return Generation(ids, None, 0, text.strip(), ended)
    close = ids.index(tokenizer.convert_tokens_to_ids("</think>"))
    # The tokens between the two think tokens.
    return Generation(ids, head.removeprefix("<think>"), close - 1, answer.strip(), ended)
