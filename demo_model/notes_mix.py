"""The data of the last trainings: notes in any words, tool results, and a replay of everything
else.
"""

from __future__ import annotations

from collections.abc import Callable
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


def talk(rng: Random) -> Conversation:
    """Small talk with introductions and news."""
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
    """Tasks that training with notes had weakened: unfamiliar tools, parallel calls, sums, small
    talk.
    """
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


def written_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation for the last training of the draft model; notes get longer with `done`."""
    return _allowed(lambda: _written(rng, done))


def evened_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation for the last training of `holdfast-demo`; `done` makes no difference."""
    return _allowed(lambda: _evened(rng))


def longest_written(done: float) -> int:
    """The longest conversation, in tokens. Short ones come first: they teach most per token."""
    return 320 if done <= 0.15 else 768 if done <= 0.35 else 1536


def longest_evened(done: float) -> int:
    """The longest conversation, in tokens."""
    return 768


def _written(rng: Random, done: float) -> Conversation | PlainText:
    kind = rng.random()
    if kind < 0.48:
        most = 8 if done < 0.1 else 16 if done < 0.4 else 40
        return open_notes.conversation(rng, most, doubt=0.35)
    if kind < 0.55:
        return told_results.conversation(rng)
    return _strengthened(rng) if kind < 0.82 else _replayed(rng, done)


def _evened(rng: Random) -> Conversation | PlainText:
    kind = rng.random()
    if kind < 0.24:
        return open_notes.conversation(rng, 24, doubt=0.45)
    if kind < 0.29:
        return told_results.conversation(rng)
    if kind < 0.43:
        return plain_text(rng)
    if kind < 0.57:
        return agent_mix.odd_tool_talk(rng)
    if kind < 0.65:
        return agent_mix.several_talk(rng)
    if kind < 0.71:
        return agent_mix.file_talk(rng)
    return _strengthened(rng)


def _allowed(draw: Callable[[], Conversation | PlainText]) -> Conversation | PlainText:
    """Draw until a conversation contains nothing that is held out."""
    while True:
        chosen = draw()
        if first_mix.is_held_out(chosen):
            continue
        if isinstance(chosen, PlainText) or not agent_mix.holds_held_out(chosen):
            return chosen
