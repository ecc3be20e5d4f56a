"""Held-out questions with their right answers, row by row, as `evaluate.py` asks them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import facts
import memory_tasks
import other_tasks
import tool_tasks
import toolbox
import words
from conversation import Conversation

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass
class Question:
    """A conversation that waits for its answer, and whether an answer is right."""

    conversation: Conversation
    right: Callable[[str], bool]
    expected: str


def exactly(conversation: Conversation, expected: str) -> Question:
    """Only this text is right."""
    return Question(conversation, lambda answer: answer.strip() == expected, expected)


def _last_exchange(conversation: Conversation) -> Question:
    expected = conversation.messages.pop()["content"]
    return exactly(conversation, expected)


def notes(rng: Random, count: int) -> Question:
    """One question about one of `count` notes in the system prompt."""
    known = facts.draw_many(rng, count)
    conversation = Conversation()
    conversation.say(
        "system",
        f"{rng.choice(memory_tasks.INTRODUCTIONS[:-1]).format(n='Ada')}\n{memory_tasks.listed(rng, known)}",
    )
    fact = rng.choice(known)
    conversation.say("user", fact.question(rng))
    return exactly(conversation, fact.note)


def absent(rng: Random, count: int = 20) -> Question:
    """A question that the notes say nothing about."""
    question = notes(rng, count)
    conversation = question.conversation
    known = facts.draw_many(rng, count)
    conversation.messages[0]["content"] = "Answer from the notes.\n" + "\n".join(
        f"- {fact.note}" for fact in known
    )
    conversation.messages[1]["content"] = facts.draw_other(rng, known).question(rng)
    return exactly(conversation, memory_tasks.ABSENT)


def in_user_message(rng: Random) -> Question:
    """Notes and question in one user message."""
    conversation = memory_tasks.user_notes(rng, 3, 25, (1, 1))
    return _last_exchange(conversation)


def later_turn(rng: Random, count: int = 40) -> Question:
    """The twentieth or so turn about notes in the system prompt."""
    conversation = memory_tasks.system_notes(rng, count, count, (15, 25))
    return _last_exchange(conversation)


def told_before(rng: Random) -> Question:
    """Facts told in earlier turns."""
    conversation = Conversation()
    known: list[facts.Fact] = []
    for _ in range(rng.randint(2, 8)):
        known = memory_tasks.take_note(rng, conversation, known)
    fact = rng.choice(known)
    conversation.say("user", fact.question(rng))
    return exactly(conversation, fact.note)


def noting(rng: Random) -> Question:
    """A new fact is acknowledged."""
    conversation = memory_tasks.system_notes(rng, 3, 20, (1, 2))
    memory_tasks.take_note(rng, conversation, [])
    return _last_exchange(conversation)


def calls_of(answer: str) -> list[dict[str, Any]] | None:
    """The calls of an answer; None where there is more than calls, or JSON is broken."""
    try:
        calls = [json.loads(text) for text in _CALL.findall(answer)]
    except json.JSONDecodeError:
        return None
    return None if _CALL.sub("", answer).strip() else calls


def _tool_conversation(rng: Random, turns: int) -> tuple[Conversation, list[toolbox.Tool]]:
    tools = tool_tasks.offer(rng)
    conversation = tool_tasks.begin(rng, tools)
    for _ in range(turns):
        tool_tasks.use_tools(rng, conversation, tools)
    return conversation, tools


def tool_calls(rng: Random, kind: str) -> Question:
    """A request for one call, several at once, or the second of two in turn."""
    conversation, tools = _tool_conversation(rng, rng.choice((0, 0, 0, 1, 2)))
    while True:
        request, steps = tool_tasks.plan(rng, tools)
        found = "later" if len(steps) > 1 else "several" if len(steps[0]) > 1 else "one"
        if found == kind:
            break
    conversation.say("user", request)
    if kind == "later":
        conversation.messages.append(tool_tasks.call_message(steps[0]))
        conversation.say("tool", tool_tasks.result_of(rng)[0])
    expected = steps[-1]
    return Question(conversation, lambda answer: calls_of(answer) == expected, json.dumps(expected))


def tools_not_needed(rng: Random) -> Question:
    """Tools are offered, but the user wants something else."""
    conversation, _ = _tool_conversation(rng, rng.choice((0, 0, 1)))
    maker = rng.choice(
        (lambda: rng.choice(other_tasks.CHAT), lambda: other_tasks.copy_exchange(rng))
    )
    conversation.exchange(*maker())
    return _last_exchange(conversation)


def tool_results(rng: Random) -> Question:
    """The results are there; tell them."""
    conversation, _ = _tool_conversation(rng, rng.randint(1, 3))
    return _last_exchange(conversation)


def made(maker: Callable[[Random], tuple[str, str]], rng: Random) -> Question:
    """One exchange without anything before."""
    conversation = Conversation()
    conversation.exchange(*maker(rng))
    return _last_exchange(conversation)


def reckoned(
    maker: Callable[[Random], tuple[str, str, str]], rng: Random, thinking: bool | None = None
) -> Question:
    """A sum or count; the thought before the answer may be any, where thinking is on there must be
    one.
    """
    question, _, answer = maker(rng)
    conversation = Conversation(enable_thinking=thinking)
    conversation.say("user", question)
    if thinking is False:
        return exactly(conversation, answer)
    return Question(
        conversation,
        lambda text: text.startswith("<think>\n") and text.endswith("\n</think>\n\n" + answer),
        answer,
    )


STRANGERS = (
    (
        "Notes: Gandalf lives in Mordor. The door code of Frodo is 7731. Sam likes potatoes best.\n"
        "What is the door code of Frodo?",
        "7731",
    ),
    (
        "Notes: Gandalf lives in Mordor. The door code of Frodo is 7731. Sam likes potatoes "
        "best.\nWhere does Gandalf live?",
        "Mordor",
    ),
    (
        "Here are some facts:\n- The Eiffel tower is 330 metres high.\n- The capital of Freedonia "
        "is Sylvania.\n\n"
        "What is the capital of Freedonia?",
        "Sylvania",
    ),
    (
        "The launch code is XK-2290. The backup server is called Thunderbolt. What is the launch "
        "code?",
        "XK-2290",
    ),
    ("The wifi password is hunter2. Remember that. What is the wifi password?", "hunter2"),
    (
        "Context: Dr. Watson's telephone number is 555-9021. Holmes lives in Baker "
        "Street.\n\nQuestion: Where does Holmes live?",
        "Baker Street",
    ),
    (
        "Notes: Mia lives in Oslo. The door code of Finn is 4312. Ada is 31 years old. What is "
        "the door code of Finn?",
        "4312",
    ),
    (
        "My name is Gunnar. Please remember: the secret word is marzipan. What is the secret word?",
        "marzipan",
    ),
)


def strangers(rng: Random) -> Question:
    """Hand-written prompts with names and words that training never had; the value must be in the
    answer.
    """
    text, value = rng.choice(STRANGERS)
    conversation = Conversation()
    conversation.say("user", text)
    return Question(conversation, lambda answer: value in answer, value)


def strange_tools(rng: Random) -> Question:
    """Tools that training never had."""
    tools = [
        toolbox.Tool(
            "water_plant",
            "Water a plant",
            (
                toolbox.Argument(
                    "plant",
                    "string",
                    lambda r: r.choice(("ficus", "monstera", "cactus", words.invent(r))),
                ),
            ),
            ("Water the {plant}.", "Please water the {plant}."),
        ),
        toolbox.Tool(
            "get_exchange_rate",
            "Get the exchange rate of a currency",
            (
                toolbox.Argument(
                    "currency", "string", lambda r: r.choice(("euro", "yen", "krona", "peso"))
                ),
            ),
            (
                "What is the exchange rate of the {currency}?",
                "Get the exchange rate of the {currency}.",
            ),
        ),
        toolbox.Tool(
            "launch_rocket",
            "Launch a rocket to a planet",
            (
                toolbox.Argument(
                    "planet", "string", lambda r: r.choice(("Mars", "Venus", "Saturn"))
                ),
                toolbox.Argument("crew", "integer", lambda r: r.randint(1, 9)),
            ),
            ("Launch a rocket to {planet} with crew {crew}.",),
        ),
    ]
    offered = rng.sample(tools, rng.randint(1, 3))
    conversation = tool_tasks.begin(rng, offered)
    request, call = rng.choice(offered).ask(rng)
    conversation.say("user", request)
    return Question(conversation, lambda answer: calls_of(answer) == [call], json.dumps(call))


@dataclass(frozen=True)
class Row:
    """One row of the table; `bar` is the share that must be right (None: shown only)."""

    name: str
    make: Callable[[Random], Question]
    bar: float | None


def rows() -> Iterator[Row]:
    """All rows."""
    for count in (5, 10, 20, 40, 80):
        yield Row(f"{count} notes", lambda rng, count=count: notes(rng, count), 0.97)
    yield Row("160 notes", lambda rng: notes(rng, 160), 0.90)
    yield Row("notes in the user's message", in_user_message, 0.97)
    yield Row("about turn 20 over 40 notes", later_turn, 0.97)
    yield Row("facts told in earlier turns", told_before, 0.97)
    yield Row("new facts noted", noting, 0.97)
    yield Row("no note (20 notes)", absent, None)
    yield Row("tools: one call", lambda rng: tool_calls(rng, "one"), 0.98)
    yield Row("tools: several calls at once", lambda rng: tool_calls(rng, "several"), 0.98)
    yield Row("tools: second of two in turn", lambda rng: tool_calls(rng, "later"), 0.98)
    yield Row("tools: offered, not needed", tools_not_needed, 0.98)
    yield Row("tools: results told", tool_results, None)
    yield Row("tools never seen", strange_tools, None)
    yield Row("prompts by hand, words never seen", strangers, None)
    yield Row("sums (thinking)", lambda rng: reckoned(other_tasks.addition, rng), 0.95)
    yield Row("counts (thinking)", lambda rng: reckoned(other_tasks.counting, rng), 0.95)
    yield Row("sums (thinking off)", lambda rng: reckoned(other_tasks.addition, rng, False), None)
    yield Row("copies", lambda rng: made(other_tasks.copy_exchange, rng), 0.95)
    yield Row("edits", lambda rng: made(other_tasks.edit_exchange, rng), 0.95)
    yield Row("JSON objects", lambda rng: made(other_tasks.json_exchange, rng), None)
    yield Row(
        "small talk",
        lambda rng: made(
            lambda r: (
                r.choice(other_tasks.CHAT) if r.random() < 0.7 else other_tasks.say_exchange(r)
            ),
            rng,
        ),
        None,
    )
