"""Conversations with unfamiliar tools, files and unusual words, and a replay of earlier data."""

from __future__ import annotations

import json
from functools import partial
from random import Random
from typing import Any

import beyond
import file_agent
import first_mix
import first_words
import json_answers
import mixture
import newcomer_tasks
import odd_requests
import odd_tools
import other_tasks
import tool_tasks
import words
from conversation import Conversation
from plain_text import PlainText
from wide_words import is_allowed, marked, wide_phrase, wide_value, wide_word

SHARES = (("replay", 0.58), ("tools", 0.07), ("several", 0.17), ("files", 0.14), ("words", 0.04))
LATE = (("replay", 0.4), ("short", 0.34), ("tools", 0.03), ("several", 0.14), ("files", 0.09))
"""Of the conversations drawn, before and after LATE_FROM; of the tokens see the README."""
LATE_FROM = 0.9

WITH_FORMS = (
    ("replay", 0.29),
    ("short", 0.08),
    ("several", 0.15),
    ("files", 0.03),
    ("tools", 0.04),
    ("json", 0.04),
    ("forms", 0.09),
    ("puzzled", 0.28),
)
"""Of the fourth: calls that are forced, of classes with fields, end."""


def several_requests(
    rng: Random, tools: list[odd_tools.OddTool]
) -> tuple[str, list[list[dict[str, Any]]]]:
    """Two to four requests in one message, and their parallel calls."""
    asked = [
        odd_requests.ask(rng, rng.choice(tools)) for _ in range(rng.choice((2, 2, 2, 3, 3, 4)))
    ]
    joint = rng.choice((" ", " ", " And ", " Also: ", " Also, ", "\n"))
    return joint.join(text if text[-1] in ".?!" else f"{text}." for text, _ in asked), [
        [call for _, call in asked]
    ]


def _plan(rng: Random, tools: list[odd_tools.OddTool]) -> tuple[str, list[list[dict[str, Any]]]]:
    """A request and its calls, by step."""
    kind = rng.random()
    if kind < 0.1:
        for tool in tools:
            if (many := odd_requests.ask_for_many(rng, tool)) is not None:
                return many[0], [many[1]]
    if kind < 0.58:
        request, call = odd_requests.ask(rng, rng.choice(tools))
        return request, [[call]]
    if kind < 0.86:
        return several_requests(rng, tools)
    steps = [odd_requests.ask(rng, rng.choice(tools)) for _ in range(rng.choice((2, 2, 3)))]
    texts = [text if text[-1] in ".?!" else f"{text}." for text, _ in steps]
    request = f"First: {texts[0]} " + " ".join(f"Then: {text}" for text in texts[1:])
    return request, [[call] for _, call in steps]


def _result(rng: Random) -> tuple[str, str]:
    """Like `tool_tasks.result_of`, with unusual words."""
    if rng.random() < 0.4:
        return tool_tasks.result_of(rng)
    if rng.random() < 0.5:
        values = {
            wide_word(rng): rng.choice((wide_value(rng), rng.randint(0, 9999)))
            for _ in range(rng.randint(1, 3))
        }
        return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())
    text = wide_phrase(rng, 6)
    return text, text


def _tool_turn(rng: Random, conversation: Conversation, tools: list[odd_tools.OddTool]) -> None:
    request, steps = _plan(rng, tools)
    conversation.say("user", request)
    told: list[str] = []
    for calls in steps:
        conversation.messages.append(tool_tasks.call_message(calls))
        for _ in calls:
            result, telling = _result(rng)
            conversation.say("tool", result)
            told.append(telling)
    conversation.say("assistant", tool_tasks.told_results(told))


def _other_turn(rng: Random, conversation: Conversation) -> None:
    """A turn that needs no tool."""
    kind = rng.random()
    if kind < 0.4:
        conversation.exchange(*first_words.small_talk(rng))
    elif kind < 0.65:
        conversation.exchange(*beyond.beyond(rng))
    elif kind < 0.8:
        conversation.exchange(*rng.choice(other_tasks.CHAT))
    elif kind < 0.9:
        conversation.exchange(*newcomer_tasks.any_sum(rng, None))
    else:
        conversation.exchange(*_copy(rng))


def odd_tool_talk(rng: Random) -> Conversation:
    """Invented tools and requests for them."""
    tools = odd_tools.family(rng, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 8, 12)))
    style = odd_tools.SchemaStyle.draw(rng)
    order = tools[:]
    rng.shuffle(order)
    conversation = tool_tasks.begin(rng, [])
    conversation.tools = [tool.schema(rng, style) for tool in order]
    for _ in range(rng.choice((1, 2, 3, 3, 4, 5))):
        if rng.random() < 0.13:
            _other_turn(rng, conversation)
        else:
            _tool_turn(rng, conversation, tools)
    return conversation


def several_talk(rng: Random) -> Conversation:
    """Few tools, known or invented, and several parallel calls in every turn. The model must learn
    when to stop.
    """
    old, new = tool_tasks.offer(rng, 4, rng.choice((0.0, 0.0, 0.5))), odd_tools.family(rng, 2)
    with_old, with_new = rng.choice(((True, False), (True, False), (True, False), (False, True)))
    conversation = tool_tasks.begin(rng, old if with_old else [])
    if with_new:
        style = odd_tools.SchemaStyle.draw(rng)
        conversation.tools = [
            *(conversation.tools or []),
            *(tool.schema(rng, style) for tool in new),
        ]
    for _ in range(rng.choice((1, 2, 3, 4))):
        asked: list[tuple[str, list[dict[str, Any]]]] = []
        for _ in range(rng.choice((2, 2, 2, 3, 3, 3, 4))):
            if with_old and (not with_new or rng.random() < 0.5):
                request, call = rng.choice(old).ask(rng)
            else:
                request, call = odd_requests.ask(rng, rng.choice(new))
            asked.append((request if request[-1] in ".?!" else f"{request}.", [call]))
        if rng.random() < 0.2:
            asked = [pair for tool in old if with_old and (pair := tool.ask_for_two(rng))][
                :1
            ] or asked
        conversation.say(
            "user", rng.choice((" ", " And ", " Also: ")).join(request for request, _ in asked)
        )
        calls = [call for _, one in asked for call in one]
        conversation.messages.append(tool_tasks.call_message(calls))
        told: list[str] = []
        for _ in calls:
            result, telling = (word := wide_word(rng), word) if rng.random() < 0.6 else _result(rng)
            conversation.say("tool", result)
            told.append(telling)
        conversation.say("assistant", tool_tasks.told_results(told))
    return conversation


def file_talk(rng: Random) -> Conversation:
    """An agent that works with files."""
    conversation, tools = file_agent.begin(rng)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        if rng.random() < 0.1:
            _other_turn(rng, conversation)
        else:
            file_agent.turn(rng, conversation, tools)
    return conversation


def _copy(rng: Random) -> tuple[str, str]:
    text = (
        wide_phrase(rng, 8)
        if rng.random() < 0.6
        else f"{wide_word(rng)} {marked(rng)} {wide_word(rng)}"
    )
    return f"Repeat exactly: {text}", text


def word_talk(rng: Random) -> Conversation:
    """Unusual words to copy and to look up."""
    conversation = Conversation()
    kind = rng.random()
    if kind < 0.5:
        text = " ".join(
            marked(rng) if rng.random() < 0.4 else wide_value(rng)
            for _ in range(rng.randint(2, 25))
        )
        conversation.exchange(f"Repeat exactly: {text}", text)
        return conversation
    pairs = {
        f"{wide_word(rng)} {words.common_word(rng)}"
        if rng.random() < 0.4
        else wide_value(rng): wide_value(rng)
        for _ in range(rng.randint(3, 20))
    }
    conversation.say("system", "\n".join(f"- {key}: {value}" for key, value in pairs.items()))
    for key in rng.sample(list(pairs), min(len(pairs), rng.randint(3, 12))):
        conversation.exchange(key, pairs[key])
    return conversation


def replayed(rng: Random) -> Conversation | PlainText:
    """A replay of both earlier mixtures, with more tools and edits."""
    kind = rng.random()
    if kind < 0.12:
        return mixture.with_tools(rng, 5, rng.choice((0.0, 0.5, 0.7)))
    return other_tasks.copying(rng) if kind < 0.21 else first_mix.conversation_at(rng, 0.0)


def short_talk(rng: Random) -> Conversation:
    """Short earlier tasks, which suffer first while tools are learned."""
    kind = rng.random()
    if kind < 0.2:
        return first_mix.sums_at_once(rng)
    conversation = Conversation()
    for _ in range(rng.choice((1, 1, 2, 3))):
        maker = rng.choice(
            (
                other_tasks.json_exchange,
                other_tasks.say_exchange,
                other_tasks.copy_exchange,
                other_tasks.edit_exchange,
            )
        )
        conversation.exchange(
            *(rng.choice(other_tasks.CHAT) if rng.random() < 0.15 else maker(rng))
        )
    return conversation


def puzzled_talk(rng: Random) -> Conversation:
    """Small talk and little tasks mixed with unintelligible messages."""
    conversation = Conversation()
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5, 8))):
        kind = rng.random()
        if kind < 0.2:
            conversation.exchange(beyond.unclear(rng), beyond.UNCLEAR)
        elif kind < 0.75:
            conversation.exchange(*first_words.small_talk(rng))
        else:
            conversation.exchange(*rng.choice(first_mix.TEXT_TASKS)(rng))
    return conversation


def holds_held_out(conversation: Conversation) -> bool:
    """Whether the conversation contains a held-out word."""
    return not is_allowed(json.dumps([conversation.tools, conversation.messages]))


def drawn(rng: Random, kind: str) -> Conversation | PlainText:
    """A conversation of this kind without held-out words."""
    maker = {
        "replay": replayed,
        "tools": odd_tool_talk,
        "several": several_talk,
        "short": short_talk,
        "files": file_talk,
        "words": word_talk,
        "json": json_answers.json_talk,
        "forms": partial(json_answers.forced_talk, called=0.75),
        "puzzled": puzzled_talk,
    }[kind]
    while True:
        chosen = maker(rng)
        if first_mix.is_held_out(chosen):
            continue
        if (
            kind in ("replay", "short")
            or isinstance(chosen, PlainText)
            or not holds_held_out(chosen)
        ):
            return chosen


def _of_shares(rng: Random, shares: tuple[tuple[str, float], ...]) -> Conversation | PlainText:
    return drawn(rng, rng.choices([kind for kind, _ in shares], [share for _, share in shares])[0])


def conversation_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation for this share of the training."""
    return _of_shares(rng, LATE if done >= LATE_FROM else SHARES)


def with_forms_at(rng: Random, done: float) -> Conversation | PlainText:
    """A conversation of the training with forced calls; `done` makes no difference."""
    return _of_shares(rng, WITH_FORMS)
