"""The continued training of first words: the old mixture replayed, and among it first words, small talk, the honest answer, raw text."""

from __future__ import annotations

from random import Random

import beyond
import facts
import first_words
import memory_tasks
import mixture
import openings
import other_tasks
import tool_tasks
import words
from conversation import Conversation
from plain_text import PlainText, plain_text
from spelling import typed

NEW = 0.66
"""The share of new conversations. They are short: about three tenths of the tokens."""

_SUMS = (
    "{a}+{b}", "{a} + {b}", "{a}+{b}=", "{a} + {b} =", "{a}+{b}=?", "{a} + {b} = ?", "{a} plus {b}", "What is {a}+{b}?", "What is {a} + {b}?", "What is {a} plus {b}?",
    "How much is {a}+{b}?", "How much is {a} + {b}?", "How much is {a} plus {b}?", "Calculate {a}+{b}.", "Calculate {a} + {b}.", "Compute {a} + {b}.", "Add {a} and {b}.",
    "Add {a} to {b}.", "Please add {a} and {b}.", "Can you add {a} and {b}?", "Could you add {a} and {b}, please?", "What is the sum of {a} and {b}?", "Sum of {a} and {b}",
    "The sum of {a} and {b}?", "What do {a} and {b} make?", "I need {a} + {b}.", "Tell me {a} plus {b}.", "What does {a}+{b} make?", "What's {a} and {b} together?", "Do you know {a}+{b}?",
    "Is {a}+{b} hard? What is it?", "And {a}+{b}?", "And {a} plus {b}?", "What about {a}+{b}?", "Sum {a} {b}", "{a} and {b} is", "Solve {a}+{b}.", "Work out {a} + {b}.",
)
_COUNTS = (
    "Count these words: {i}", "How many words: {i}", "How many words are these: {i}?", "Count: {i}", "How many items are in this list: {i}?", "How many are there: {i}?",
    "Please count these: {i}", "Can you count these words: {i}?", "How many things are in this list: {i}?", "How many words are in this list: {i}?",
)
_ME = {
    "name": (lambda rng: words.invent(rng, True) if rng.random() < 0.3 else rng.choice(words.NAMES), ("My name is {v}.", "I am called {v}.", "Hi, my name is {v}.", "Hello, my name is {v}."), "Your name is {v}.", ("What is my name?", "Who am I?", "What am I called?", "Do you know my name?", "Do you remember my name?", "Tell me my name.")),
    "city": (lambda rng: rng.choice(words.CITIES), ("I live in {v}.", "My home is in {v}.", "I am from {v}."), "You live in {v}.", ("Where do I live?", "What city do I live in?", "Where is my home?", "Where am I from?")),
    "colour": (lambda rng: rng.choice(words.COLOURS), ("My favourite colour is {v}.", "My favorite color is {v}."), "Your favourite colour is {v}.", ("What is my favourite colour?", "What is my favorite color?", "Which colour do I like best?")),
    "pet": (lambda rng: words.invent(rng, True) if rng.random() < 0.4 else rng.choice(words.NAMES), ("My {p} is called {v}.", "My {p}'s name is {v}.", "The name of my {p} is {v}."), "Your {p} is called {v}.", ("What is my {p} called?", "What is my {p}'s name?", "What is the name of my {p}?")),
    "job": (lambda rng: rng.choice(words.JOBS), ("I am a {v}.", "I work as a {v}."), "You work as a {v}.", ("What is my job?", "What do I work as?", "What do I do for a living?")),
    "code": (lambda rng: words.token_like(rng) if rng.random() < 0.4 else words.digits(rng, 3, 6), ("My {p} is {v}.", "The {p} of the {q} is {v}.", "The {p} is {v}.", "The {p} at the {q} is {v}."), "", ("What is {t}?", "Tell me {t}.", "What's {t}?", "Give me {t}.")),
}
_SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a friendly assistant.", "Be brief.", "You are Holdfast.", "Help the user.", "You are a careful assistant. Answer in one sentence.",
    "You are a helpful, honest assistant.", "You are an AI assistant.", "You are a chatbot.", "Answer politely.", "You are a coding agent.", "Today is Monday.", "Answer as well as you can.", "You are a helpful AI model that answers in English.",
)


def any_sum(rng: Random, thinking: bool | None) -> tuple[str, str]:
    """A sum as users type it. Two digits below ten need no thought unless it is asked for."""
    easy = rng.random() < 0.45
    first, second = (rng.randint(0, 9), rng.randint(0, 9)) if easy else (rng.randint(1, 99), rng.randint(1, 99))
    question = typed(rng, rng.choice(_SUMS).format(a=first, b=second), 0.0)
    answer = f"The answer is {first + second}."
    if thinking is False or (easy and not thinking):
        return question, answer
    tens, ones = first // 10 * 10 + second // 10 * 10, first % 10 + second % 10
    steps = f"{first} + {second}: tens {first // 10 * 10} + {second // 10 * 10} = {tens}, ones {first % 10} + {second % 10} = {ones}, {tens} + {ones} = {first + second}."
    return question, other_tasks.thought(steps, answer)


def any_count(rng: Random, thinking: bool | None) -> tuple[str, str]:
    """A count of words, some of them invented."""
    items = [words.invent(rng) if rng.random() < 0.25 else words.common_word(rng) for _ in range(rng.randint(1, 8))]
    question = typed(rng, rng.choice(_COUNTS).format(i=", ".join(items)), 0.0)
    if not question.isupper() and rng.random() < 0.7:
        question = question if question[0].isupper() else question[0].upper() + question[1:]
    listed = question[question.index(":") + 1 :].strip().rstrip("?!.:;) ")
    names = [name.strip() for name in listed.split(",")]
    answer = f"There are {len(names)}."
    steps = "; ".join(f"{number} {name}" for number, name in enumerate(names, 1)) + "."
    return question, answer if thinking is False else other_tasks.thought(steps, answer)


def about_me(rng: Random, conversation: Conversation) -> None:
    """The user tells something and asks for it, in one message or in two."""
    value, tellings, answer, questions = _ME[rng.choice(list(_ME))]
    parts = {"v": value(rng), "p": rng.choice(words.ANIMALS), "q": rng.choice(words.PLACES)}
    if not answer:
        parts["p"] = rng.choice(("code", "password", "wifi password", "wifi code", "door code", "number", "pin", "secret word", rng.choice(words.ATTRIBUTES), words.invent(rng)))
    telling = rng.choice(tellings)
    told, question = telling.format(**parts), rng.choice(questions)
    if not answer:
        subject = telling.split(" is ")[0].format(**parts)
        question = question.replace("{t}", (subject[0].lower() + subject[1:]).replace("my ", rng.choice(("my ", "the "))))
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
    conversation.exchange(told_typed, f"Noted: {told}" if not told.startswith(("Hi", "Hello")) else f"Noted: M{told.split(', m', 1)[1]}")
    for _ in range(rng.choice((0, 0, 1))):
        conversation.exchange(*first_words.small_talk(rng))
    conversation.exchange(question, answer_text)


def bare_notes(rng: Random, conversation: Conversation) -> None:
    """Facts told without a word about remembering them, then asked for."""
    known = facts.draw_many(rng, rng.choice((1, 1, 2, 3, 4)))
    text = " ".join(fact.note if fact.note.endswith(".") else f"{fact.note}." for fact in known)
    conversation.exchange(text, f"Noted: {text}")
    for _ in range(rng.randint(0, 2)):
        fact = rng.choice(known)
        conversation.exchange(typed(rng, fact.question(rng), 0.0), fact.note if fact.note.endswith(".") else f"{fact.note}.")


def lower_question(rng: Random, conversation: Conversation) -> None:
    """Notes in one message with a question as people type it."""
    known = facts.draw_many(rng, rng.randint(1, 6))
    fact = rng.choice(known)
    question = fact.question(rng)
    question = question[0].lower() + question[1:] if rng.random() < 0.5 else question
    question = question.rstrip("?.") if rng.random() < 0.4 else question
    head, notes = rng.choice(memory_tasks.HEADERS), memory_tasks.listed(rng, known)
    conversation.exchange(f"{head}{notes}{rng.choice(memory_tasks.CLOSINGS)}{question}", fact.note)


def one_turn(rng: Random, conversation: Conversation) -> None:
    """One exchange of what a newcomer types."""
    kind = rng.random()
    if kind < 0.43:
        conversation.exchange(*first_words.small_talk(rng))
    elif kind < 0.73:
        conversation.exchange(*beyond.beyond(rng))
    elif kind < 0.84:
        conversation.exchange(*any_sum(rng, conversation.enable_thinking))
    elif kind < 0.86:
        conversation.exchange(*any_count(rng, conversation.enable_thinking))
    elif kind < 0.9:
        about_me(rng, conversation)
    elif kind < 0.92:
        bare_notes(rng, conversation)
    elif kind < 0.95:
        lower_question(rng, conversation)
    elif kind < 0.96:
        asked, told = other_tasks.story(rng).messages
        conversation.exchange(typed(rng, asked["content"], 0.03), told["content"])
    else:
        maker = rng.choice((other_tasks.copy_exchange, other_tasks.say_exchange, other_tasks.edit_exchange, other_tasks.json_exchange))
        conversation.exchange(*maker(rng))


def newcomer(rng: Random) -> Conversation:
    """First words, alone or with more after them."""
    conversation = Conversation()
    if rng.random() < 0.12:
        conversation.enable_thinking = rng.random() < 0.3
    if rng.random() < 0.3:
        conversation.say("system", rng.choice(_SYSTEM))
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3, 4, 6))):
        one_turn(rng, conversation)
    return conversation


def beside_notes(rng: Random) -> Conversation:
    """Small talk and the honest answers between questions about notes; a question about the world has no note."""
    known = facts.draw_many(rng, rng.randint(1, 20))
    conversation = Conversation()
    introduction = rng.choice(memory_tasks.INTRODUCTIONS).format(n=rng.choice(words.NAMES))
    conversation.say("system", f"{introduction}\n{memory_tasks.listed(rng, known)}")
    for _ in range(rng.randint(2, 7)):
        kind = rng.random()
        if kind < 0.35:
            conversation.exchange(*first_words.small_talk(rng))
        elif kind < 0.75:
            conversation.exchange(*memory_tasks.one_question(rng, known, 0.25))
        elif kind < 0.85:
            said, answer = beyond.beyond(rng)
            conversation.exchange(said, memory_tasks.ABSENT if answer == beyond.KNOW else answer)
        elif kind < 0.95:
            known = memory_tasks.take_note(rng, conversation, known)
        else:
            conversation.exchange(*any_sum(rng, None))
    return conversation


def beside_tools(rng: Random) -> Conversation:
    """Tools are offered; a greeting, or what no tool is for, calls none."""
    tools = tool_tasks.offer(rng, 3)
    conversation = tool_tasks.begin(rng, tools)
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.6:
            conversation.exchange(*first_words.small_talk(rng))
        elif kind < 0.7:
            conversation.exchange(*any_sum(rng, None))
        else:
            tool_tasks.use_tools(rng, conversation, tools)
    return conversation


def sums_at_once(rng: Random) -> Conversation:
    """Sums with the thinking switched off."""
    conversation = Conversation(enable_thinking=False)
    for _ in range(rng.randint(3, 10)):
        conversation.exchange(*any_sum(rng, False))
    return conversation


def unknown_plain(rng: Random) -> Conversation:
    """Questions that only a note could answer, and there is none."""
    conversation = Conversation()
    if rng.random() < 0.3:
        conversation.say("system", rng.choice(_SYSTEM))
    for _ in range(rng.choice((1, 1, 2))):
        conversation.exchange(typed(rng, memory_tasks.asked(rng, facts.draw(rng).question(rng)), 0.03), beyond.KNOW)
    return conversation


def fresh(rng: Random) -> Conversation | PlainText:
    """One of the new conversations or texts."""
    kind = rng.random()
    if kind < 0.68:
        return newcomer(rng)
    if kind < 0.74:
        return unknown_plain(rng)
    if kind < 0.80:
        return beside_notes(rng)
    if kind < 0.84:
        return beside_tools(rng)
    if kind < 0.88:
        return sums_at_once(rng)
    return plain_text(rng)


def replayed(rng: Random) -> Conversation:
    """The old mixture as it was at any time after its first third."""
    return mixture.conversation_at(rng, rng.uniform(0.3, 1.0))


def is_held_out(conversation: Conversation | PlainText) -> bool:
    """Whether a user says one of the openings that are kept for judging."""
    if isinstance(conversation, PlainText):
        return openings.plain(conversation.text) in openings.HELD_OUT_PLAIN
    return any(
        message["role"] == "user" and openings.plain(message["content"]) in openings.HELD_OUT_PLAIN for message in conversation.messages
    )


def conversation_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the continued training; it does not depend on how much is done."""
    while True:
        chosen = fresh(rng) if rng.random() < NEW else replayed(rng)
        if not is_held_out(chosen):
            return chosen


def longest_at(done: float) -> int:
    """The longest conversation in tokens."""
    return 2560
