"""Small tasks of newcomers: sums, counts, facts about themselves, notes."""

from __future__ import annotations

from random import Random

import beyond
import beyond_words
import facts
import first_words
import memory_tasks
import open_words
import other_tasks
import words
from conversation import Conversation
from spelling import typed
from words import listed, lists_of

_LISTED = lists_of("newcomer_tasks")
_SUMS = tuple(_LISTED["_SUMS"])
_COUNTS = tuple(_LISTED["_COUNTS"])
_ENGLISH = sorted(
    {
        word
        for text in (*beyond_words.SENTENCES, *beyond_words.TOPICS, *beyond_words.THINGS)
        for word in text.split()
        if word.isalpha()
    }
)
_ME = {
    "name": (
        lambda rng: words.invent(rng, True) if rng.random() < 0.3 else rng.choice(words.NAMES),
        ("My name is {v}.", "I am called {v}.", "Hi, my name is {v}.", "Hello, my name is {v}."),
        "Your name is {v}.",
        (
            "What is my name?",
            "Who am I?",
            "What am I called?",
            "Do you know my name?",
            "Do you remember my name?",
            "Tell me my name.",
        ),
    ),
    "city": (
        lambda rng: rng.choice(words.CITIES),
        ("I live in {v}.", "My home is in {v}.", "I am from {v}."),
        "You live in {v}.",
        ("Where do I live?", "What city do I live in?", "Where is my home?", "Where am I from?"),
    ),
    "colour": (
        lambda rng: rng.choice(words.COLOURS),
        ("My favourite colour is {v}.", "My favorite color is {v}."),
        "Your favourite colour is {v}.",
        (
            "What is my favourite colour?",
            "What is my favorite color?",
            "Which colour do I like best?",
        ),
    ),
    "pet": (
        lambda rng: words.invent(rng, True) if rng.random() < 0.4 else rng.choice(words.NAMES),
        ("My {p} is called {v}.", "My {p}'s name is {v}.", "The name of my {p} is {v}."),
        "Your {p} is called {v}.",
        ("What is my {p} called?", "What is my {p}'s name?", "What is the name of my {p}?"),
    ),
    "job": (
        lambda rng: rng.choice(words.JOBS),
        ("I am a {v}.", "I work as a {v}."),
        "You work as a {v}.",
        ("What is my job?", "What do I work as?", "What do I do for a living?"),
    ),
    "code": (
        lambda rng: words.token_like(rng) if rng.random() < 0.4 else words.digits(rng, 3, 6),
        (
            "My {p} is {v}.",
            "The {p} of the {q} is {v}.",
            "The {p} is {v}.",
            "The {p} at the {q} is {v}.",
        ),
        "",
        ("What is {t}?", "Tell me {t}.", "What's {t}?", "Give me {t}."),
    ),
}


def any_sum(rng: Random, thinking: bool | None) -> tuple[str, str]:
    """A sum as users type it. Two digits below ten need no reasoning unless requested."""
    easy = rng.random() < 0.45
    first, second = (
        (rng.randint(0, 9), rng.randint(0, 9)) if easy else (rng.randint(1, 99), rng.randint(1, 99))
    )
    question = typed(rng, rng.choice(_SUMS).format(a=first, b=second), 0.0)
    answer = f"The answer is {first + second}."
    if thinking is False or (easy and not thinking):
        return question, answer
    return question, other_tasks.thought(other_tasks.steps_of_sum(first, second), answer)


def any_count(rng: Random, thinking: bool | None) -> tuple[str, str]:
    """A count of words, some of which are invented."""
    items = [_any_word(rng) for _ in range(rng.randint(1, 8))]
    question = typed(rng, rng.choice(_COUNTS).format(i=", ".join(items)), 0.0)
    if not question.isupper() and rng.random() < 0.7:
        question = question if question[0].isupper() else question[0].upper() + question[1:]
    listed = question[question.index(":") + 1 :].strip().rstrip("?!.:;) ")
    names = [name.strip() for name in listed.split(",")]
    answer = f"There are {len(names)}."
    steps = "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) + "."
    return question, answer if thinking is False else other_tasks.thought(steps, answer)


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.2:
        return words.invent(rng)
    return words.common_word(rng) if kind < 0.55 else rng.choice(_ENGLISH)


def copied_sentence(rng: Random) -> tuple[str, str]:
    """A text to repeat with words that notes do not use."""
    text = beyond.sentence(rng)
    if rng.random() < 0.2:
        text = facts.draw(rng).note
    elif rng.random() < 0.3:
        text = " ".join(
            _any_word(rng) if rng.random() < 0.9 else words.digits(rng, 1, 3)
            for _ in range(rng.randint(2, 8))
        )
    elif rng.random() < 0.6:
        pieces = text.split()
        start = rng.randrange(max(1, len(pieces) - 3))
        text = " ".join(pieces[start : start + rng.randint(2, 8)])
    if rng.random() < 0.5:
        text = text.rstrip(".").lower()
    request = rng.choice(
        (
            "Repeat exactly: {t}",
            "Repeat this: {t}",
            "Copy this text exactly:\n{t}",
            "Say exactly: {t}",
            "Repeat after me: {t}",
            "Copy: {t}",
        )
    )
    return request.format(t=text), text


def about_me(rng: Random, conversation: Conversation) -> None:
    """The user tells something and asks for it, in one message or two."""
    value, tellings, answer, questions = _ME[rng.choice(list(_ME))]
    parts = {"v": value(rng), "p": rng.choice(words.ANIMALS), "q": rng.choice(words.PLACES)}
    if not answer:
        parts["p"] = rng.choice(
            (
                "code",
                "password",
                "wifi password",
                "wifi code",
                "door code",
                "number",
                "pin",
                "secret word",
                rng.choice(words.ATTRIBUTES),
                words.invent(rng),
            )
        )
    telling = rng.choice(tellings)
    told, question = telling.format(**parts), rng.choice(questions)
    if not answer:
        subject = telling.split(" is ")[0].format(**parts)
        question = question.replace(
            "{t}", (subject[0].lower() + subject[1:]).replace("my ", rng.choice(("my ", "the ")))
        )
        answer_text = told
    else:
        answer_text = answer.format(**parts)
    question = question.format(**parts)
    if rng.random() < 0.3:
        question, told_typed = question.lower(), told.rstrip(".") if rng.random() < 0.5 else told
        told_typed = told_typed[0].lower() + told_typed[1:]
    else:
        told_typed = told
    if rng.random() < 0.45:
        joined = told_typed if told_typed.endswith(".") else f"{told_typed}."
        conversation.exchange(f"{joined} {question}", answer_text)
        return
    conversation.exchange(
        told_typed,
        f"Noted: {told}"
        if not told.startswith(("Hi", "Hello"))
        else f"Noted: M{told.split(', m', 1)[1]}",
    )
    for _ in range(rng.choice((0, 0, 0, 1, 2, 5))):
        conversation.exchange(*first_words.small_talk(rng))
    conversation.exchange(question, answer_text)


def bare_notes(rng: Random, conversation: Conversation) -> None:
    """Facts told without a request to remember them, and questions about them."""
    known = facts.draw_many(rng, rng.choice((1, 1, 2, 3, 4)))
    text = " ".join(fact.note if fact.note.endswith(".") else f"{fact.note}." for fact in known)
    conversation.exchange(text, f"Noted: {text}")
    for _ in range(rng.randint(0, 2)):
        fact = rng.choice(known)
        conversation.exchange(
            typed(rng, fact.question(rng), 0.0),
            fact.note if fact.note.endswith(".") else f"{fact.note}.",
        )


def lower_question(rng: Random, conversation: Conversation) -> None:
    """Notes and a question in one message."""
    known = facts.draw_many(rng, rng.randint(1, 6))
    fact = rng.choice(known)
    question = fact.question(rng)
    question = question[0].lower() + question[1:] if rng.random() < 0.5 else question
    question = question.rstrip("?.") if rng.random() < 0.4 else question
    head, notes = rng.choice(memory_tasks.HEADERS), memory_tasks.listed(rng, known)
    conversation.exchange(f"{head}{notes}{rng.choice(memory_tasks.CLOSINGS)}{question}", fact.note)


_HELLO = listed(
    "Hi|Hello|Hey|Hi|Hello|Good morning|Good evening|Good afternoon|Hi there|Hello there|Hey "
    "there|Greetings"
)
_I_AM = tuple(_LISTED["_I_AM"])
_GOOD_NEWS = tuple(_LISTED["_GOOD_NEWS"])
_BAD_NEWS = tuple(_LISTED["_BAD_NEWS"])
_KIN = "sister brother mother father friend cousin daughter son uncle aunt neighbour boss".split()


def introduction(rng: Random, conversation: Conversation) -> None:
    """The user introduces himself and asks for his name later."""
    name = words.invent(rng, True) if rng.random() < 0.25 else rng.choice(open_words.NAMES)
    hello, form = rng.choice(_HELLO), rng.choice(_I_AM)
    answer = hello if hello.startswith("Good") else "Hello"
    said = f"{hello}{rng.choice((', ', ', ', '! ', ' ', '. '))}{form.format(v=name)}"
    if rng.random() < 0.2:
        said = open_words.start_upper(form.format(v=name))
        answer = "Hello"
    said += rng.choice((".", ".", "!", "", ", nice to meet you.", ". Nice to meet you!"))
    if rng.random() < 0.15:
        said = said.lower()
        name = name.lower()
    conversation.exchange(said, f"{answer}, {name}! How can I help you?")
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        conversation.exchange(*first_words.small_talk(rng))
    if rng.random() < 0.6:
        question = rng.choice(
            ("What is my name?", "Who am I?", "Do you know my name?", "Do you remember my name?")
        )
        conversation.exchange(typed(rng, question, 0.0), f"Your name is {name}.")


def news(rng: Random) -> tuple[str, str]:
    """Good or bad news, and a glad or sorry answer."""
    texts, answer = rng.choice(
        ((_GOOD_NEWS, "I am glad to hear that."), (_BAD_NEWS, "I am sorry to hear that."))
    )
    text = rng.choice(texts).format(
        p=rng.choice(words.THINGS),
        e=rng.choice(("exam", "test", "driving test", "final", "course")),
        k=rng.choice(_KIN),
        f=rng.choice(words.FOODS),
        a=rng.choice((*words.ANIMALS, *words.ANIMALS, "hamster", "goldfish", "grandmother")),
    )
    return typed(rng, text, 0.05), answer


def sum_beyond(rng: Random) -> tuple[str, str]:
    """Sums that the model cannot do: large numbers, three numbers, other operations."""
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    kind = rng.random()
    if kind < 0.35:
        first = rng.randint(100, rng.choice((999, 999, 9999, 999_999)))
        second = rng.randint(1, rng.choice((99, 999, 9999)))
        if rng.random() < 0.4:
            first, second = second, first
        text = rng.choice(_SUMS).format(a=first, b=second)
    elif kind < 0.55:
        plus = rng.choice((" + ", "+", " plus ", " and "))
        first, second = (first % 10, second % 10) if rng.random() < 0.5 else (first, second)
        text = rng.choice(_SUMS).format(
            a=first, b=f"{second}{plus}{rng.choice((rng.randint(1, 9), rng.randint(1, 99)))}"
        )
    else:
        sign, word = rng.choice(
            (
                ("-", "minus"),
                ("*", "times"),
                ("/", "divided by"),
                ("x", "times"),
                ("^", "to the power of"),
            )
        )
        form = rng.choice([form for form in _SUMS if "+" in form or "plus" in form])
        text = form.replace("+", sign).replace("plus", word).format(a=first, b=second)
    return typed(rng, text, 0.0), beyond.DO
