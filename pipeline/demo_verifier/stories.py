"""Six kinds of question about people and their things: small sums in words.

Each is a pure function `Random -> Question`; how the reasoning is worked is said in questions.py.
"""

from random import Random

from pipeline.demo_verifier.questions import Question
from pipeline.demo_verifier.words import PEOPLE, THINGS


def basket(rng: Random) -> Question:
    person, things = rng.choice(PEOPLE), rng.choice(list(THINGS))
    start, more, less = rng.randint(5, 40), rng.randint(2, 9), rng.randint(2, 9)
    total = start + more
    less = min(less, total)  # nobody gives away what is not there
    rest = total - less
    question = rng.choice(
        (
            (
                f"{person} has {start} {things}, buys {more} more and gives {less} away. "
                f"How many {things} does {person} have now?"
            ),
            (
                f"{person} had {start} {things}. Then {person} found {more} and lost {less}. "
                f"How many {things} are left?"
            ),
            (
                f"In the morning {person} has {start} {things}. {more} are added and then {less} "
                f"are taken away. How many {things} does {person} have?"
            ),
        )
    )
    reasoning = (
        f"The question is how many {things} {person} has in the end.\n"
        f"At the start there are {start}.\n"
        f"Then {more} come in: {start} + {more} = {total}.\n"
        f"Then {less} go out: {total} - {less} = {rest}.\n"
        f"Let me check by going back: {rest} + {less} = {total}, and {total} - {more} = {start}. "
        f"That is where we started, so {rest} is right."
    )
    return Question("basket", question, reasoning, f"{person} has {rest} {things} now.")


def unit_price(rng: Random) -> Question:
    person, things = rng.choice(PEOPLE), rng.choice(list(THINGS))
    price, paid_for = rng.randint(2, 9), rng.randint(2, 9)
    wanted = rng.choice([count for count in range(2, 10) if count != paid_for])
    known, total = price * paid_for, price * wanted
    question = rng.choice(
        (
            f"If {paid_for} {things} cost {known} coins, what do {wanted} {things} cost?",
            (
                f"{person} pays {known} coins for {paid_for} {things}. "
                f"How many coins would {wanted} {things} cost?"
            ),
            (
                f"A shop sells {paid_for} {things} for {known} coins. "
                f"{person} wants {wanted} {things}. What is the price?"
            ),
        )
    )
    reasoning = (
        f"We need the price of {wanted} {things}.\n"
        f"First the price of one {THINGS[things]}. We know that {paid_for} cost {known} coins.\n"
        f"{known} / {paid_for} = {price}, so one costs {price} coins.\n"
        f"Now take {wanted} of them: {wanted} x {price} = {total}.\n"
        f"Let me check the first step: {paid_for} x {price} = {known}, as the question says. "
        f"So the price is {total} coins."
    )
    return Question("unit_price", question, reasoning, f"{wanted} {things} cost {total} coins.")


def sharing(rng: Random) -> Question:
    person, things = rng.choice(PEOPLE), rng.choice(list(THINGS))
    children, each = rng.randint(3, 9), rng.randint(2, 6)
    left_over = rng.randrange(children)
    total = children * each + left_over
    question = rng.choice(
        (
            (
                f"{person} shares {total} {things} among {children} children. "
                f"How many does each child get, and how many are left over?"
            ),
            (
                f"{total} {things} go into {children} boxes, the same number in each. "
                f"How many are in a box, and how many are left over?"
            ),
            (
                f"{person} divides {total} {things} by {children}. "
                f"What is the result and what is left over?"
            ),
        )
    )
    lines = [
        f"We share {total} by {children}.",
        f"Go up in steps of {children} until it is too much.",
    ]
    for count in range(1, each + 2):
        product = count * children
        verdict = "fits" if product <= total else f"is more than {total}, too much"
        lines.append(f"{count} x {children} = {product} {verdict}.")
    lines.append(f"So each gets {each}, which uses {each * children}.")
    lines.append(f"Left over: {total} - {each * children} = {left_over}.")
    return Question(
        "sharing", question, "\n".join(lines), f"Each gets {each}, and {left_over} are left over."
    )


def compare(rng: Random) -> Question:
    person, (one, other) = rng.choice(PEOPLE), rng.sample(list(THINGS), 2)
    while True:
        count_a, count_b = rng.randint(2, 6), rng.randint(2, 6)
        price_a, price_b = rng.randint(2, 7), rng.randint(2, 7)
        cost_a, cost_b = count_a * price_a, count_b * price_b
        if cost_a != cost_b:
            break
    question = rng.choice(
        (
            (
                f"Which costs more, and by how much: {count_a} {one} at {price_a} coins each or "
                f"{count_b} {other} at {price_b} coins each?"
            ),
            (
                f"{person} buys {count_a} {one} for {price_a} coins each and {count_b} {other} for "
                f"{price_b} coins each. For which does {person} pay more, and how much more?"
            ),
        )
    )
    high, low, more = (cost_a, cost_b, one) if cost_a > cost_b else (cost_b, cost_a, other)
    reasoning = (
        f"We compare the {one} with the {other}.\n"
        f"The {one}: {count_a} x {price_a} = {cost_a} coins.\n"
        f"The {other}: {count_b} x {price_b} = {cost_b} coins.\n"
        f"{high} is more than {low}, so the {more} cost more.\n"
        f"The difference is {high} - {low} = {high - low}.\n"
        f"Let me check: {low} + {high - low} = {high}. That is right."
    )
    return Question("compare", question, reasoning, f"The {more} cost {high - low} coins more.")


def ages(rng: Random) -> Question:
    old, middle, young = rng.sample(PEOPLE, 3)
    age, times, years = rng.randint(2, 9), rng.randint(2, 5), rng.randint(2, 9)
    middle_age = age * times
    question = rng.choice(
        (
            (
                f"{young} is {age} years old. {middle} is {times} times as old as {young}. "
                f"{old} is {years} years older than {middle}. How old is {old}?"
            ),
            (
                f"{old} is {years} years older than {middle}, and {middle} is {times} times "
                f"as old as {young}. {young} is {age}. How old is {old}?"
            ),
        )
    )
    result = middle_age + years
    reasoning = (
        f"We need the age of {old}.\n"
        f"Start with the one that we know: {young} is {age}.\n"
        f"{middle} is {times} times as old: {times} x {age} = {middle_age}.\n"
        f"{old} is {years} years older than {middle}: {middle_age} + {years} = {result}.\n"
        f"Let me check: {result} - {years} = {middle_age}, the age of {middle}. That is right."
    )
    return Question("ages", question, reasoning, f"{old} is {result} years old.")


def clock(rng: Random) -> Question:
    person, hour = rng.choice(PEOPLE), rng.randint(1, 11)
    minute, lasts = rng.randrange(0, 60, 5), rng.randrange(10, 60, 5)
    event = rng.choice(("lesson", "film", "walk", "game", "train ride", "meeting"))
    question = rng.choice(
        (
            (
                f"{person}'s {event} starts at {hour}:{minute:02} and takes {lasts} minutes. "
                f"When does it end?"
            ),
            (
                f"The {event} begins at {hour}:{minute:02}. It lasts {lasts} minutes. "
                f"At what time can {person} leave?"
            ),
            (
                f"It is {hour}:{minute:02} and {person} has a {event} of {lasts} minutes. "
                f"What time is it after that?"
            ),
        )
    )
    total = minute + lasts
    lines = [
        f"The {event} starts at {hour}:{minute:02} and takes {lasts} minutes.",
        f"The hour is {hour} and the minutes are {minute}.",
        f"Add the minutes: {minute} + {lasts} = {total}.",
    ]
    if total >= 60:
        lines.append(f"{total} is at least 60, so an hour is full: {total} - 60 = {total - 60}.")
        lines.append(f"The hour goes up: {hour} + 1 = {hour + 1}.")
        hour, total = hour + 1, total - 60
    else:
        lines.append(f"{total} is less than 60, so no hour is full.")
        lines.append(f"The hour stays {hour}.")
    end = f"{hour}:{total:02}"
    lines.append(f"The hour is {hour} and the minutes are {total}, so the time is {end}.")
    return Question("clock", question, "\n".join(lines), f"It ends at {end}.")
