"""Conversations about notes: retrieval, missing notes, new notes, notes in the user's message."""

from __future__ import annotations

from random import Random

import facts
import words
from beyond import KNOW
from conversation import Conversation
from facts import Fact
from words import lists_of

ABSENT = "I have no note about that."
INTRODUCTIONS = (
    "You are a helpful assistant. Use the notes.",
    "You keep these notes for the team.",
    "Notes from the morning shift:",
    "Answer from the notes below.",
    "You are {n}'s assistant. Here is what you know.",
    "You are a helpful assistant. Here are your notes:",
    "Notes:",
    "Facts:",
    "Here is what we know:",
    "Knowledge base:",
    "Answer the questions of the user with these facts.",
    "You know the following.",
    "Use only the notes below to answer.",
    "Remember these notes:",
    "Context:",
    "Memory:",
    "You are an assistant with a good memory.\n\nNotes:",
    "You answer questions about {n} and others.",
    "",
)
ASKING = (
    "",
    "",
    "",
    "",
    "",
    "",
    "Please tell me: ",
    "Question: ",
    "Tell me, ",
    "One more: ",
    "And now: ",
    "Quick question. ",
)
_LISTED = lists_of("memory_tasks")
NOTING = tuple(_LISTED["NOTING"])
HEADERS = (
    "Notes: ",
    "Notes:\n",
    "Here are my notes. ",
    "Here are some facts:\n",
    "",
    "",
    "Context: ",
    "Read this: ",
    "Facts: ",
)
CLOSINGS = (" ", "\n\n", "\n", " Question: ", "\n\nQuestion: ", "\nQ: ")


def listed(rng: Random, known: list[Fact]) -> str:
    """Notes as a bulleted or numbered list, as lines or as a paragraph."""
    style = rng.random()
    notes = [fact.note for fact in known]
    if style < 0.55:
        return "\n".join(f"- {note}" for note in notes)
    if style < 0.65:
        return "\n".join(f"* {note}" for note in notes)
    if style < 0.72:
        return "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    if style < 0.86:
        return "\n".join(notes)
    return " ".join(_sentence(note) for note in notes)


def _sentence(note: str) -> str:
    return note if note.endswith(".") else note + "."


def asked(rng: Random, question: str) -> str:
    """A question, sometimes with an introduction."""
    return rng.choice(ASKING) + question


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


def take_note(
    rng: Random, conversation: Conversation, known: list[Fact], bare: bool = False
) -> list[Fact]:
    """The user tells one to three facts; returns the known ones, newer facts replacing older ones.
    bare: whether the user does not mention notes.
    """
    fresh = facts.draw_many(rng, rng.choice((1, 1, 1, 2, 3)))
    if known and rng.random() < 0.15:
        old = rng.choice(known)
        value = old.relation.value(rng)
        fresh = [
            Fact(
                old.relation,
                old.subject,
                value,
                rng.choice(old.relation.notes).format(s=old.subject, v=value),
            )
        ]
    text = " ".join(_sentence(fact.note) for fact in fresh)
    conversation.exchange(text if bare else rng.choice(NOTING).format(t=text), f"Noted: {text}")
    keys = {fact.key for fact in fresh}
    said = [Fact(fact.relation, fact.subject, fact.value, _sentence(fact.note)) for fact in fresh]
    return [fact for fact in known if fact.key not in keys] + said


def small_talk(rng: Random, conversation: Conversation) -> None:
    """Add small talk between questions."""
    question, answer = rng.choice(
        (
            ("Thank you.", "You are welcome."),
            ("Thanks!", "You are welcome."),
            ("Hello!", "Hello! How can I help you?"),
        )
    )
    conversation.exchange(question, answer)


def system_notes(
    rng: Random, low: int, high: int, turns: tuple[int, int] = (2, 8), doubt: float = 0.1
) -> Conversation:
    """Notes in the system prompt, then questions, new notes and small talk."""
    known = facts.draw_many(rng, rng.randint(low, high))
    introduction = rng.choice(INTRODUCTIONS).format(n=rng.choice(words.NAMES))
    conversation = Conversation()
    conversation.say(
        "system",
        f"{introduction}{rng.choice((chr(10), chr(10) * 2)) if introduction else ''}{listed(rng, known)}",
    )
    _discuss(rng, conversation, known, rng.randint(*turns), doubt)
    return conversation


def user_notes(rng: Random, low: int, high: int, turns: tuple[int, int] = (1, 5)) -> Conversation:
    """Notes in the user's message, before or after the first question; then more questions."""
    known = facts.draw_many(rng, rng.randint(low, high))
    conversation = _maybe_system(rng)
    question, answer = one_question(rng, known)
    notes = listed(rng, known)
    if rng.random() < 0.8:
        message = f"{rng.choice(HEADERS)}{notes}{rng.choice(CLOSINGS)}{question}"
    else:
        message = f"{question}{rng.choice((chr(10), chr(10) * 2, ' '))}{rng.choice(HEADERS)}{notes}"
    conversation.exchange(message, answer)
    _discuss(rng, conversation, known, rng.randint(*turns) - 1)
    return conversation


def told_notes(rng: Random, low: int, high: int) -> Conversation:
    """The user tells facts turn by turn and asks for them."""
    conversation = _maybe_system(rng)
    known: list[Fact] = []
    target = rng.randint(low, high)
    while len(known) < target:
        known = take_note(rng, conversation, known)
        while rng.random() < 0.45:
            conversation.exchange(*one_question(rng, known))
    _discuss(rng, conversation, known, rng.randint(1, 4))
    return conversation


def unknown(rng: Random) -> Conversation:
    """Questions without notes."""
    conversation = _maybe_system(rng)
    others = (
        "What is the capital of {a}?",
        "Who is {n}?",
        "When did {n} arrive?",
        "Why is the {t} {c}?",
        "Who wrote {a}?",
        "What is a {t}?",
        "How far is {a}?",
        "Explain {t}.",
        "What happened in {a}?",
    )
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.7:
            question = facts.draw(rng).question(rng)
        else:
            question = rng.choice(others).format(
                a=rng.choice(words.CITIES),
                n=rng.choice(words.NAMES),
                t=words.common_word(rng),
                c=rng.choice(words.COLOURS),
            )
        conversation.exchange(asked(rng, question), KNOW)
    return conversation


def _maybe_system(rng: Random) -> Conversation:
    conversation = Conversation()
    if rng.random() < 0.4:
        conversation.say(
            "system",
            rng.choice(
                (
                    "You are a helpful assistant.",
                    "You are a friendly assistant.",
                    "Be brief.",
                    "You are Holdfast.",
                    "You are a careful assistant. Answer in one sentence.",
                    "Help the user.",
                )
            ),
        )
    return conversation


def _discuss(
    rng: Random, conversation: Conversation, known: list[Fact], turns: int, doubt: float = 0.1
) -> None:
    for _ in range(turns):
        choice = rng.random()
        if choice < 0.9:
            conversation.exchange(*one_question(rng, known, doubt))
        elif choice < 0.97:
            known = take_note(rng, conversation, known)
        else:
            small_talk(rng, conversation)
