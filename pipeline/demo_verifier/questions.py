"""What a question is, and which of the three sets it belongs to.

There are twelve kinds (stories.py, puzzles.py), each with worked reasoning that a model of three
million parameters can follow: it says what is asked, copies the numbers it needs, takes one small
step a line, and checks the result. The answers have many possible values and need several steps, so
that without the reasoning they are hard to guess.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

Split = Literal["training", "raw", "evaluation"]


@dataclass(frozen=True)
class Question:
    source: str  # the kind, as in the `source` column of data/raw/questions.jsonl
    question: str
    reasoning: str
    answer: str


def split_of(question: str) -> Split:
    """The set of a question, by its text alone: no set can leak into another."""
    bucket = int(sha256(question.encode()).hexdigest()[:8], 16) % 8
    if bucket == 0:
        return "raw"
    return "evaluation" if bucket == 1 else "training"
