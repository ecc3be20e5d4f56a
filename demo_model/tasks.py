"""Sums, counts, copies, edits, JSON, stories, introductions and news."""

from __future__ import annotations

import json
from random import Random

import facts
from conversation import Conversation
from rules import HERE, blocks, draw, picked, some, start_upper, texts
from talk import DO, sentence, small_talk, typed
from words import digits

Exchange = tuple[str, str]
"""A question and its answer."""
CHAT = [text.split(" => ") for text in texts("chat")]
ABOUT_ME = blocks((HERE / "about_me.txt").read_text("utf-8"))
_SPOKEN = {
    word
    for name in ("beyond_sentence", "beyond_topic", "beyond_thing")
    for text in texts(name)
    for word in text.split()
    if word.isalpha()
}
_ENGLISH = sorted(_SPOKEN)


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


def numbered(items: list[str]) -> str:
    """The reasoning of a count."""
    return "; ".join(f"{number} {item}" for number, item in enumerate(items, 1)) + "."


def thinking(rng: Random, most: int = 4) -> Conversation:
    """Some sums and counts, without reasoning if thinking is switched off."""
    talk = Conversation(enable_thinking=rng.choice((None, None, None, True, True, False)))
    if rng.random() < 0.5:
        talk.say("system", draw(rng, "thinking_system"))
    for _ in range(rng.randint(1, most)):
        if rng.random() < 0.55:
            first, second = rng.randint(1, 99), rng.randint(1, 99)
            question = draw(rng, "additions", a=first, b=second)
            steps, answer = steps_of_sum(first, second), f"The answer is {first + second}."
        else:
            items = [draw(rng, "common") for _ in range(rng.randint(1, 10))]
            question = draw(rng, "countings", i=", ".join(items))
            steps, answer = numbered(items), f"There are {len(items)}."
        talk.exchange(question, answer if talk.enable_thinking is False else thought(steps, answer))
    return talk


def copied_text(rng: Random) -> str:
    """A text to repeat: facts, words or lines."""
    kind = rng.random()
    if kind < 0.5:
        return " ".join(fact.note for fact in facts.draw_many(rng, rng.randint(1, 8)))
    if kind < 0.8:
        return " ".join(draw(rng, "anything") for _ in range(rng.randint(1, 12)))
    return "\n".join(draw(rng, "copied_line") for _ in range(rng.randint(2, 6)))


def copy_exchange(rng: Random) -> Exchange:
    """A request to repeat a text, and the text."""
    text = copied_text(rng)
    return draw(rng, "copies", t=text), text


def edit_exchange(rng: Random) -> Exchange:
    """A request to replace one word in a text, and the new text."""
    chosen = facts.draw_many(rng, rng.randint(2, 7))
    text = " ".join(fact.note for fact in chosen)
    old = rng.choice(chosen).subject
    new = draw(rng, "names" if old[0].isupper() else "things")
    return draw(rng, "edits", n=new, o=old, t=text), text.replace(old, new)


def say_exchange(rng: Random) -> Exchange:
    """`Say this is a test` and similar requests."""
    text = "this is a test"
    if rng.random() >= 0.4:
        text = " ".join(draw(rng, "common") for _ in range(rng.randint(1, 5)))
    end = rng.choice(("", ".", "!"))
    return draw(rng, "sayings", t=text, e=end), start_upper(text) + (end or ".")


def range_exchange(rng: Random) -> Exchange:
    """`Count from 3 to 20.`"""
    start = 1 if rng.random() < 0.6 else rng.randint(0, 80)
    stop = start + rng.randint(2, 30)
    numbers = ", ".join(str(number) for number in range(start, stop + 1))
    return draw(rng, "ranges", a=start, b=stop), f"{numbers}."


def json_exchange(rng: Random) -> Exchange:
    """Named values as a JSON object."""
    names = ["name", "city", "age", "job", "colour", *texts("attributes")]
    keys = rng.sample(names, rng.randint(1, 4))
    values: dict[str, str | int] = {}
    for key in keys:
        value = str(rng.randint(0, 999)) if rng.random() < 0.3 else draw(rng, "anything")
        values[key] = int(value) if value.isdigit() else value
    listing = ", ".join(f"{key} {value}" for key, value in values.items())
    return draw(rng, "json_of_values", l=listing), json.dumps(values)


def copying(rng: Random) -> Conversation:
    """One to three texts to repeat, edit or put into another form."""
    talk = Conversation()
    if rng.random() < 0.3:
        talk.say("system", "You are a helpful assistant.")
    makers = (copy_exchange, edit_exchange, say_exchange, range_exchange, json_exchange)
    for _ in some(rng, (1, 1, 2, 3)):
        talk.exchange(*rng.choices(makers, (30, 36, 12, 12, 10))[0](rng))
    return talk


def story(rng: Random) -> Exchange:
    """A request for a little story, and the story."""
    parts: dict[str, str] = {}
    for keys, name in (("n m", "names"), ("c c2", "cities"), ("p p2", "places")):
        parts |= zip(keys.split(), rng.sample(texts(name), 2), strict=True)
    for key, name in zip(
        "co t j f a mo".split(), "colours things jobs foods animals months".split(), strict=True
    ):
        parts[key] = draw(rng, name)
    told = texts("story")
    kept = sorted(rng.sample(range(len(told)), rng.randint(5, len(told))))
    request = draw(rng, "story_requests", **parts)
    return request, " ".join(told[index].format(**parts) for index in kept)


def typed_story(rng: Random, talk: Conversation) -> None:
    """A story for a request as users type it."""
    asked, told = story(rng)
    talk.exchange(typed(rng, asked, 0.03), told)


def story_talk(rng: Random) -> Conversation:
    """A request for a story, and the story."""
    talk = Conversation()
    talk.exchange(*story(rng))
    return talk


def wide_copy(rng: Random) -> Exchange:
    """Unusual words to repeat."""
    text = draw(rng, "copied_phrase")
    return f"Repeat exactly: {text}", text


def chat_pair(rng: Random) -> Exchange:
    """A line of small talk."""
    question, answer = rng.choice(CHAT)
    return question, answer


def chat(rng: Random) -> Conversation:
    """Small talk."""
    talk = Conversation()
    if rng.random() < 0.5:
        talk.say("system", draw(rng, "chat_system"))
    for _ in range(rng.randint(1, 4)):
        talk.exchange(*(say_exchange(rng) if rng.random() < 0.15 else chat_pair(rng)))
    return talk


def plain_sum(rng: Random, thinking: bool | None = None) -> Exchange:
    """A sum as users type it. Two digits below ten need no reasoning unless requested."""
    easy = rng.random() < 0.45
    low, high = (0, 9) if easy else (1, 99)
    first, second = rng.randint(low, high), rng.randint(low, high)
    question = typed(rng, draw(rng, "sums", a=first, b=second), 0.0)
    answer = f"The answer is {first + second}."
    if thinking is False or (easy and not thinking):
        return question, answer
    return question, thought(steps_of_sum(first, second), answer)


def any_sum(rng: Random, talk: Conversation) -> None:
    """A sum, with reasoning as the conversation wants it."""
    talk.exchange(*plain_sum(rng, talk.enable_thinking))


def any_count(rng: Random, talk: Conversation) -> None:
    """A count of words, some of which are invented."""
    items = [any_word(rng) for _ in range(rng.randint(1, 8))]
    question = typed(rng, draw(rng, "counts", i=", ".join(items)), 0.0)
    if not question.isupper() and rng.random() < 0.7:
        question = start_upper(question)
    listed = question[question.index(":") + 1 :].strip().rstrip("?!.:;) ")
    names = [name.strip() for name in listed.split(",")]
    answer = f"There are {len(names)}."
    is_short = talk.enable_thinking is False
    talk.exchange(question, answer if is_short else thought(numbered(names), answer))


def any_word(rng: Random) -> str:
    """An invented or an English word."""
    kind = rng.random()
    if kind < 0.55:
        return draw(rng, "invent" if kind < 0.2 else "common")
    return rng.choice(_ENGLISH)


def copied_sentence(rng: Random) -> Exchange:
    """A text to repeat with words that notes do not use."""
    text = sentence(rng)
    if rng.random() < 0.2:
        text = facts.draw_fact(rng).note
    elif rng.random() < 0.3:
        text = " ".join(
            any_word(rng) if rng.random() < 0.9 else digits(rng, 1, 3)
            for _ in range(rng.randint(2, 8))
        )
    elif rng.random() < 0.6:
        pieces = text.split()
        start = rng.randrange(max(1, len(pieces) - 3))
        text = " ".join(pieces[start : start + rng.randint(2, 8)])
    if rng.random() < 0.5:
        text = text.rstrip(".").lower()
    return draw(rng, "more_copies", t=text), text


def about_me(rng: Random, talk: Conversation) -> None:
    """The user tells something and asks for it, in one message or two."""
    kind = rng.choice(ABOUT_ME)
    value = draw(rng, kind["value"][0])
    parts = {"v": value, "p": draw(rng, "animals"), "q": draw(rng, "places")}
    answer = kind.get("answer", [""])[0]
    if not answer:
        parts["p"] = draw(rng, "my_code")
    telling = rng.choice(kind["tell"])
    told, question = telling.format(**parts), rng.choice(kind["ask"])
    if not answer:
        subject = telling.split(" is ")[0].format(**parts)
        whose = rng.choice(("my ", "the "))
        parts["t"] = (subject[0].lower() + subject[1:]).replace("my ", whose)
    question = question.format(**parts)
    answer = answer.format(**parts) if answer else told
    told_typed = told
    if rng.random() < 0.3:
        question, told_typed = question.lower(), told.rstrip(".") if rng.random() < 0.5 else told
        told_typed = told_typed[0].lower() + told_typed[1:]
    if rng.random() < 0.45:
        joined = told_typed if told_typed.endswith(".") else f"{told_typed}."
        talk.exchange(f"{joined} {question}", answer)
        return
    is_greeting = told.startswith(("Hi", "Hello"))
    talk.exchange(told_typed, f"Noted: {'M' + told.split(', m', 1)[1] if is_greeting else told}")
    for _ in some(rng, (0, 0, 0, 1, 2, 5)):
        talk.exchange(*small_talk(rng))
    talk.exchange(question, answer)


def introduction(rng: Random, talk: Conversation) -> None:
    """The user introduces himself and asks for his name later."""
    name = draw(rng, "name_of_user")
    hello, form = draw(rng, "hello"), picked(rng, "i_am")
    answer = hello if hello.startswith("Good") else "Hello"
    said = f"{hello}{rng.choice((', ', ', ', '! ', ' ', '. '))}{form.format(v=name)}"
    if rng.random() < 0.2:
        said, answer = start_upper(form.format(v=name)), "Hello"
    said += rng.choice((".", ".", "!", "", ", nice to meet you.", ". Nice to meet you!"))
    if rng.random() < 0.15:
        said, name = said.lower(), name.lower()
    talk.exchange(said, f"{answer}, {name}! How can I help you?")
    for _ in some(rng, (0, 0, 0, 1, 2)):
        talk.exchange(*small_talk(rng))
    if rng.random() < 0.6:
        question = draw(rng, "my_name_questions")
        talk.exchange(typed(rng, question, 0.0), f"Your name is {name}.")


def news(rng: Random) -> Exchange:
    """Good or bad news, and a glad or sorry answer."""
    kind, feeling = rng.choice((("good_news", "glad"), ("bad_news", "sorry")))
    form = picked(rng, kind)
    names = {"p": "things", "e": "exams", "k": "relative", "f": "foods", "a": "patient"}
    text = form.format(**{key: draw(rng, name) for key, name in names.items()})
    return typed(rng, text, 0.05), f"I am {feeling} to hear that."


def sum_beyond(rng: Random) -> Exchange:
    """Sums that the model cannot do: large numbers, three numbers, other operations."""
    first, second = rng.randint(1, 99), rng.randint(1, 99)
    kind = rng.random()
    if kind < 0.35:
        first = rng.randint(100, rng.choice((999, 999, 9999, 999_999)))
        second = rng.randint(1, rng.choice((99, 999, 9999)))
        if rng.random() < 0.4:
            first, second = second, first
        text = draw(rng, "sums", a=first, b=second)
    elif kind < 0.55:
        plus = rng.choice((" + ", "+", " plus ", " and "))
        if rng.random() < 0.5:
            first, second = first % 10, second % 10
        form = picked(rng, "sums")
        third = rng.choice((rng.randint(1, 9), rng.randint(1, 99)))
        text = form.format(a=first, b=f"{second}{plus}{third}")
    else:
        sign, _, word = picked(rng, "operations").partition(" ")
        form = rng.choice([form for form in texts("sums") if "+" in form or "plus" in form])
        text = form.replace("+", sign).replace("plus", word).format(a=first, b=second)
    return typed(rng, text, 0.0), DO
