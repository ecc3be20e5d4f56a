"""Facts of `facts.txt`: a note and the questions that it answers.

The right answer repeats the note word for word.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import words  # noqa: F401  its functions are called by texts
from rules import HERE, blocks, complete, draw, texts


@dataclass(frozen=True)
class Relation:
    """A kind of fact. subject, value: their rules."""

    name: str
    subject: str
    value: str
    notes: list[str]
    questions: list[str]
    backwards: list[str]


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

    @property
    def sentence(self) -> str:
        """The note with a full stop."""
        return self.note if self.note.endswith(".") else f"{self.note}."

    def question(self, rng: Random) -> str:
        """A question that this fact answers."""
        return rng.choice(self.relation.questions).format(s=self.subject, v=self.value)

    def backward_question(self, rng: Random) -> str:
        """A question about the subject, given the value."""
        return rng.choice(self.relation.backwards).format(s=self.subject, v=self.value)


def _read() -> list[Relation]:
    return [
        Relation(
            block["name"][0],
            block["subject"][0],
            block["value"][0],
            block["note"],
            block["ask"],
            block.get("back", []),
        )
        for block in blocks((HERE / "facts.txt").read_text("utf-8"))
    ]


*RELATIONS, _OF_PERSONS, _OF_THINGS, _LABELS = _read()


def _free_relation(rng: Random) -> Relation:
    """`The X of Y is Z` and `A: B` for any X, Y and Z."""
    word = draw(rng, "invent") if rng.random() < 0.3 else rng.choice(texts("attributes"))
    form = rng.random()
    relation = _OF_PERSONS if form < 0.4 else _OF_THINGS if form < 0.75 else _LABELS
    notes, questions = (
        [text.replace("{w}", word) for text in forms]
        for forms in (relation.notes, relation.questions)
    )
    name = relation.name.replace("{w}", word)
    return Relation(name, relation.subject, relation.value, notes, questions, [])


def draw_fact(rng: Random) -> Fact:
    """A random fact."""
    relation = _free_relation(rng) if rng.random() < 0.25 else rng.choice(RELATIONS)
    return told(rng, relation, complete(rng, f"{{{relation.subject}}}", {}))


def told(rng: Random, relation: Relation, subject: str, value: str | None = None) -> Fact:
    """A fact about a subject."""
    value = complete(rng, f"{{{relation.value}}}", {}) if value is None else value
    return Fact(relation, subject, value, rng.choice(relation.notes).format(s=subject, v=value))


def draw_many(rng: Random, count: int) -> list[Fact]:
    """`count` facts that do not contradict each other."""
    chosen: dict[tuple[str, str], Fact] = {}
    while len(chosen) < count:
        fact = draw_fact(rng)
        chosen.setdefault(fact.key, fact)
    return list(chosen.values())


def draw_other(rng: Random, known: list[Fact]) -> Fact:
    """A fact that the known ones do not mention, mostly with the subject of one of them."""
    keys = {fact.key for fact in known}
    while True:
        fact = draw_fact(rng)
        near = rng.choice(known) if known and rng.random() < 0.7 else fact
        if near is not fact and near.relation.subject == fact.relation.subject:
            fact = told(rng, fact.relation, near.subject, fact.value)
        if fact.key not in keys:
            return fact
