"""Conversations about facts: notes in the system prompt or the user's message, told, or missing."""

from __future__ import annotations

from random import Random

import facts
from conversation import Conversation
from facts import Fact
from rules import draw, picked, texts
from talk import KNOW, beyond, typed

ABSENT = "I have no note about that."


def listed(style: str, notes: list[str]) -> str:
    """Notes in a style of `rules/notes.txt`."""
    if style == "sentences":
        return " ".join(note if note.endswith(".") else f"{note}." for note in notes)
    if style == "numbers":
        return "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    mark = {"bullets": "- ", "stars": "* ", "lines": ""}[style]
    return "\n".join(f"{mark}{note}" for note in notes)


def listed_facts(rng: Random, known: list[Fact]) -> str:
    """The notes of facts."""
    return listed(draw(rng, "fact_list"), [fact.note for fact in known])


def introduced(rng: Random, known: list[Fact]) -> str:
    """A system prompt with notes."""
    introduction = rng.choice(texts("introductions")).format(n=draw(rng, "names"))
    return f"{introduction}\n{listed_facts(rng, known)}"


def asked(rng: Random, question: str) -> str:
    """A question, sometimes with an introduction."""
    return draw(rng, "asking") + question


def one_question(rng: Random, known: list[Fact], doubt: float = 0.1) -> tuple[str, str]:
    """A question and its answer. doubt: the probability that no known fact answers it."""
    if not known or rng.random() < doubt:
        return asked(rng, facts.draw_other(rng, known).question(rng)), ABSENT
    fact = rng.choice(known)
    if fact.relation.backwards and rng.random() < 0.15:
        same = [
            other
            for other in known
            if other.relation is fact.relation and other.value == fact.value
        ]
        if len(same) == 1:
            return asked(rng, fact.backward_question(rng)), fact.note
    return asked(rng, fact.question(rng)), fact.note


def take_note(rng: Random, talk: Conversation, known: list[Fact], bare: bool = False) -> list[Fact]:
    """The user tells one to three facts; returns the known ones, newer facts replacing older ones.
    bare: whether the user does not mention notes.
    """
    fresh = facts.draw_many(rng, rng.choice((1, 1, 1, 2, 3)))
    if known and rng.random() < 0.15:
        old = rng.choice(known)
        fresh = [facts.told(rng, old.relation, old.subject)]
    text = " ".join(fact.sentence for fact in fresh)
    talk.exchange(text if bare else draw(rng, "noting", t=text), f"Noted: {text}")
    keys = {fact.key for fact in fresh}
    said = [Fact(fact.relation, fact.subject, fact.value, fact.sentence) for fact in fresh]
    return [fact for fact in known if fact.key not in keys] + said


def system_notes(
    rng: Random, low: int, high: int, fewest: int, most: int, doubt: float = 0.1
) -> Conversation:
    """Notes in the system prompt, then questions, new notes and small talk."""
    known = facts.draw_many(rng, rng.randint(low, high))
    introduction = rng.choice(texts("introductions")).format(n=draw(rng, "names"))
    space = rng.choice(("\n", "\n\n")) if introduction else ""
    talk = Conversation()
    talk.say("system", introduction + space + listed_facts(rng, known))
    _discuss(rng, talk, known, rng.randint(fewest, most), doubt)
    return talk


def user_notes(rng: Random, low: int, high: int) -> Conversation:
    """Notes in the user's message, before or after the first question; then more questions."""
    known = facts.draw_many(rng, rng.randint(low, high))
    talk = _maybe_system(rng)
    question, answer = one_question(rng, known)
    notes = listed_facts(rng, known)
    if rng.random() < 0.8:
        message = f"{draw(rng, 'note_headers')}{notes}{draw(rng, 'note_closings')}{question}"
    else:
        message = (
            f"{question}{rng.choice((chr(10), chr(10) * 2, ' '))}{draw(rng, 'note_headers')}{notes}"
        )
    talk.exchange(message, answer)
    _discuss(rng, talk, known, rng.randint(1, 5) - 1)
    return talk


def told_notes(rng: Random, low: int, high: int) -> Conversation:
    """The user tells facts turn by turn and asks for them."""
    talk = _maybe_system(rng)
    known: list[Fact] = []
    target = rng.randint(low, high)
    while len(known) < target:
        known = take_note(rng, talk, known)
        while rng.random() < 0.45:
            talk.exchange(*one_question(rng, known))
    _discuss(rng, talk, known, rng.randint(1, 4))
    return talk


def unknown(rng: Random) -> Conversation:
    """Questions without notes."""
    talk = _maybe_system(rng)
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            question = facts.draw_fact(rng).question(rng)
        else:
            form = picked(rng, "unknown_questions")
            city, name = draw(rng, "cities"), draw(rng, "names")
            word, colour = draw(rng, "common"), draw(rng, "colours")
            question = form.format(a=city, n=name, t=word, c=colour)
        talk.exchange(asked(rng, question), KNOW)
    return talk


def bare_notes(rng: Random, talk: Conversation) -> None:
    """Facts told without a request to remember them, and questions about them."""
    known = facts.draw_many(rng, rng.choice((1, 1, 2, 3, 4)))
    text = " ".join(fact.sentence for fact in known)
    talk.exchange(text, f"Noted: {text}")
    for _ in range(rng.randint(0, 2)):
        fact = rng.choice(known)
        talk.exchange(typed(rng, fact.question(rng), 0.0), fact.sentence)


def lower_question(rng: Random, talk: Conversation) -> None:
    """Notes and a question in one message."""
    known = facts.draw_many(rng, rng.randint(1, 6))
    fact = rng.choice(known)
    question = fact.question(rng)
    question = question[0].lower() + question[1:] if rng.random() < 0.5 else question
    question = question.rstrip("?.") if rng.random() < 0.4 else question
    head, notes = draw(rng, "note_headers"), listed_facts(rng, known)
    talk.exchange(f"{head}{notes}{draw(rng, 'note_closings')}{question}", fact.note)


def question(rng: Random, talk: Conversation, doubt: float) -> None:
    """A question about the known facts."""
    talk.exchange(*one_question(rng, talk.known, doubt))


def note(rng: Random, talk: Conversation) -> None:
    """The user tells facts."""
    talk.known = take_note(rng, talk, talk.known)


def note_at_times_bare(rng: Random, talk: Conversation) -> None:
    """The user tells facts, at times without mentioning notes."""
    bare = rng.random() < 0.5
    talk.known = take_note(rng, talk, talk.known, bare)


def beyond_notes(rng: Random, talk: Conversation) -> None:
    """A message that the model cannot answer, at times about something that no note says."""
    said, answer = beyond(rng)
    talk.exchange(said, ABSENT if talk.known and answer == KNOW else answer)


def _maybe_system(rng: Random) -> Conversation:
    talk = Conversation()
    if rng.random() < 0.4:
        talk.say("system", draw(rng, "notes_system"))
    return talk


def _discuss(
    rng: Random, talk: Conversation, known: list[Fact], turns: int, doubt: float = 0.1
) -> None:
    for _ in range(turns):
        choice = rng.random()
        if choice < 0.9:
            talk.exchange(*one_question(rng, known, doubt))
        elif choice < 0.97:
            known = take_note(rng, talk, known)
        else:
            talk.exchange(*picked(rng, "thanks_or_hello").split(" => "))
