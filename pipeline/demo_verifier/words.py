"""The words that the questions are made of.

Short lists, so that a tiny model meets each word often enough to know how it is spelt.
"""

_PEOPLE = """
    Ada Ben Carla Dan Emma Finn Grace Hugo Iris Jack Kira Leo Mia Noah Olga Paul Rosa Sam Tara
    Uma Vera Will Yara Zoe
"""
PEOPLE = _PEOPLE.split()

# plural, singular
THINGS = {
    "apples": "apple",
    "books": "book",
    "cards": "card",
    "cups": "cup",
    "eggs": "egg",
    "flowers": "flower",
    "lamps": "lamp",
    "lemons": "lemon",
    "pencils": "pencil",
    "plates": "plate",
    "rings": "ring",
    "shells": "shell",
    "stamps": "stamp",
    "stones": "stone",
    "tickets": "ticket",
    "toys": "toy",
}

WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

# Three to six letters, many with a letter that comes twice: there is something to count.
_WORDS = """
    apple arrow atlas award badge ball bamboo banana barrel basket bean bell berry book bottle
    bread bridge bubble butter button cabin candle carrot castle cheese cherry circle coffee
    cookie cotton cousin cradle dinner doctor dollar donkey door dragon eagle eleven engine
    fellow fence finger flower forest garden ginger glass goose grape green hammer happy harbor
    hello hill honey hotel indigo island jacket jelly jungle keeper kettle kitten ladder lemon
    letter level lizard magnet mammal mango marble meadow mirror monkey moon motor muffin needle
    noodle number ocean olive onion orange oyster paddle paper parrot pebble pencil pepper
    people pillow planet pocket potato puzzle rabbit river rocket rubber saddle salad school
    sheep silver sister spoon street summer sunset teapot temple ticket tiger tomato tree tunnel
    turtle valley velvet violin wagon walnut water wheel willow window winter yellow zebra
    zipper
"""
WORDS = _WORDS.split()

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful tutor.",
    "Answer in one short sentence.",
    "Think first, then answer.",
    "You help children with their homework.",
    "Be exact.",
)
