"""Draws conversations by the tables in `rules/mixtures.txt`."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import fact_notes
import facts
import file_agent
import json_answers
import odd_tools
import open_notes
import openings
import talk as small
import tasks
import told_results
import toolbox
from conversation import Conversation, PlainText
from plain_texts import plain_text
from rules import complete, draw, picked, row_of, some, texts
from toolbox import Call
from words import is_allowed, wide_phrase, wide_word

Drawn = Conversation | PlainText


def written_at(rng: Random, done: float) -> Drawn:
    """A conversation for the last training of the draft model. done: the completed share of the
    training, in which notes get longer.
    """
    most = 8 if done < 0.1 else 16 if done < 0.4 else 40
    return checked(rng, "written", most=most)


def evened_at(rng: Random, done: float) -> Drawn:
    """A conversation for the last training of `holdfast-demo`; `done` is ignored."""
    return checked(rng, "evened")


def longest_written(done: float) -> int:
    """The longest conversation, in tokens. Short ones come first: they teach most per token."""
    return 320 if done <= 0.15 else 768 if done <= 0.35 else 1536


def longest_evened(done: float) -> int:
    """The longest conversation, in tokens."""
    return 768


def mixed(rng: Random, name: str, **values: Any) -> Drawn:
    """A conversation of a mixture. values: for the arguments in its rows."""
    return _carried_out(rng, complete(rng, picked(rng, name), values))


def _carried_out(rng: Random, row: str) -> Drawn:
    maker, *arguments = row.split()
    if maker in MAKERS:
        return MAKERS[maker](rng, *_numbers(arguments))
    if maker in ("checked", "checked_openings"):
        return checked(rng, " ".join(arguments), words=maker == "checked")
    return mixed(rng, maker)


def _numbers(arguments: list[str]) -> list[float]:
    return [float(text) if "." in text else int(text) for text in arguments]


def checked(rng: Random, row: str, *, words: bool = True, **values: Any) -> Drawn:
    """A conversation that contains no held-out opening and, if `words`, no held-out word."""
    while True:
        chosen = mixed(rng, row, **values) if values else _carried_out(rng, row)
        if not is_held_out(chosen) and not (words and holds_held_out(chosen)):
            return chosen


def is_held_out(drawn: Drawn) -> bool:
    """Whether a user's message is a held-out opening."""
    said = (
        [drawn.text]
        if isinstance(drawn, PlainText)
        else [message["content"] for message in drawn.messages if message["role"] == "user"]
    )
    return any(openings.plain(text) in openings.HELD_OUT_PLAIN for text in said)


def holds_held_out(drawn: Drawn) -> bool:
    """Whether a conversation contains a held-out word."""
    if isinstance(drawn, PlainText):
        return False
    return not is_allowed(json.dumps([drawn.tools, drawn.messages]))


# -- turns


def turn(rng: Random, talk: Conversation, name: str) -> None:
    """Add a turn of a table, or this turn."""
    row = row_of(rng, name, lambda row: bool(talk.known) or not row.startswith("known "))
    kind, *arguments = row.removeprefix("known ").split()
    if kind in EXCHANGES:
        talk.exchange(*EXCHANGES[kind](rng))
    elif kind in TURNS:
        TURNS[kind](rng, talk, *_numbers(arguments))
    else:
        turn(rng, talk, kind)


def turns(rng: Random, talk: Conversation, count: int, name: str) -> Conversation:
    """The conversation with `count` more turns."""
    for _ in range(count):
        turn(rng, talk, name)
    return talk


def _odd_plan(rng: Random, offered: list[odd_tools.OddTool]) -> tuple[str, list[list[Call]]]:
    """A request for invented tools and its calls, by step."""
    kind = rng.random()
    if kind < 0.1:
        for tool in offered:
            if (many := odd_tools.ask_for_many(rng, tool)) is not None:
                return many[0], [many[1]]
    if kind < 0.58:
        request, call = odd_tools.ask(rng, rng.choice(offered))
        return request, [[call]]
    counts = (2, 2, 2, 3, 3, 4) if kind < 0.86 else (2, 2, 3)
    asked = [odd_tools.ask_sentence(rng, rng.choice(offered)) for _ in some(rng, counts)]
    requests, calls = [text for text, _ in asked], [call for _, call in asked]
    if kind < 0.86:
        return rng.choice((" ", " ", " And ", " Also: ", " Also, ", "\n")).join(requests), [calls]
    later = " ".join(f"Then: {text}" for text in requests[1:])
    return f"First: {requests[0]} {later}", [[call] for call in calls]


def _odd_result(rng: Random) -> tuple[str, str]:
    """Like `toolbox.result_of`, with unusual words."""
    if rng.random() < 0.4:
        return toolbox.result_of(rng)
    if rng.random() < 0.5:
        values = {
            wide_word(rng): rng.choice((draw(rng, "wide_value"), rng.randint(0, 9999)))
            for _ in range(rng.randint(1, 3))
        }
        return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())
    text = wide_phrase(rng, 6)
    return text, text


def _odd_tool_task(rng: Random, talk: Conversation) -> None:
    request, steps = _odd_plan(rng, talk.offered)
    done = [(calls, [_odd_result(rng) for _ in calls]) for calls in steps]
    toolbox.answer_with(talk, request, done)


def _named(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names.split()}


EXCHANGES: dict[str, Callable[[Random], tuple[str, str]]] = {
    **_named(small, "small_talk beyond puzzle"),
    **_named(tasks, "plain_sum news sum_beyond chat_pair copied_sentence copy_exchange"),
    **_named(tasks, "say_exchange edit_exchange json_exchange range_exchange wide_copy"),
}
TURNS: dict[str, Callable[..., None]] = {
    **_named(tasks, "any_sum any_count about_me introduction typed_story"),
    **_named(fact_notes, "bare_notes lower_question question note note_at_times_bare beyond_notes"),
    "use_tools": toolbox.use_tools,
    "odd_tool_task": _odd_tool_task,
    "file_task": file_agent.turn,
}


# -- conversations


def newcomer(rng: Random) -> Conversation:
    """First words, alone or followed by other messages."""
    talk = Conversation()
    if rng.random() < 0.12:
        talk.enable_thinking = rng.random() < 0.3
    if rng.random() < 0.3:
        talk.say("system", draw(rng, "talk_system"))
    return turns(rng, talk, rng.choice((1, 1, 1, 1, 1, 2, 3, 4, 6, 9)), "newcomer_turn")


def between_notes(rng: Random) -> Conversation:
    """Small talk and honest answers between questions about notes; no note answers questions about
    the world.
    """
    talk = Conversation(known=facts.draw_many(rng, rng.randint(1, 20)))
    talk.say("system", fact_notes.introduced(rng, talk.known))
    return turns(rng, talk, rng.randint(2, 7), "turn_between_notes")


def unneeded_tools(rng: Random) -> Conversation:
    """Tools are offered, but a greeting or an unrelated message needs no call."""
    talk = toolbox.begin(rng, toolbox.offer(rng, 3))
    return turns(rng, talk, rng.randint(1, 4), "turn_without_tools")


def sums_without_thinking(rng: Random) -> Conversation:
    """Sums with thinking switched off."""
    talk = Conversation(enable_thinking=False)
    return turns(rng, talk, rng.randint(3, 10), "any_sum")


def puzzled(rng: Random) -> Conversation:
    """Small talk and little tasks mixed with unintelligible messages."""
    return turns(rng, Conversation(), rng.choice((1, 1, 1, 2, 3, 5, 8)), "puzzled_turn")


def introductions(rng: Random) -> Conversation:
    """Introductions, news and sums."""
    return turns(rng, Conversation(), rng.choice((1, 1, 2, 3)), "introduction_turn")


def long_chat(rng: Random) -> Conversation:
    """A long first conversation, with questions about facts told much earlier."""
    return turns(rng, Conversation(), rng.randint(8, 36), "long_chat_turn")


def unknown_plain(rng: Random) -> Conversation:
    """Questions that only a note could answer, without notes."""
    talk = Conversation()
    if rng.random() < 0.3:
        talk.say("system", draw(rng, "talk_system"))
    for _ in some(rng, (1, 1, 2)):
        question = fact_notes.asked(rng, facts.draw_fact(rng).question(rng))
        talk.exchange(small.typed(rng, question, 0.03), small.KNOW)
    return talk


def short(rng: Random) -> Conversation:
    """Short earlier tasks, which suffer first while tools are learned."""
    if rng.random() < 0.2:
        return sums_without_thinking(rng)
    talk = Conversation()
    makers = ("json_exchange", "say_exchange", "copy_exchange", "edit_exchange")
    for _ in some(rng, (1, 1, 2, 3)):
        maker = rng.choice(makers)
        turn(rng, talk, "chat_pair" if rng.random() < 0.15 else maker)
    return talk


def odd_tools_talk(rng: Random) -> Conversation:
    """Invented tools and requests for them."""
    offered = odd_tools.family(rng, rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 5, 8, 12)))
    style = odd_tools.SchemaStyle.draw(rng)
    order = offered[:]
    rng.shuffle(order)
    talk = toolbox.begin(rng, [])
    talk.tools, talk.offered = [tool.schema(rng, style) for tool in order], offered
    return turns(rng, talk, rng.choice((1, 2, 3, 3, 4, 5)), "odd_tool_turn")


def several_calls(rng: Random) -> Conversation:
    """Few tools, known or invented, and several parallel calls in every turn. The model must learn
    when to stop.
    """
    old, new = toolbox.offer(rng, 4, rng.choice((0.0, 0.0, 0.5))), odd_tools.family(rng, 2)
    is_old = rng.choice((True, True, True, False))
    talk = toolbox.begin(rng, old if is_old else [])
    if not is_old:
        style = odd_tools.SchemaStyle.draw(rng)
        talk.tools = [tool.schema(rng, style) for tool in new]
    for _ in some(rng, (1, 2, 3, 4)):
        asked: list[tuple[str, list[Call]]] = []
        for _ in some(rng, (2, 2, 2, 3, 3, 3, 4)):
            request, call = (
                rng.choice(old).ask(rng) if is_old else odd_tools.ask(rng, rng.choice(new))
            )
            asked.append((request if request[-1] in ".?!" else f"{request}.", [call]))
        if rng.random() < 0.2 and is_old:
            asked = [pair for tool in old if (pair := tool.ask_for_two(rng))][:1] or asked
        joint = rng.choice((" ", " And ", " Also: "))
        calls = [call for _, some_calls in asked for call in some_calls]
        results = [(wide_word(rng),) * 2 if rng.random() < 0.6 else _odd_result(rng) for _ in calls]
        toolbox.answer_with(talk, joint.join(text for text, _ in asked), [(calls, results)])
    return talk


def files(rng: Random) -> Conversation:
    """An agent that works with files."""
    return turns(rng, file_agent.begin(rng), rng.choice((1, 1, 2, 2, 3, 4)), "file_turn")


def _looked_up(rng: Random, pairs: dict[str, str], fewest: int, most: int) -> Conversation:
    """Pairs in the system prompt, some of which are looked up."""
    talk = Conversation()
    talk.say("system", "\n".join(f"- {key}: {value}" for key, value in pairs.items()))
    for key in rng.sample(list(pairs), min(len(pairs), rng.randint(fewest, most))):
        talk.exchange(key, pairs[key])
    return talk


def unusual_words(rng: Random) -> Conversation:
    """Unusual words to copy and to look up."""
    if rng.random() < 0.5:
        text = " ".join(draw(rng, "copied_word") for _ in range(rng.randint(2, 25)))
        talk = Conversation()
        talk.exchange(f"Repeat exactly: {text}", text)
        return talk
    pairs = {draw(rng, "looked_up"): draw(rng, "wide_value") for _ in range(rng.randint(3, 20))}
    return _looked_up(rng, pairs, 3, 12)


def drill(rng: Random, most: int) -> Conversation:
    """Copying random words and looking up random pairs, which trains the attention heads that
    retrieval needs.
    """
    if rng.random() < 0.5:
        text = " ".join(draw(rng, "anything") for _ in range(rng.randint(3, min(most, 40))))
        talk = Conversation()
        talk.exchange(f"Repeat exactly: {text}", text)
        return talk
    pairs = {draw(rng, "drill_word"): draw(rng, "anything") for _ in range(rng.randint(3, most))}
    return _looked_up(rng, pairs, 3, 16)


def with_tools(rng: Random, most_notes: int, strange: float = 0.0) -> Conversation:
    """An agent's conversation: calls, results, chat, sums and, at times, notes in the system
    prompt.
    """
    offered = toolbox.offer(rng, 4, strange)
    talk = toolbox.begin(rng, offered)
    if rng.random() < 0.3:
        talk.known = facts.draw_many(rng, rng.randint(1, min(most_notes, 30)))
        talk.messages.clear()
        introduction = rng.choice(texts("introductions")).format(n="Ada")
        talk.say("system", f"{introduction}\n{fact_notes.listed_facts(rng, talk.known)}")
    return turns(rng, talk, rng.randint(1, 5), "tool_turn")


def task(rng: Random, most: int) -> Drawn:
    """Any conversation of the first training except the drill. most: the number of notes."""
    row = picked(rng, "tasks")
    low = 1 if rng.random() < 0.5 else max(1, most // 2)
    row = row.format(low=low, most=most, few=min(30, most), turns=10 + most // 8)
    talk = _carried_out(rng, row)
    if isinstance(talk, Conversation) and not row.startswith("thinking") and rng.random() < 0.15:
        talk.enable_thinking = rng.random() < 0.3
    return talk


def first_training(rng: Random) -> Drawn:
    """The first training from any time after its first third."""
    done = rng.uniform(0.3, 1.0)
    most_notes = int(10 + 180 * min(1.0, (done - 0.12) / 0.55) ** 1.3)
    if rng.random() < 0.1:
        return drill(rng, 12 + most_notes)
    if done >= 0.9 and rng.random() < 0.8:
        return mixed(rng, "finish")
    if done >= 0.7 and rng.random() < 0.72:
        return mixed(rng, "polish")
    if done < 0.7 and rng.random() < 0.22:
        return mixed(rng, "extra")
    return task(rng, most_notes)


_HERE = (
    "odd_tools_talk several_calls files newcomer sums_without_thinking unusual_words with_tools "
    "task puzzled introductions long_chat short unknown_plain between_notes unneeded_tools "
    "first_training"
)
MAKERS: dict[str, Callable[..., Drawn]] = {
    **{name: globals()[name] for name in _HERE.split()},
    **_named(tasks, "thinking copying story_talk chat"),
    **_named(fact_notes, "system_notes user_notes told_notes unknown"),
    **_named(json_answers, "json_talk forced_talk"),
    "notes": open_notes.conversation,
    "told_results": told_results.conversation,
    "plain_text": plain_text,
}
