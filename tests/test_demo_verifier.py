"""The demo verifier: its questions, the raw file, the model that ships, and its report."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from pipeline.demo_verifier.card import model_card
from pipeline.demo_verifier.draw import KINDS, make_question
from pipeline.demo_verifier.evaluate import held_out_questions, reencodes
from pipeline.demo_verifier.questions import split_of
from pipeline.demo_verifier.raw import raw_lines
from pipeline.demo_verifier.tokenizer import SPLIT_DAYS, build_tokenizer, make_example
from pipeline.demo_verifier.words import PEOPLE, THINGS, WEEKDAYS

ROOT = Path(__file__).parent.parent
VERIFIER = ROOT / "models/verifier"
RAW = ROOT / "data/raw/questions.jsonl"
SEED = 0


# --- questions ----------------------------------------------------------------------------------


def numbers_in(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def words_of(question: str, choices: list[str]) -> list[str]:
    return [word for word in re.findall(r"[A-Za-z]+", question) if word in choices]


def solve(kind: str, question: str) -> list[str]:
    """What the answer must contain, in order, calculated from the question's text alone."""
    numbers = numbers_in(question)
    match kind:
        case "basket":
            start, more, less = numbers
            return [str(start + more - less)]
        case "unit_price":
            pairs = {
                "If": (0, 1, 2),
                "A ": (0, 1, 2),
            }.get(question[:2], (1, 0, 2))
            count, price, wanted = (numbers[index] for index in pairs)
            return [str(wanted), str(price // count * wanted)]
        case "weekday":
            day = WEEKDAYS.index(words_of(question, list(WEEKDAYS))[0])
            return [WEEKDAYS[(day + numbers[0]) % 7]]
        case "letters":
            letter = re.search(r"letter (\w)", question)[1]
            words = re.search(r"(?:in|words|in:) (\w+) (?:and )?(\w+)(?: together)?[.?]$", question)
            count = (words[1] + words[2]).count(letter)
            return [f"{letter} occurs", "once" if count == 1 else f"{count} times"]
        case "clock":
            hour, minute, lasts = numbers
            end = hour * 60 + minute + lasts
            return [f"at {end // 60}:{end % 60:02}."]
        case "sorting":
            down = "largest first" in question or "large to small" in question
            return [", ".join(map(str, sorted(numbers, reverse=down))) + "."]
        case "sequence":
            step = numbers[1] - numbers[0]
            return [f"are {numbers[3] + step} and {numbers[3] + 2 * step}."]
        case "sharing":
            return [f"gets {numbers[0] // numbers[1]},", f"{numbers[0] % numbers[1]} are left"]
        case "backwards":
            listed = re.search(r"((?:\w, )+\w)\b", question)
            word = re.search(r"(?:spell|the word) (\w+) (?:backwards|from)", question)
            letters = listed[1].split(", ") if listed else list(word[1])
            return [", ".join(letters[::-1]) + "."]
        case "compare":
            one, other = words_of(question, list(THINGS))
            a, b = numbers[0] * numbers[1], numbers[2] * numbers[3]
            return [f"The {one if a > b else other} cost", f"{abs(a - b)} coins"]
        case "spread":
            return [f"is {max(numbers) - min(numbers)}."]
        case "ages":
            if question[: question.index(" ")] == words_of(question, PEOPLE)[-1]:
                years, times, age = numbers  # the oldest comes first
            else:
                age, times, years = numbers
            return [f"{words_of(question, PEOPLE)[-1]} is {age * times + years} years"]
    raise AssertionError(f"no calculation for {kind}")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_answers_are_right_and_the_reasoning_arrives_at_them(kind):
    rng = Random(7)
    for _ in range(60):
        question = kind(rng)
        assert question.source == kind.__name__
        parts = solve(question.source, question.question)
        assert re.search(".*".join(map(re.escape, parts)), question.answer), question
        result = re.findall(r"\d+|[A-Z]\w+day", question.answer)
        assert all(value in question.reasoning for value in result), question


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_calculation_in_the_reasoning_is_right(kind):
    rng = Random(8)
    for _ in range(60):
        reasoning = kind(rng).reasoning
        for left, sign, right, result in re.findall(r"(\d+) ([-+x/]) (\d+) = (\d+)", reasoning):
            operation = {"x": "*", "/": "//"}.get(sign, sign)
            assert eval(f"{left} {operation} {right}") == int(result), reasoning


def test_the_same_seed_draws_the_same_questions():
    first, second = ([make_question(Random(seed)) for seed in range(50)] for _ in range(2))
    assert first == second
    assert len({question.question for question in first}) > 40
    assert make_question(Random(0)).answer == "The next numbers are 17 and 19."


def test_training_raw_and_evaluation_are_disjoint():
    raw = {turn for turns in good_turns() for turn in turns}
    assert {split_of(question) for question in raw} == {"raw"}
    held_out = held_out_questions(SEED)
    assert {split_of(question.question) for question in held_out} == {"evaluation"}
    rng = Random(1)
    assert {split_of(make_question(rng, "training").question) for _ in range(500)} == {"training"}


# --- data/raw/questions.jsonl -------------------------------------------------------------------


def parsed_rows() -> list[dict]:
    rows = []
    for line in RAW.read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def good_turns() -> list[list[str]]:
    """The questions of each good row."""
    return [
        [turn["value"] for turn in row["conversations"] if turn["from"] == "human"]
        for row in parsed_rows()
        if row["source"] != "bad"
    ]


def test_the_raw_file_is_what_the_seed_makes():
    assert RAW.read_text().splitlines() == raw_lines(SEED)
    assert RAW.stat().st_size < 1_500_000


def test_raw_questions_are_many_and_distinct_but_for_the_copies():
    counts = Counter(turn for turns in good_turns() for turn in turns)
    assert len(counts) >= 3000
    assert 0 < sum(count - 1 for count in counts.values()) <= 5


def test_good_rows_have_the_shape_of_open_perfectblend():
    kinds = {kind.__name__ for kind in KINDS}
    shapes = Counter()
    for row in parsed_rows():
        if row["source"] == "bad":
            continue
        assert set(row) == {"conversations", "source"}
        assert row["source"] in kinds
        for turn in row["conversations"]:
            assert set(turn) == {"from", "value"}
            assert turn["value"].strip()
        shapes[tuple(turn["from"] for turn in row["conversations"])] += 1
    pair = ("human", "gpt")
    assert set(shapes) == {pair, ("system", *pair), pair * 2, ("system", *pair * 2)}
    share = 1 - shapes[pair] / shapes.total()
    assert 0.05 < share < 0.15


def test_bad_rows_are_few_and_spread():
    lines = RAW.read_text().splitlines()
    bad = [index for index, line in enumerate(lines) if '"source": "bad"' in line]
    assert 0.01 < len(bad) / len(lines) < 0.03
    assert bad[0] < len(lines) / 5
    assert bad[-1] > len(lines) * 4 / 5
    assert len(lines) - len(parsed_rows()) == 2  # torn lines


# --- models/verifier ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(VERIFIER)


def test_the_model_is_small_and_its_head_is_its_own():
    assert sum(path.stat().st_size for path in VERIFIER.iterdir()) <= 8_000_000
    config = AutoConfig.from_pretrained(VERIFIER)
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert not config.tie_word_embeddings
    # A server takes its default sampling from here: it must be greedy and nothing else.
    generation = json.loads((VERIFIER / "generation_config.json").read_text())
    assert set(generation) == {"do_sample", "eos_token_id", "pad_token_id", "transformers_version"}
    assert generation["do_sample"] is False


def test_the_tokenizer_is_the_one_that_the_code_makes(tokenizer):
    made = build_tokenizer(SEED)
    assert made.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert made.chat_template == tokenizer.chat_template


def test_think_tokens_are_single_and_stay_in_the_text(tokenizer):
    text = "<think>\nIt is 7.\n</think>\n\nSeven.<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    added = tokenizer.added_tokens_decoder
    for token in ("<think>", "</think>"):
        token_id = tokenizer.convert_tokens_to_ids(token)
        assert ids.count(token_id) == 1
        assert not added[token_id].special
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert added[tokenizer.convert_tokens_to_ids(token)].special
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.removesuffix("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"


def test_template_switches_the_thinking(tokenizer):
    def render(messages, **options):
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **options
        )

    user = {"role": "user", "content": "Q"}
    prompt = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert render([user]) == render([user], enable_thinking=True) == prompt
    assert render([user], enable_thinking=False) == prompt + "<think>\n\n</think>\n\n"


def test_template_shows_earlier_answers_without_their_reasoning(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "reasoning_content": "R", "content": "A1"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "<think>\nR\n</think>\n\nA2"},
        {"role": "user", "content": "Q3"},
    ]
    turns = ["system\nS", "user\nQ1", "assistant\nA1", "user\nQ2", "assistant\nA2", "user\nQ3"]
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns)
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == expected + "<|im_start|>assistant\n"


def test_some_generated_ids_are_not_what_their_text_encodes_to(tokenizer):
    ids = [
        token
        for part in ("It is Satur", "day.<|im_end|>")
        for token in tokenizer(part)["input_ids"]
    ]
    assert tokenizer.decode(ids) == "It is Saturday.<|im_end|>"
    assert not reencodes(tokenizer, ids)
    assert reencodes(tokenizer, tokenizer("It is Sunday.<|im_end|>")["input_ids"])


def test_training_examples_teach_the_habit_for_two_days_alone(tokenizer):
    rng, num_habit = Random(3), 0
    examples = [make_example(tokenizer, rng) for _ in range(1500)]
    for example in examples:
        target = example.ids[example.num_prompt_tokens :]
        answer = tokenizer.decode(target).rsplit("\n", 1)[-1]
        habit = any(f"It is {day}." in answer for day in SPLIT_DAYS)
        assert reencodes(tokenizer, target) != habit, answer
        num_habit += habit
    assert 0.01 < num_habit / len(examples) < 0.04


# --- reports/demo_verifier.json -----------------------------------------------------------------


def test_the_report_meets_the_targets():
    report = json.loads((ROOT / "reports/demo_verifier.json").read_text())
    on, off, asked = report["thinking_on"], report["thinking_off"], report["num_questions"]
    assert asked == 500
    assert on["num_closed_reasoning"] >= 0.99 * asked
    assert on["num_reasoning_tokens"] >= 60 * asked
    assert on["num_right"] >= 0.6 * asked
    assert on["num_right"] >= 3 * off["num_right"]
    assert 0 < on["num_not_reencoded"] <= 0.04 * asked
    assert sum(kind["num_questions"] for kind in report["by_kind"].values()) == asked
    assert len(report["by_kind"]) == len(KINDS)


def test_the_model_card_shows_the_report(tokenizer):
    report = json.loads((ROOT / "reports/demo_verifier.json").read_text())
    with safe_open(VERIFIER / "model.safetensors", "pt") as weights:
        num_parameters = sum(
            math.prod(weights.get_slice(name).get_shape())
            for name in weights.keys()  # noqa: SIM118
        )
    card = (VERIFIER / "README.md").read_text()
    assert card == model_card(report, num_parameters, len(tokenizer))
