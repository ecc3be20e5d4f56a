"""Facts: a note and the questions that it answers.

The right answer repeats the note word for word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import words

Maker = Callable[[Random], str]


@dataclass(frozen=True)
class Relation:
    """A kind of fact: subjects, values, wordings and questions."""

    name: str
    subject: Maker
    value: Maker
    notes: tuple[str, ...]
    questions: tuple[str, ...]
    backwards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fact:
    """A fact in the words of its note."""

    relation: Relation
    subject: str
    value: str
    note: str

    @property
    def key(self) -> tuple[str, str]:
        """The subject of the fact. Two facts with equal keys contradict each other."""
        return (self.relation.name, self.subject)

    def question(self, rng: Random) -> str:
        """A question that this fact answers."""
        return rng.choice(self.relation.questions).format(s=self.subject, v=self.value)

    def backward_question(self, rng: Random) -> str:
        """A question about the subject, given the value."""
        return rng.choice(self.relation.backwards).format(s=self.subject, v=self.value)


def _from(items: list[str], invented: float = 0.1, capital: bool = False) -> Maker:
    """Draw from a list, or sometimes an invented word."""
    return lambda rng: words.invent(rng, capital) if rng.random() < invented else rng.choice(items)


def _person(rng: Random) -> str:
    return words.invent(rng, True) if rng.random() < 0.25 else rng.choice(words.NAMES)


def _thing(rng: Random) -> str:
    if rng.random() < 0.3:
        return f"{rng.choice(words.COLOURS + words.STEMS)} {rng.choice(words.THINGS)}"
    return words.invent(rng) if rng.random() < 0.1 else rng.choice(words.THINGS)


def _time(rng: Random) -> str:
    return f"{rng.randint(6, 22)}:{rng.choice(['00', '15', '30', '45'])}"


def _label(rng: Random) -> str:
    return f"{rng.choice(words.STEMS)} {rng.choice(words.ATTRIBUTES)}"


_city = _from(words.CITIES, capital=True)
RELATIONS = (
    Relation(
        "city",
        _person,
        _city,
        ("{s} lives in {v}.", "{s} lives in {v}.", "The home of {s} is {v}."),
        (
            "Where does {s} live?",
            "In which city does {s} live?",
            "What city does {s} live in?",
            "What city is {s} in?",
            "Where is the home of {s}?",
            "Tell me where {s} lives.",
        ),
        ("Who lives in {v}?",),
    ),
    Relation(
        "job",
        _person,
        _from(words.JOBS),
        ("{s} works as a {v}.", "{s} is a {v}.", "{s} has a job as a {v}."),
        (
            "What is {s}'s job?",
            "What does {s} work as?",
            "Tell me {s}'s profession.",
            "What does {s} do for a living?",
            "What is the job of {s}?",
        ),
        ("Who works as a {v}?", "Who is a {v}?"),
    ),
    Relation(
        "door code",
        _person,
        lambda rng: words.digits(rng, 4, 4),
        (
            "The door code of {s} is {v}.",
            "{s}'s door code is {v}.",
            "The code for {s}'s door is {v}.",
        ),
        (
            "What is the door code of {s}?",
            "Give me {s}'s door code.",
            "Which code opens {s}'s door?",
            "What is {s}'s door code?",
            "What's the code for {s}'s door?",
        ),
        ("Whose door code is {v}?",),
    ),
    Relation(
        "age",
        _person,
        lambda rng: str(rng.randint(5, 95)),
        ("{s} is {v} years old.", "The age of {s} is {v}."),
        ("How old is {s}?", "What is {s}'s age?", "Tell me the age of {s}."),
    ),
    Relation(
        "food",
        _person,
        _from(words.FOODS),
        ("{s} likes {v} best.", "{s}'s favourite food is {v}.", "{s} loves to eat {v}."),
        (
            "What food does {s} like best?",
            "What is {s}'s favourite food?",
            "What does {s} like to eat?",
        ),
        ("Who likes {v} best?",),
    ),
    Relation(
        "hobby",
        _person,
        _from(words.HOBBIES),
        ("The hobby of {s} is {v}.", "{s} enjoys {v}."),
        ("What is the hobby of {s}?", "What is {s}'s hobby?", "What does {s} enjoy?"),
    ),
    Relation(
        "pet",
        _person,
        _from(words.NAMES, 0.3, True),
        ("{s}'s pet is called {v}.", "The pet of {s} is named {v}."),
        (
            "What is {s}'s pet called?",
            "What is the name of {s}'s pet?",
            "How is the pet of {s} called?",
        ),
        ("Whose pet is {v}?",),
    ),
    Relation(
        "birth",
        _person,
        _from(words.MONTHS, 0.0),
        ("{s} was born in {v}.", "{s}'s birthday is in {v}."),
        ("When was {s} born?", "In which month was {s} born?", "When is {s}'s birthday?"),
    ),
    Relation(
        "phone",
        _person,
        lambda rng: "555-" + words.digits(rng, 4, 4),
        ("{s}'s phone number is {v}.", "The phone of {s} is {v}."),
        ("What is {s}'s phone number?", "How can I phone {s}?", "Give me the phone number of {s}."),
    ),
    Relation(
        "language",
        _person,
        _from(words.LANGUAGES, 0.0),
        ("{s} speaks {v}.", "The language of {s} is {v}."),
        (
            "Which language does {s} speak?",
            "What language does {s} speak?",
            "What is the language of {s}?",
        ),
    ),
    Relation(
        "colour",
        _thing,
        _from(words.COLOURS, 0.0),
        ("The {s} is {v}.", "The colour of the {s} is {v}."),
        ("What colour is the {s}?", "What color is the {s}?", "Which colour does the {s} have?"),
    ),
    Relation(
        "place",
        _thing,
        _from(words.PLACES),
        ("The {s} is in the {v}.", "We keep the {s} in the {v}.", "You find the {s} in the {v}."),
        (
            "Where is the {s}?",
            "Where can I find the {s}?",
            "Where do we keep the {s}?",
            "In which room is the {s}?",
        ),
    ),
    Relation(
        "price",
        _thing,
        lambda rng: words.digits(rng, 1, 4),
        ("The {s} costs {v} dollars.", "The price of the {s} is {v} dollars."),
        ("How much does the {s} cost?", "What is the price of the {s}?", "What does the {s} cost?"),
    ),
    Relation(
        "owner",
        _thing,
        _person,
        ("The {s} belongs to {v}.", "The owner of the {s} is {v}."),
        (
            "Who owns the {s}?",
            "Whose {s} is it?",
            "To whom does the {s} belong?",
            "Who is the owner of the {s}?",
        ),
    ),
    Relation(
        "day",
        lambda rng: (
            f"{rng.choice(words.STEMS)} {rng.choice(words.EVENTS)}"
            if rng.random() < 0.5
            else rng.choice(words.EVENTS)
        ),
        _from(words.DAYS, 0.0),
        ("The {s} is on {v}.", "The {s} takes place on {v}."),
        ("When is the {s}?", "On which day is the {s}?", "What day is the {s}?"),
    ),
    Relation(
        "start",
        lambda rng: (
            f"{rng.choice(words.STEMS)} {rng.choice(words.EVENTS)}"
            if rng.random() < 0.5
            else rng.choice(words.EVENTS)
        ),
        _time,
        ("The {s} starts at {v}.", "The {s} begins at {v}."),
        ("What time does the {s} start?", "At what time is the {s}?"),
    ),
)


def _free_relation(rng: Random) -> Relation:
    """`The X of Y is Z` and `A: B` for any X, Y and Z."""
    word = words.invent(rng) if rng.random() < 0.3 else rng.choice(words.ATTRIBUTES)
    form = rng.random()
    if form < 0.4:
        questions = (
            f"What is the {word} of {{s}}?",
            f"What is {{s}}'s {word}?",
            f"Tell me the {word} of {{s}}.",
            f"Which {word} does {{s}} have?",
        )
        return Relation(
            f"free {word}",
            _person,
            words.anything,
            (f"The {word} of {{s}} is {{v}}.", f"{{s}}'s {word} is {{v}}."),
            questions,
        )
    if form < 0.75:
        questions = (
            f"What is the {word} of the {{s}}?",
            f"What is the {{s}}'s {word}?",
            f"Which {word} does the {{s}} have?",
        )
        return Relation(
            f"free {word}",
            _thing,
            words.anything,
            (f"The {word} of the {{s}} is {{v}}.", f"The {{s}}'s {word} is {{v}}."),
            questions,
        )
    questions = ("What is the {s}?", "What is {s}?", "Tell me the {s}.", "{s}?")
    return Relation(
        "label", _label, words.anything, ("{s}: {v}", "The {s} is {v}.", "{s} = {v}"), questions
    )


def draw(rng: Random) -> Fact:
    """A random fact."""
    relation = _free_relation(rng) if rng.random() < 0.25 else rng.choice(RELATIONS)
    subject, value = relation.subject(rng), relation.value(rng)
    return Fact(relation, subject, value, rng.choice(relation.notes).format(s=subject, v=value))


def draw_many(rng: Random, count: int) -> list[Fact]:
    """`count` facts that do not contradict each other."""
    chosen: dict[tuple[str, str], Fact] = {}
    while len(chosen) < count:
        fact = draw(rng)
        chosen.setdefault(fact.key, fact)
    return list(chosen.values())


def draw_other(rng: Random, known: list[Fact]) -> Fact:
    """A fact that the known ones do not mention, mostly with the subject or relation of one of
    them.
    """
    keys = {fact.key for fact in known}
    while True:
        fact = draw(rng)
        near = rng.choice(known) if known and rng.random() < 0.7 else fact
        if near is not fact and near.relation.subject is fact.relation.subject:
            note = rng.choice(fact.relation.notes).format(s=near.subject, v=fact.value)
            fact = Fact(fact.relation, near.subject, fact.value, note)
        if fact.key not in keys and (fact.relation.name, fact.subject) not in keys:
            return fact
