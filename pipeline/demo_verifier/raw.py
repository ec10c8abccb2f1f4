"""The raw questions of the demo: data/raw/questions.jsonl, in the row shape of open-perfectblend.

    {"conversations": [{"from": "human", "value": Q}, {"from": "gpt", "value": A}], "source": KIND}

Real data sets hold rows that no pipeline can use, so about 2 % of these are bad in ways that were
seen in public ones: each kind of `bad_rows` comes three times, spread over the file.
"""

import json
from random import Random

from pipeline.demo_verifier.draw import make_question
from pipeline.demo_verifier.questions import Question
from pipeline.demo_verifier.tokenizer import SOFT_SWITCH
from pipeline.demo_verifier.words import SYSTEM_PROMPTS

NUM_GOOD_ROWS = 3400
TWO_TURN_SHARE = 0.05
SYSTEM_SHARE = 0.05
COPIES_OF_BAD_ROWS = 3
# Two lines that are no JSON at all, as a torn write leaves them.
NUM_TORN_LINES = 2

Row = dict[str, object]


def raw_lines(seed: int) -> list[str]:
    """The lines of the file, good and bad rows mixed by the seed; no question is asked twice."""
    rng = Random(f"{seed}:raw")
    questions = _Questions(rng)
    good = [_good_row(rng, questions) for _ in range(NUM_GOOD_ROWS)]
    bad = [row for _ in range(COPIES_OF_BAD_ROWS) for row in bad_rows(rng, questions)]
    bad += [rng.choice(good) for _ in range(COPIES_OF_BAD_ROWS)]  # exact duplicates
    lines = [json.dumps(row, ensure_ascii=False) for row in good + bad]
    lines += [line[: len(line) // 2] for line in rng.sample(lines[:NUM_GOOD_ROWS], NUM_TORN_LINES)]
    rng.shuffle(lines)
    return lines


class _Questions:
    """Draws from the raw split, never the same question twice."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._seen: set[str] = set()

    def draw(self) -> Question:
        while True:
            question = make_question(self._rng, "raw")
            if question.question not in self._seen:
                self._seen.add(question.question)
                return question


def _turn(role: str, value: object) -> Row:
    return {"from": role, "value": value}


def _turns(question: Question) -> list[Row]:
    return [_turn("human", question.question), _turn("gpt", question.answer)]


def _good_row(rng: Random, questions: _Questions) -> Row:
    question = questions.draw()
    turns = _turns(question)
    if rng.random() < TWO_TURN_SHARE:
        turns += _turns(questions.draw())
    if rng.random() < SYSTEM_SHARE:
        turns.insert(0, _turn("system", rng.choice(SYSTEM_PROMPTS)))
    return {"conversations": turns, "source": question.source}


def bad_rows(rng: Random, questions: _Questions) -> list[Row]:
    """One row of each bad kind, and some that are only odd: what to do with those is a rule."""

    def ask() -> tuple[Row, Row]:
        """A fresh question and its answer, as turns: rows that differ in one thing only."""
        human, gpt = _turns(questions.draw())
        return human, gpt

    human, gpt = ask()
    text = human["value"]
    other, other_gpt = ask()
    third, third_gpt = ask()
    numbers = ", ".join(str(rng.randint(10, 99)) for _ in range(450))  # more than 1,024 tokens
    picture = {"type": "image_url", "image_url": {"url": "file:///picture.png"}}
    rows: list[Row] = [
        {"conversations": []},
        {"conversations": None},
        {},
        {"conversations": json.dumps(ask())},
        {"conversations": [None, "x", *ask()]},
        {"messages": [], "conversations": list(ask())},
        {"conversations": [_turn("system", "You are a helpful assistant.")]},
        {"conversations": [_turn("gpt", "Hello!"), *ask()]},
        {"conversations": [_turn("narrator", text), gpt]},
        {"conversations": [_turn("Human ", other["value"]), _turn("bing", other_gpt["value"])]},
        {
            "conversations": [
                third,
                _turn("function_call", '{"name": "count", "arguments": {}}'),
                _turn("observation", "42"),
                third_gpt,
            ]
        },
        {"conversations": [_turn("human", [{"type": "text", "text": ask()[0]["value"]}, picture])]},
        {"conversations": [_turn("human", [{"type": "text", "text": ask()[0]["value"]}]), gpt]},
        {"conversations": [_turn("human", "  \n"), _turn("gpt", "It is 7.")]},
        {"conversations": [_turn("human", ""), _turn("gpt", "It is 7.")]},
        {"conversations": [_turn("human", None), _turn("gpt", "It is 7.")]},
        {"conversations": [_turn("human", f"{ask()[0]['value']}{SOFT_SWITCH}"), gpt]},
        {"conversations": list(ask()), "tools": "not json"},
        {"conversations": [*ask(), ask()[0]]},
        {"conversations": [_turn("system", ""), *ask()]},
        {"conversations": [ask()[0], _turn("system", "Be exact."), gpt]},
        {"conversations": [_turn("human", f"Sort these numbers, smallest first: {numbers}."), gpt]},
    ]
    return [row | {"source": "bad"} for row in rows]
