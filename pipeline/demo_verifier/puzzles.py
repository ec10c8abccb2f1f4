"""Six kinds of question about letters, days and rows of numbers.

Each is a pure function `Random -> Question`; how the reasoning is worked is said in questions.py.
"""

from itertools import pairwise
from random import Random

from pipeline.demo_verifier.questions import Question
from pipeline.demo_verifier.words import PEOPLE, WEEKDAYS, WORDS


def weekday(rng: Random) -> Question:
    person, day, count = rng.choice(PEOPLE), rng.randrange(7), rng.randint(3, 20)
    trip = rng.choice(("trip", "course", "holiday", "project", "visit", "show"))
    today = WEEKDAYS[day]
    question = rng.choice(
        (
            f"Today is {today}. {person}'s {trip} starts in {count} days. Which day is that?",
            f"{person}'s {trip} starts on {today} and ends {count} days later. Which day is that?",
            (
                f"{person} counts {count} days from {today} to a {trip}. "
                f"On which day of the week is the {trip}?"
            ),
        )
    )
    lines = [
        f"We start on {today} and go {count} days on.",
        "A week has 7 days, and after a week the day is the same.",
    ]
    rest = count
    while rest >= 7:
        lines.append(f"{rest} is at least 7: {rest} - 7 = {rest - 7}.")
        rest -= 7
    lines.append(f"{rest} is less than 7, so count {rest} days from {today}.")
    lines.append(
        ", ".join(f"{step} {WEEKDAYS[(day + step) % 7]}" for step in range(rest + 1))
        + f". Here the count is {rest}."
    )
    answer = WEEKDAYS[(day + count) % 7]
    lines.append(f"So the day is {answer}.")
    return Question("weekday", question, "\n".join(lines), f"It is {answer}.")


def letters(rng: Random) -> Question:
    first, second = rng.sample(WORDS, 2)
    letter = rng.choice(first + second)
    question = rng.choice(
        (
            f"How many times does the letter {letter} occur in {first} and {second} together?",
            f"Count the letter {letter} in the words {first} and {second}.",
            f"How often is the letter {letter} used in: {first} {second}?",
        )
    )
    count, lines = 0, [f"We count the letter {letter}. The words are {first} and {second}."]
    for word in (first, second):
        steps = []
        for current in word:
            count += current == letter
            steps.append(f"{current} {count}")
        lines.append(f"The letters of {word}: {', '.join(word)}.")
        lines.append(f"Count {letter}: {', '.join(steps)}.")
    lines.append(f"At the end the count is {count}.")
    times = "once" if count == 1 else f"{count} times"
    return Question("letters", question, "\n".join(lines), f"The letter {letter} occurs {times}.")


def backwards(rng: Random) -> Question:
    name, word = rng.choice(PEOPLE), rng.choice(WORDS)
    code = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(4, 6))
    question, spelt = rng.choice(
        (
            (f"{name} asks: how do you spell {word} backwards?", list(word)),
            (
                f"Help {name} to spell the word {word} from the last letter to the first.",
                list(word),
            ),
            (f"Write the letters {', '.join(code)} in reverse order.", code),
            (f"{name}'s code is {', '.join(code)}. What is it backwards?", code),
        )
    )
    numbered = [f"{index} {letter}" for index, letter in enumerate(spelt, 1)]
    reasoning = (
        f"We need the letters in reverse order.\n"
        f"The letters are {', '.join(spelt)}.\n"
        f"Number them: {', '.join(numbered)}.\n"
        f"There are {len(spelt)} letters, so start with number {len(spelt)} and go down.\n"
        f"From the end: {', '.join(reversed(numbered))}.\n"
        f"We arrived at 1, so nothing is missing."
    )
    return Question("backwards", question, reasoning, f"It is {', '.join(reversed(spelt))}.")


def sorting(rng: Random) -> Question:
    numbers = rng.sample(range(2, 60), 4)
    name, listed = rng.choice(PEOPLE), ", ".join(map(str, numbers))
    question, pick, word = rng.choice(
        (
            (f"Sort these numbers, smallest first: {listed}.", min, "smallest"),
            (f"{name} wrote {listed}. Put them in order from small to large.", min, "smallest"),
            (f"Sort these numbers, largest first: {listed}.", max, "largest"),
            (f"{name} wrote {listed}. Put them in order from large to small.", max, "largest"),
        )
    )
    lines, left, done = [f"We take the {word} number again and again."], list(numbers), []
    while len(left) > 1:
        best = pick(left)
        lines.append(f"Of {', '.join(map(str, left))} the {word} is {best}.")
        left.remove(best)
        done.append(best)
    done += left
    lines.append(f"Left is {left[0]}.")
    answer = ", ".join(map(str, done))
    lines.append(
        f"In the order in which we took them: {answer}. These are 4 numbers, none is missing."
    )
    return Question("sorting", question, "\n".join(lines), f"{answer}.")


def spread(rng: Random) -> Question:
    name, numbers = rng.choice(PEOPLE), rng.sample(range(2, 40), 4)
    listed = ", ".join(map(str, numbers))
    question = rng.choice(
        (
            f"What is the difference between the largest and the smallest of {listed}?",
            f"{name} has the cards {listed}. How far apart are the smallest and the largest card?",
        )
    )
    high, low = max(numbers), min(numbers)
    lines = [f"The numbers are {listed}."]
    for pick, word in ((max, "largest"), (min, "smallest")):
        best, steps = numbers[0], [f"start with {numbers[0]}"]
        for number in numbers[1:]:
            changed = pick(best, number) != best
            best = pick(best, number)
            steps.append(f"at {number} take {best}" if changed else f"at {number} keep {best}")
        lines.append(f"Find the {word}: {', '.join(steps)}.")
    lines.append(f"The largest is {high} and the smallest is {low}.")
    lines.append(f"{high} - {low} = {high - low}.")
    lines.append(f"Let me check: {low} + {high - low} = {high}.")
    return Question("spread", question, "\n".join(lines), f"The difference is {high - low}.")


def sequence(rng: Random) -> Question:
    name, step, start = rng.choice(PEOPLE), rng.randint(2, 9), rng.randint(1, 30)
    terms = [start + step * index for index in range(6)]
    if rng.random() < 0.4:
        terms.reverse()
    shown, listed = terms[:4], ", ".join(map(str, terms[:4]))
    question = rng.choice(
        (
            f"What are the next two numbers: {listed}?",
            f"{name} writes {listed}. Which two numbers come next?",
            f"Go on with this row for two numbers: {listed}.",
        )
    )
    up = terms[1] > terms[0]
    sign, word = ("+", "up") if up else ("-", "down")
    lines = [f"The row is {listed}.", f"Look at the steps. The row goes {word}."]
    for left, right in pairwise(shown):
        low, high = sorted((left, right))
        lines.append(f"From {left} to {right}: {high} - {low} = {step}.")
    lines.append(f"Each step is {step}, {word}.")
    lines.append(f"After {terms[3]} comes {terms[3]} {sign} {step} = {terms[4]}.")
    lines.append(f"After {terms[4]} comes {terms[4]} {sign} {step} = {terms[5]}.")
    answer = f"The next numbers are {terms[4]} and {terms[5]}."
    return Question("sequence", question, "\n".join(lines), answer)
