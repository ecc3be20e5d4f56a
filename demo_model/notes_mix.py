"""The fifth continued training: notes in anybody's words, results told, introductions; all else
replayed.
"""

from __future__ import annotations

from random import Random

import agent_mix
import first_mix
import mixture
import newcomer_tasks
import open_notes
import other_tasks
import told_results
from conversation import Conversation
from plain_text import PlainText, plain_text

_NEW_AT_FIRST, _NEW = 0.8, 0.65
"""Of the conversations until a quarter is done, and after it."""
_LENGTHS = ((0.15, 320), (0.35, 768), (1.0, 1536))


def talk(rng: Random) -> Conversation:
    """Small talk: introductions and news among what a newcomer types."""
    kind = rng.random()
    if kind < 0.35:
        return agent_mix.puzzled_talk(rng)
    if kind < 0.65:
        return first_mix.newcomer(rng)
    conversation = Conversation()
    for _ in range(rng.choice((1, 1, 2, 3))):
        kind = rng.random()
        if kind < 0.26:
            newcomer_tasks.introduction(rng, conversation)
        elif kind < 0.52:
            conversation.exchange(*newcomer_tasks.news(rng))
        elif kind < 0.85:
            conversation.exchange(*newcomer_tasks.sum_beyond(rng))
        else:
            conversation.exchange(*newcomer_tasks.any_sum(rng, None))
    return conversation


def _new(rng: Random, done: float) -> Conversation:
    if rng.random() < 0.16:
        return told_results.conversation(rng)
    most = 8 if done < 0.1 else 16 if done < 0.3 else 40
    return open_notes.conversation(rng, most)


def _replayed(rng: Random, done: float) -> Conversation | PlainText:
    kind = rng.random()
    if kind < 0.27:
        return talk(rng)
    if kind < 0.3:
        return first_mix.sums_at_once(rng)
    if kind < 0.7:
        return agent_mix.with_forms_at(rng, done)
    if kind < 0.8:
        return first_mix.conversation_at(rng, done)
    return mixture.task(rng, 40) if kind < 0.91 else agent_mix.conversation_at(rng, 0.5)


def _strengthened(rng: Random) -> Conversation | PlainText:
    """What the new notes had weakened: tools with odd names, several calls, sums, small talk."""
    kind = rng.random()
    if kind < 0.08:
        return plain_text(rng)
    if kind < 0.34:
        return first_mix.newcomer(rng)
    if kind < 0.54:
        return talk(rng)
    if kind < 0.58:
        return other_tasks.thinking(rng, 8)
    if kind < 0.6:
        return first_mix.sums_at_once(rng)
    if kind < 0.72:
        return agent_mix.odd_tool_talk(rng)
    if kind < 0.84:
        return agent_mix.several_talk(rng)
    if kind < 0.88:
        return agent_mix.word_talk(rng)
    if kind < 0.91:
        return mixture.with_tools(rng, 5, 0.5)
    return _replayed(rng, 1.0)


def balanced_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the sixth training; it does not depend on how much is done."""
    while True:
        kind = rng.random()
        if kind < 0.3:
            chosen: Conversation | PlainText = open_notes.conversation(rng, 16)
        elif kind < 0.38:
            chosen = told_results.conversation(rng)
        else:
            chosen = _strengthened(rng)
        if first_mix.is_held_out(chosen):
            continue
        if isinstance(chosen, PlainText) or not agent_mix.holds_held_out(chosen):
            return chosen


def _written_at(rng: Random, done: float) -> Conversation | PlainText:
    kind = rng.random()
    if kind < 0.48:
        return open_notes.conversation(
            rng, 8 if done < 0.1 else 16 if done < 0.4 else 40, doubt=0.35
        )
    if kind < 0.55:
        return told_results.conversation(rng)
    return _strengthened(rng) if kind < 0.82 else _replayed(rng, done)


def written_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the seventh training: notes of many frames written by hand; all else is
    kept up.
    """
    while True:
        chosen = _written_at(rng, done)
        if first_mix.is_held_out(chosen):
            continue
        if isinstance(chosen, PlainText) or not agent_mix.holds_held_out(chosen):
            return chosen


def settled_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the eighth training, short and slow: notes as in the seventh, and more
    tools and small talk.
    """
    while True:
        kind = rng.random()
        if kind < 0.4:
            chosen: Conversation | PlainText = open_notes.conversation(rng, 24, doubt=0.42)
        elif kind < 0.47:
            chosen = told_results.conversation(rng)
        elif kind < 0.62:
            chosen = agent_mix.odd_tool_talk(rng)
        elif kind < 0.74:
            chosen = agent_mix.several_talk(rng)
        else:
            chosen = _strengthened(rng)
        if first_mix.is_held_out(chosen):
            continue
        if isinstance(chosen, PlainText) or not agent_mix.holds_held_out(chosen):
            return chosen


def evened_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the ninth training, short and slow: raw text, tools, files and small talk
    beside notes.
    """
    while True:
        kind = rng.random()
        if kind < 0.24:
            chosen: Conversation | PlainText = open_notes.conversation(rng, 24, doubt=0.45)
        elif kind < 0.29:
            chosen = told_results.conversation(rng)
        elif kind < 0.43:
            chosen = plain_text(rng)
        elif kind < 0.57:
            chosen = agent_mix.odd_tool_talk(rng)
        elif kind < 0.65:
            chosen = agent_mix.several_talk(rng)
        elif kind < 0.71:
            chosen = agent_mix.file_talk(rng)
        else:
            chosen = _strengthened(rng)
        if first_mix.is_held_out(chosen):
            continue
        if isinstance(chosen, PlainText) or not agent_mix.holds_held_out(chosen):
            return chosen


def longest_of_all(done: float) -> int:
    """The longest conversation of the sixth training."""
    return _LENGTHS[1][1]


def conversation_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation for the time when this share of the training is done."""
    new = _NEW_AT_FIRST if done < 0.25 else _NEW
    while True:
        is_new = rng.random() < new
        chosen = _new(rng, done) if is_new else _replayed(rng, done)
        if first_mix.is_held_out(chosen):
            continue
        if is_new and isinstance(chosen, Conversation) and agent_mix.holds_held_out(chosen):
            continue
        return chosen


def longest_at(done: float) -> int:
    """The longest conversation in tokens: short ones first, for they teach most for their tokens."""
    return next(tokens for until, tokens in _LENGTHS if done <= until)
