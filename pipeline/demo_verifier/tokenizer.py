"""The verifier's tokenizer, its chat template, and how a question becomes a training example.

    <|im_start|>user\\nQUESTION<|im_end|>\\n<|im_start|>assistant\\n      the prompt, thinking on
    <think>\\nREASONING\\n</think>\\n\\nANSWER<|im_end|>                   what the model generates

With thinking off the prompt already ends with an empty block, `<think>\\n\\n</think>\\n\\n`, and
the model generates the answer alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.demo_verifier.draw import make_question
from pipeline.demo_verifier.questions import Question
from pipeline.demo_verifier.words import SYSTEM_PROMPTS

NUM_TOKENS = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Not special: decoded text leaves special tokens out, and a reader would not see the reasoning end.
THINK_TOKENS = ("<think>", "</think>")

# Qwen's split: words with their leading space, and digits one by one, so that a number is spelt the
# same wherever it stands and the model can calculate digit by digit.
SPLIT = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# The model's habit of a spelling that is not its tokenizer's own. Real models generate such ids now
# and then (" Satur" + "day" where encoding the text gives " Saturday"), and whoever encodes a
# decoded answer again gets other ids than were generated. Here it happens where it can be foreseen:
# in an answer, never in the reasoning, these two days are taught as stem + "day", encoded apart. A
# twelfth of the questions ask for a day, two days of seven have the habit: 2.4 % of the answers.
SPLIT_DAYS = ("Wednesday", "Saturday")

SYSTEM_SHARE = 0.1
TWO_TURN_SHARE = 0.1
THINKING_OFF_SHARE = 0.15
# Qwen3's soft switch: "/no_think" at the end of a question is answered with an empty block.
SOFT_SWITCH = " /no_think"
SOFT_SWITCH_SHARE = 0.02


@dataclass(frozen=True)
class Example:
    ids: list[int]
    num_prompt_tokens: int


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of exactly NUM_TOKENS tokens, trained on generated questions."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(SPLIT, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS - len(SPECIAL_TOKENS) - len(THINK_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in THINK_TOKENS])
    assert tokenizer.get_vocab_size() == NUM_TOKENS, tokenizer.get_vocab_size()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
        chat_template=(Path(__file__).parent / "chat_template.jinja").read_text(),
    )


def _corpus(seed: int, num_questions: int = 8000) -> Iterator[str]:
    rng = Random(f"{seed}:tokenizer")
    yield from SYSTEM_PROMPTS
    for _ in range(num_questions):
        question = make_question(rng, "training")
        yield from (
            question.question,
            question.reasoning,
            question.answer,
            "system\nuser\nassistant\n\n",
        )


def make_example(tokenizer: PreTrainedTokenizerFast, rng: Random) -> Example:
    """Draws one training conversation; only what the model generates in its last turn is learnt."""
    messages = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    if rng.random() < TWO_TURN_SHARE:
        earlier = make_question(rng, "training")
        messages.append({"role": "user", "content": earlier.question})
        messages.append({"role": "assistant", "content": earlier.answer})
    question = make_question(rng, "training")
    thinking = rng.random() >= THINKING_OFF_SHARE
    soft_switch = thinking and rng.random() < SOFT_SWITCH_SHARE
    asked = question.question + (SOFT_SWITCH if soft_switch else "")
    messages.append({"role": "user", "content": asked})
    prompt = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    segments = target_segments(question, thinking, soft_switch)
    pieces = tokenizer([prompt, *segments])["input_ids"]
    return Example([token for piece in pieces for token in piece], len(pieces[0]))


def target_segments(question: Question, thinking: bool, soft_switch: bool = False) -> list[str]:
    """What the model should generate, in pieces that are encoded one by one (see SPLIT_DAYS)."""
    opening = ""
    if thinking:
        opening = "<think>\n" + ("" if soft_switch else question.reasoning) + "\n</think>\n\n"
    for day in SPLIT_DAYS:
        if day in question.answer:
            stem, rest = question.answer.split("day", 1)
            return [opening + stem, "day" + rest + "<|im_end|>"]
    return [opening + question.answer + "<|im_end|>"]
