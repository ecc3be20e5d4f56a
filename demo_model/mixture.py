"""The first mixture: a drill at first, then all tasks with more and more notes."""

from __future__ import annotations

from random import Random

import facts
import memory_tasks
import other_tasks
import tool_tasks
import words
from conversation import Conversation

DRILL_UNTIL = 0.12
"""The share of the training that is mostly drill."""
EXTRA_FROM, POLISH_FROM, FINISH_FROM = 0.3, 0.7, 0.9
"""From this share on there is more of what rests on retrieval and comes late: sums, counts, edits,
calls; and from the second share on most conversations are of that kind; from the third on odd
tools.
"""


def drill(rng: Random, most: int) -> Conversation:
    """Copying random words and looking up random pairs, which trains the attention heads that
    retrieval needs.
    """
    conversation = Conversation()
    if rng.random() < 0.5:
        text = " ".join(words.anything(rng) for _ in range(rng.randint(3, min(most, 40))))
        conversation.exchange(f"Repeat exactly: {text}", text)
        return conversation
    pairs = {_drill_word(rng): words.anything(rng) for _ in range(rng.randint(3, most))}
    conversation.say("system", "\n".join(f"- {key}: {value}" for key, value in pairs.items()))
    for key in rng.sample(list(pairs), min(len(pairs), rng.randint(3, 16))):
        conversation.exchange(key, pairs[key])
    return conversation


def _drill_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return f"{words.common_word(rng)} {words.common_word(rng)}"
    if kind < 0.7:
        return words.common_word(rng)
    return rng.choice(words.NAMES) if kind < 0.85 else words.invent(rng)


def with_tools(rng: Random, most_notes: int, strange: float = 0.0) -> Conversation:
    """An agent's conversation: calls, results, chat, sums and, at times, notes in the system
    prompt.
    """
    tools = tool_tasks.offer(rng, 4, strange)
    conversation = tool_tasks.begin(rng, tools)
    known = []
    if rng.random() < 0.3:
        known = facts.draw_many(rng, rng.randint(1, min(most_notes, 30)))
        if conversation.messages:
            conversation.messages.clear()
        conversation.say(
            "system",
            f"{rng.choice(memory_tasks.INTRODUCTIONS).format(n='Ada')}\n{memory_tasks.listed(rng, known)}",
        )
    for _ in range(rng.randint(1, 5)):
        kind = rng.random()
        if kind < 0.68:
            tool_tasks.use_tools(rng, conversation, tools)
        elif kind < 0.8 and known:
            conversation.exchange(*memory_tasks.one_question(rng, known))
        elif kind < 0.9:
            conversation.exchange(*rng.choice(other_tasks.CHAT))
        elif kind < 0.95:
            known = memory_tasks.take_note(rng, conversation, known)
        else:
            conversation.exchange(*other_tasks.copy_exchange(rng))
    return conversation


def task(rng: Random, most_notes: int) -> Conversation:
    """Any conversation except the drill."""
    kind = rng.random()
    low = 1 if rng.random() < 0.5 else max(1, most_notes // 2)
    if kind < 0.40:
        conversation = memory_tasks.system_notes(rng, low, most_notes, (3, 10 + most_notes // 8))
    elif kind < 0.48:
        conversation = memory_tasks.user_notes(rng, low, most_notes)
    elif kind < 0.53:
        conversation = memory_tasks.told_notes(rng, 1, min(30, most_notes))
    elif kind < 0.55:
        conversation = memory_tasks.unknown(rng)
    elif kind < 0.74:
        conversation = with_tools(rng, most_notes)
    elif kind < 0.82:
        return other_tasks.thinking(rng)
    elif kind < 0.94:
        conversation = other_tasks.copying(rng)
    elif kind < 0.965:
        conversation = other_tasks.story(rng)
    else:
        conversation = other_tasks.chat(rng)
    if rng.random() < 0.15:
        conversation.enable_thinking = rng.random() < 0.3
    return conversation


def extra(rng: Random) -> Conversation:
    """Short conversations of the tasks that are learned last."""
    kind = rng.random()
    if kind < 0.5:
        return other_tasks.thinking(rng, 8)
    if kind < 0.8:
        return other_tasks.copying(rng)
    return with_tools(rng, 5)


def polish(rng: Random) -> Conversation:
    """Short conversations of the tasks that still fail late: calls, edits, sums, unanswerable
    questions.
    """
    kind = rng.random()
    if kind < 0.45:
        return with_tools(rng, 5, rng.choice((0.0, 0.0, 0.5)))
    if kind < 0.62:
        return other_tasks.thinking(rng, 8)
    if kind < 0.82:
        return other_tasks.copying(rng)
    if kind < 0.92:
        return memory_tasks.system_notes(rng, 3, 30, (5, 12), 0.35)
    return memory_tasks.user_notes(rng, 1, 25)


def finish(rng: Random) -> Conversation:
    """The last conversations, mostly invented tools, parallel calls and edits."""
    kind = rng.random()
    if kind < 0.55:
        return with_tools(rng, 5, 0.7)
    if kind < 0.72:
        return memory_tasks.user_notes(rng, 1, 25)
    return other_tasks.copying(rng) if kind < 0.9 else polish(rng)


def most_notes_at(done: float) -> int:
    """The highest number of notes at this share of the training."""
    if done < DRILL_UNTIL:
        return 8
    return int(10 + 180 * min(1.0, (done - DRILL_UNTIL) / 0.55) ** 1.3)


def conversation_at(rng: Random, done: float) -> Conversation:
    """A conversation for this share of the training."""
    if rng.random() < (0.65 if done < DRILL_UNTIL else 0.1):
        return drill(rng, 12 if done < DRILL_UNTIL else 12 + most_notes_at(done))
    if done >= FINISH_FROM and rng.random() < 0.8:
        return finish(rng)
    if done >= POLISH_FROM and rng.random() < 0.72:
        return polish(rng)
    if EXTRA_FROM <= done < POLISH_FROM and rng.random() < 0.22:
        return extra(rng)
    return task(rng, most_notes_at(done))
