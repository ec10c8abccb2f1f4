"""Draws questions of all kinds from a seeded generator.

>>> make_question(Random(0)).answer
'The next numbers are 17 and 19.'
"""

from collections.abc import Callable
from random import Random

from pipeline.demo_verifier import puzzles, stories
from pipeline.demo_verifier.questions import Question, Split, split_of

# The order matters: with another one the same seed draws other questions.
KINDS: tuple[Callable[[Random], Question], ...] = (
    stories.basket,
    stories.unit_price,
    puzzles.weekday,
    puzzles.letters,
    stories.clock,
    puzzles.sorting,
    puzzles.sequence,
    stories.sharing,
    puzzles.backwards,
    stories.compare,
    puzzles.spread,
    stories.ages,
)


def make_question(rng: Random, split: Split | None = None) -> Question:
    """One question of a random kind; with `split`, draws of that kind until one belongs to it."""
    kind = rng.choice(KINDS)
    while True:
        question = kind(rng)
        if split is None or split_of(question.question) == split:
            return question
