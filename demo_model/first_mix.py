"""First words, small talk, honest answers and raw text, mixed with a replay of the first mixture."""

from __future__ import annotations

from random import Random

import beyond
import facts
import first_words
import memory_tasks
import mixture
import newcomer_tasks
import openings
import other_tasks
import tool_tasks
import words
from conversation import Conversation
from plain_text import PlainText, plain_text
from spelling import typed
from words import lists_of

RAW, NEW = 0.2, 0.5
"""Draws below the first are raw text, below the second new conversations, the rest is replay: 87 %
of the tokens.
"""

TEXT_TASKS = (
    newcomer_tasks.copied_sentence,
    newcomer_tasks.copied_sentence,
    other_tasks.copy_exchange,
    other_tasks.say_exchange,
    other_tasks.edit_exchange,
    other_tasks.edit_exchange,
    other_tasks.json_exchange,
    other_tasks.range_exchange,
)
"""What is done with a text or for its own sake: a request and its answer."""
_LISTED = lists_of("first_mix")
_SYSTEM = tuple(_LISTED["_SYSTEM"])


def one_turn(rng: Random, conversation: Conversation) -> None:
    """Add an exchange of a newcomer."""
    kind = rng.random()
    if kind < 0.5:
        conversation.exchange(*first_words.small_talk(rng))
    elif kind < 0.73:
        conversation.exchange(*beyond.beyond(rng))
    elif kind < 0.82:
        conversation.exchange(*newcomer_tasks.any_sum(rng, conversation.enable_thinking))
    elif kind < 0.85:
        conversation.exchange(*newcomer_tasks.any_count(rng, conversation.enable_thinking))
    elif kind < 0.9:
        newcomer_tasks.about_me(rng, conversation)
    elif kind < 0.92:
        newcomer_tasks.bare_notes(rng, conversation)
    elif kind < 0.95:
        newcomer_tasks.lower_question(rng, conversation)
    elif kind < 0.96:
        asked, told = other_tasks.story(rng).messages
        conversation.exchange(typed(rng, asked["content"], 0.03), told["content"])
    else:
        conversation.exchange(*rng.choice(TEXT_TASKS)(rng))


def newcomer(rng: Random) -> Conversation:
    """First words, alone or followed by other messages."""
    conversation = Conversation()
    if rng.random() < 0.12:
        conversation.enable_thinking = rng.random() < 0.3
    if rng.random() < 0.3:
        conversation.say("system", rng.choice(_SYSTEM))
    for _ in range(rng.choice((1, 1, 1, 1, 1, 2, 3, 4, 6, 9))):
        one_turn(rng, conversation)
    return conversation


def beside_notes(rng: Random) -> Conversation:
    """Small talk and honest answers between questions about notes; no note answers questions about
    the world.
    """
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
            conversation.exchange(*newcomer_tasks.any_sum(rng, None))
    return conversation


def beside_tools(rng: Random) -> Conversation:
    """Tools are offered, but a greeting or an unrelated message needs no call."""
    tools = tool_tasks.offer(rng, 3)
    conversation = tool_tasks.begin(rng, tools)
    for _ in range(rng.randint(1, 4)):
        kind = rng.random()
        if kind < 0.6:
            conversation.exchange(*first_words.small_talk(rng))
        elif kind < 0.7:
            conversation.exchange(*newcomer_tasks.any_sum(rng, None))
        else:
            tool_tasks.use_tools(rng, conversation, tools)
    return conversation


def long_chat(rng: Random) -> Conversation:
    """A long first conversation: small talk, little tasks, and facts that are asked for much later."""
    conversation = Conversation()
    known: list[facts.Fact] = []
    for _ in range(rng.randint(8, 36)):
        kind = rng.random()
        if kind < 0.4:
            conversation.exchange(*first_words.small_talk(rng))
        elif kind < 0.52:
            said, answer = beyond.beyond(rng)
            conversation.exchange(
                said, memory_tasks.ABSENT if known and answer == beyond.KNOW else answer
            )
        elif kind < 0.62:
            conversation.exchange(*newcomer_tasks.any_sum(rng, None))
        elif kind < 0.72:
            known = memory_tasks.take_note(rng, conversation, known, bare=rng.random() < 0.5)
        elif kind < 0.88 and known:
            conversation.exchange(*memory_tasks.one_question(rng, known, 0.15))
        elif kind < 0.91:
            newcomer_tasks.about_me(rng, conversation)
        else:
            conversation.exchange(*rng.choice(TEXT_TASKS)(rng))
    return conversation


def sums_at_once(rng: Random) -> Conversation:
    """Sums with thinking switched off."""
    conversation = Conversation(enable_thinking=False)
    for _ in range(rng.randint(3, 10)):
        conversation.exchange(*newcomer_tasks.any_sum(rng, False))
    return conversation


def unknown_plain(rng: Random) -> Conversation:
    """Questions that only a note could answer, without notes."""
    conversation = Conversation()
    if rng.random() < 0.3:
        conversation.say("system", rng.choice(_SYSTEM))
    for _ in range(rng.choice((1, 1, 2))):
        conversation.exchange(
            typed(rng, memory_tasks.asked(rng, facts.draw(rng).question(rng)), 0.03), beyond.KNOW
        )
    return conversation


def fresh(rng: Random) -> Conversation:
    """A conversation of a new kind."""
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
    if kind < 0.9:
        return long_chat(rng)
    return newcomer(rng)


def replayed(rng: Random) -> Conversation:
    """The first mixture after its first third, with some more tools, which are forgotten first."""
    if rng.random() < 0.12:
        return mixture.with_tools(rng, 5, rng.choice((0.0, 0.0, 0.5)))
    return mixture.conversation_at(rng, rng.uniform(0.3, 1.0))


def is_held_out(conversation: Conversation | PlainText) -> bool:
    """Whether a user's message is a held-out opening."""
    if isinstance(conversation, PlainText):
        return openings.plain(conversation.text) in openings.HELD_OUT_PLAIN
    return any(
        message["role"] == "user" and openings.plain(message["content"]) in openings.HELD_OUT_PLAIN
        for message in conversation.messages
    )


def conversation_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of this mixture; `done` makes no difference."""
    while True:
        kind = rng.random()
        chosen = plain_text(rng) if kind < RAW else fresh(rng) if kind < NEW else replayed(rng)
        if not is_held_out(chosen):
            return chosen
