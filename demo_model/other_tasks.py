"""Sums, counts, copies, edits, JSON, stories and small talk."""

from __future__ import annotations

import json
from random import Random

import facts
import words
from conversation import Conversation
from talks import CAN_DO
from words import lists_of


def thought(thinking: str, answer: str) -> str:
    """An answer after reasoning."""
    return f"<think>\n{thinking}\n</think>\n\n{answer}"


def steps_of_sum(first: int, second: int) -> str:
    """Tens, ones, and both together."""
    tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
    return (
        f"{first} + {second}: tens {first // 10 * 10} + {second // 10 * 10} = {tens}, "
        f"ones {first % 10} + {second % 10} = {ones}, {tens} + {ones} = {first + second}."
    )


def addition(rng: Random) -> tuple[str, str, str]:
    """A sum: question, reasoning, answer."""
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    question = rng.choice(
        (
            f"What is {first} plus {second}?",
            f"Add {first} and {second}.",
            f"What is {first} + {second}?",
            f"{first} + {second}",
            f"How much is {first} plus {second}?",
            f"Please add {first} and {second}.",
        )
    )
    return question, steps_of_sum(first, second), f"The answer is {first + second}."


def counting(rng: Random) -> tuple[str, str, str]:
    """A count: question, reasoning, answer."""
    items = [words.common_word(rng) for _ in range(rng.randint(1, 10))]
    question = rng.choice(
        (
            "Count these: {i}.",
            "How many are these: {i}?",
            "How many words are in this list: {i}?",
            "Count the items: {i}",
        )
    ).format(i=", ".join(items))
    steps = "; ".join(f"{number} {item}" for number, item in enumerate(items, 1)) + "."
    return question, steps, f"There are {len(items)}."


def reckon(rng: Random, conversation: Conversation) -> None:
    """A sum or count, without reasoning if thinking is switched off."""
    question, steps, answer = addition(rng) if rng.random() < 0.55 else counting(rng)
    conversation.exchange(
        question, answer if conversation.enable_thinking is False else thought(steps, answer)
    )


def thinking(rng: Random, most: int = 4) -> Conversation:
    """Some sums and counts."""
    conversation = Conversation(enable_thinking=rng.choice((None, None, None, True, True, False)))
    if rng.random() < 0.5:
        conversation.say(
            "system",
            rng.choice(
                (
                    "Think before you answer.",
                    "You are a careful assistant. Think first.",
                    "You are a helpful assistant.",
                )
            ),
        )
    for _ in range(rng.randint(1, most)):
        reckon(rng, conversation)
    return conversation


def copied_text(rng: Random) -> str:
    """A text to repeat: facts, words or lines."""
    kind = rng.random()
    if kind < 0.5:
        return " ".join(fact.note for fact in facts.draw_many(rng, rng.randint(1, 8)))
    if kind < 0.8:
        return " ".join(words.anything(rng) for _ in range(rng.randint(1, 12)))
    return "\n".join(
        f"{words.common_word(rng)}: {words.anything(rng)}" for _ in range(rng.randint(2, 6))
    )


def copy_exchange(rng: Random) -> tuple[str, str]:
    """A request to repeat a text, and the text."""
    text = copied_text(rng)
    request = rng.choice(
        (
            "Repeat exactly: {t}",
            "Repeat this: {t}",
            "Copy this text exactly:\n{t}",
            "Say exactly: {t}",
            "Repeat after me: {t}",
        )
    )
    return request.format(t=text), text


def edit_exchange(rng: Random) -> tuple[str, str]:
    """A request to replace one word in a text, and the new text."""
    chosen = facts.draw_many(rng, rng.randint(2, 7))
    text = " ".join(fact.note for fact in chosen)
    old = rng.choice(chosen).subject
    new = rng.choice(words.NAMES) if old[0].isupper() else rng.choice(words.THINGS)
    request = rng.choice(
        (
            "Rewrite this with {n} for {o}: {t}",
            "Replace {o} with {n}: {t}",
            "Replace {o} by {n} in this text:\n{t}",
            "Change {o} to {n}: {t}",
        )
    )
    return request.format(n=new, o=old, t=text), text.replace(old, new)


def say_exchange(rng: Random) -> tuple[str, str]:
    """`Say this is a test` and similar requests."""
    text = (
        "this is a test"
        if rng.random() < 0.4
        else " ".join(words.common_word(rng) for _ in range(rng.randint(1, 5)))
    )
    end = rng.choice(("", ".", "!"))
    sentence = text[0].upper() + text[1:]
    return rng.choice(("Say {t}{e}", "Please say {t}{e}", "Say: {t}{e}")).format(
        t=text, e=end
    ), sentence + (end or ".")


def range_exchange(rng: Random) -> tuple[str, str]:
    """`Count from 3 to 20.`"""
    start = 1 if rng.random() < 0.6 else rng.randint(0, 80)
    stop = start + rng.randint(2, 30)
    return rng.choice(
        (
            f"Count from {start} to {stop}.",
            f"Count from {start} to {stop}",
            f"Count up from {start} to {stop}.",
        )
    ), ", ".join(str(number) for number in range(start, stop + 1)) + "."


def json_exchange(rng: Random) -> tuple[str, str]:
    """Named values as a JSON object."""
    keys = rng.sample(
        ["name", "city", "age", "job", "colour", *words.ATTRIBUTES], rng.randint(1, 4)
    )
    values = {
        key: rng.randint(0, 999) if rng.random() < 0.3 else words.anything(rng) for key in keys
    }
    values = {
        key: int(value) if isinstance(value, str) and value.isdigit() else value
        for key, value in values.items()
    }
    listing = ", ".join(f"{key} {value}" for key, value in values.items())
    return rng.choice(
        (
            f"Write as JSON: {listing}",
            f"Give me a JSON object with {listing}.",
            f"Answer in JSON: {listing}",
        )
    ), json.dumps(values)


def copying(rng: Random) -> Conversation:
    """One to three texts to repeat, edit or put into another form."""
    conversation = Conversation()
    if rng.random() < 0.3:
        conversation.say("system", "You are a helpful assistant.")
    for _ in range(rng.choice((1, 1, 2, 3))):
        maker = rng.choices(
            (copy_exchange, edit_exchange, say_exchange, range_exchange, json_exchange),
            (30, 36, 12, 12, 10),
        )[0]
        conversation.exchange(*maker(rng))
    return conversation


_LISTED = lists_of("other_tasks")
STORY = tuple(_LISTED["STORY"])
STORY_REQUESTS = tuple(_LISTED["STORY_REQUESTS"])


def story(rng: Random) -> Conversation:
    """A little story."""
    people, cities, places = (
        rng.sample(words.NAMES, 2),
        rng.sample(words.CITIES, 2),
        rng.sample(words.PLACES, 2),
    )
    parts = {
        "n": people[0],
        "m": people[1],
        "c": cities[0],
        "c2": cities[1],
        "p": places[0],
        "p2": places[1],
        "co": rng.choice(words.COLOURS),
        "t": rng.choice(words.THINGS),
        "j": rng.choice(words.JOBS),
        "f": rng.choice(words.FOODS),
        "a": rng.choice(words.ANIMALS),
        "mo": rng.choice(words.MONTHS),
    }
    kept = sorted(rng.sample(range(len(STORY)), rng.randint(5, len(STORY))))
    conversation = Conversation()
    conversation.exchange(
        rng.choice(STORY_REQUESTS).format(**parts),
        " ".join(STORY[index].format(**parts) for index in kept),
    )
    return conversation


CHAT = (
    ("Hello!", "Hello! How can I help you?"),
    ("Hello", "Hello! How can I help you?"),
    ("Hi there.", "Hello! How can I help you?"),
    ("Hi", "Hello! How can I help you?"),
    ("Good morning.", "Good morning! How can I help you?"),
    (
        "Who are you?",
        "I am the demo model of Holdfast. I am small, but I remember what you tell me.",
    ),
    ("What is your name?", "I am the demo model of Holdfast."),
    ("What are you?", "I am a very small language model. I remember what you tell me."),
    ("What can you do?", CAN_DO),
    ("Can you help me?", "Yes. Give me some notes and ask me about them."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Good bye.", "Good bye!"),
    ("Bye", "Good bye!"),
    ("How are you?", "I am running well, thank you."),
    ("Are you there?", "Yes, I am here."),
    ("Ping", "Pong."),
    ("ping", "Pong."),
    ("Tell me a joke.", "Why did the lamp go to school? To become bright."),
    ("Ok.", "Good."),
    ("Yes.", "Good."),
    ("Test", "The test works."),
    ("Are you a human?", "No. I am a very small language model."),
    (
        "Write a haiku.",
        "A small lamp at night,\nall my notes are in my head,\nask me, I will tell.",
    ),
)


def chat(rng: Random) -> Conversation:
    """Small talk."""
    conversation = Conversation()
    if rng.random() < 0.5:
        conversation.say(
            "system",
            rng.choice(
                ("You are a helpful assistant.", "You are a friendly assistant.", "Be brief.")
            ),
        )
    for _ in range(rng.randint(1, 4)):
        conversation.exchange(*(say_exchange(rng) if rng.random() < 0.15 else rng.choice(CHAT)))
    return conversation
