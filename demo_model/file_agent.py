"""An agent that reads, lists, searches and writes files, and quotes the requested line."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import facts
import memory_tasks
from conversation import Conversation
from file_tools import Tools, offer
from files import ENDINGS, File, path_of, settings, shown, source
from tool_tasks import call_message
from wide_words import code, english, wide_phrase, wide_word
from words import lists_of

_LISTED = lists_of("file_agent")
_SYSTEM = tuple(_LISTED["_SYSTEM"])


def says(path: str, line: str) -> str:
    """The answer that quotes a line."""
    return f"{path} says: {line.strip()}"


def nothing(path: str, what: str) -> str:
    """The answer if no line contains it."""
    return f"{path} does not say that."


def _question(rng: Random, path: str, what: str) -> str:
    text = rng.choice(
        (
            f"What is the {what} in {path}?",
            f"What is the {what} in {path}?",
            f"What does {path} say about the {what}?",
            f"Which {what} does {path} have?",
            f"Read {path} and tell me the {what}.",
            f"Read {path}. What is the {what}?",
            f"Look into {path} and tell me the {what}.",
            f"Please find the {what} in {path}.",
            f"I need the {what} from {path}.",
            f"Tell me the {what} in the file {path}.",
            f"Open {path} and quote the line with the {what}.",
            f"In {path}, what is the {what}?",
            f"Find out the {what}. It is in {path}.",
            f"{path}: what is the {what}?",
            f"Show me the {what} from {path}.",
            f"Which line of {path} has the {what}?",
            f"Which {what} does {path} "
            f"{rng.choice(('say', 'set', 'use', 'need', 'require', 'name', 'give'))}?",
            f"What {what} is set in {path}?",
            f"Show me the line of {path} with the {what}.",
            f"What is the {what}? It is in {path}.",
            f"Please read {path} and tell me the {what}.",
        )
    )
    return text[0].lower() + text[1:] if rng.random() < 0.12 else text


def _call(
    rng: Random, conversation: Conversation, calls: list[dict[str, Any]], results: list[str]
) -> None:
    conversation.messages.append(call_message(calls))
    for result in results:
        conversation.say("tool", result)


def _follow_up(rng: Random, conversation: Conversation, file: File) -> None:
    """A question about another line of the file, which needs no call."""
    line = rng.choice(list(file.asked))
    what = rng.choice(file.asked[line])
    conversation.exchange(
        rng.choice(
            (
                f"And the {what}?",
                f"And what is the {what}?",
                f"What about the {what}?",
                f"What is the {what}?",
            )
        ),
        says(file.path, line),
    )


def read_and_tell(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """A question about a file: read it and quote the line."""
    file = settings(rng) if rng.random() < 0.7 else source(rng)
    kind = rng.random()
    if kind < 0.08:
        conversation.say("user", _question(rng, file.path, file.absent))
        _call(rng, conversation, [tools.call("read", file.path)], [shown(rng, file)])
        conversation.say("assistant", nothing(file.path, file.absent))
        return
    line = rng.choice(list(file.asked))
    conversation.say("user", _question(rng, file.path, rng.choice(file.asked[line])))
    if kind < 0.16:
        error = rng.choice(("file not found", "no such file", "permission denied", "not found"))
        told = rng.choice(
            (f"Error: {error}", f"Error: {error}: {file.path}", f"{file.path}: {error}")
        )
        _call(rng, conversation, [tools.call("read", file.path)], [told])
        conversation.say("assistant", f"I could not read {file.path}: {error}.")
        return
    _call(rng, conversation, [tools.call("read", file.path)], [shown(rng, file)])
    conversation.say("assistant", says(file.path, line))
    while rng.random() < 0.3:
        _follow_up(rng, conversation, file)


def notes_in_file(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """A file of notes: the answer is the note, as for notes in the prompt."""
    known = facts.draw_many(rng, rng.randint(2, 15))
    path = path_of(rng, "notes")
    fact = rng.choice(known)
    question = fact.question(rng)
    conversation.say(
        "user",
        rng.choice(
            (
                f"{question} It is in {path}.",
                f"Read {path}. {question}",
                f"{question} Look into {path}.",
                f"Read {path} and answer: {question}",
                f"According to {path}: {question}",
            )
        ),
    )
    form = rng.choice(("- {}", "{}", "* {}", "{}"))
    _call(
        rng,
        conversation,
        [tools.call("read", path)],
        ["\n".join(form.format(one.note) for one in known)],
    )
    conversation.say("assistant", fact.note)
    while rng.random() < 0.4:
        conversation.exchange(*memory_tasks.one_question(rng, known, 0.1))


def whole_file(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """A short file to read out."""
    file = settings(rng, most=6)
    conversation.say(
        "user",
        rng.choice(
            (
                f"Show me {file.path}.",
                f"What is in {file.path}?",
                f"Read {file.path}.",
                f"Print the file {file.path}.",
                f"Read the file {file.path}.",
            )
        ),
    )
    lines = file.lines if len(file.lines) > 1 else (*file.lines, f"# {wide_word(rng)}")
    text = "\n".join(lines)
    _call(rng, conversation, [tools.call("read", file.path)], [text])
    conversation.say("assistant", f"{file.path} says:\n{text}")


def two_files(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """Two or three files in parallel, or the same line of each."""
    files = [settings(rng, most=6) for _ in range(2)]
    paths = [file.path for file in files]
    listed = f"{', '.join(paths[:-1])} and {paths[-1]}"
    lines = [rng.choice(list(file.asked)) for file in files]
    whats = [rng.choice(file.asked[line]) for file, line in zip(files, lines, strict=True)]
    if rng.random() < 0.5:
        asked = " and ".join(
            f"the {what} in {path}" for what, path in zip(whats, paths, strict=True)
        )
        conversation.say(
            "user", rng.choice((f"What is {asked}?", f"Tell me {asked}.", f"I need {asked}."))
        )
    else:
        asked = " and ".join(f"the {what}" for what in whats)
        conversation.say(
            "user",
            rng.choice((f"Read {listed} and tell me {asked}.", f"Read {listed}. I need {asked}.")),
        )
    _call(
        rng,
        conversation,
        [tools.call("read", path) for path in paths],
        [shown(rng, file) for file in files],
    )
    conversation.say(
        "assistant", "\n".join(says(path, line) for path, line in zip(paths, lines, strict=True))
    )


def list_folder(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """List files, and sometimes read one of them."""
    folder = wide_word(rng) if rng.random() < 0.7 else f"{wide_word(rng)}/{wide_word(rng)}"
    kinds = rng.sample(
        ["yaml", "toml", "ini", "cfg", "txt", "md", "py", "json", "csv", "log", "js", "go"],
        rng.randint(2, 7),
    )
    names = [f"{wide_word(rng)}.{kind}" for kind in kinds]
    listing = rng.choice(
        (
            "\n".join(names),
            json.dumps(names),
            "\n".join(f"- {name}" for name in names),
            "\n".join(f"{folder}/{name}" for name in names),
        )
    )
    if rng.random() < 0.4:
        conversation.say(
            "user",
            rng.choice(
                (
                    f"Which files are in {folder}?",
                    f"List the files of {folder}.",
                    f"List {folder}.",
                    f"Show me the files in {folder}.",
                    f"What is in the folder {folder}?",
                )
            ),
        )
        _call(rng, conversation, [tools.call("list", folder)], [listing])
        conversation.say("assistant", f"The files are: {', '.join(names)}.")
        return
    file = settings(rng, folder="", most=8)
    kind = rng.choice(list(kinds))
    path = f"{folder}/{names[kinds.index(kind)]}"
    line = rng.choice(list(file.asked))
    what = rng.choice(file.asked[line])
    conversation.say(
        "user",
        rng.choice(
            (
                f"What is the {what} in the {kind} file in {folder}?",
                f"Look into the folder {folder}, read the {kind} file and tell me the {what}.",
                f"There is a {kind} file in {folder}. What is the {what} there?",
            )
        ),
    )
    _call(rng, conversation, [tools.call("list", folder)], [listing])
    _call(rng, conversation, [tools.call("read", path)], [shown(rng, file)])
    conversation.say("assistant", says(path, line))


def search(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """Search for a word."""
    word = rng.choice((wide_word(rng), f"{english(rng)}_{english(rng)}", code(rng)))
    found = [(path_of(rng, "code"), rng.randint(1, 400)) for _ in range(rng.choice((1, 1, 2, 3)))]
    conversation.say(
        "user",
        rng.choice(
            (
                f"Where is {word} used?",
                f"Search the files for {word}.",
                f"Which files contain {word}?",
                f"Find {word} in the files.",
                f"Where does {word} occur?",
                f"grep for {word}",
            )
        ),
    )
    if rng.random() < 0.15:
        _call(
            rng,
            conversation,
            [tools.call("grep", word)],
            [rng.choice(("", "No matches found", "no matches", "[]"))],
        )
        conversation.say("assistant", f"{word} was not found.")
        return
    lines = [
        f"{path}:{number}:{rng.choice(('', ' ', '    '))}{wide_word(rng)} "
        f"{rng.choice(('=', '(', '+', 'import'))} {word}"
        for path, number in found
    ]
    _call(rng, conversation, [tools.call("grep", word)], ["\n".join(lines)])
    conversation.say(
        "assistant",
        f"{word} is in {'; '.join(f'{path}, line {number}' for path, number in found)}.",
    )


def write(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """Write a file."""
    path, text = path_of(rng, rng.choice(list(ENDINGS))), wide_phrase(rng, 7)
    conversation.say(
        "user",
        rng.choice(
            (
                f"Write '{text}' to {path}.",
                f'Write "{text}" into {path}.',
                f"Create {path} with the text '{text}'.",
                f"Save '{text}' as {path}.",
                f"Put the line '{text}' into the file {path}.",
            )
        ),
    )
    _call(
        rng,
        conversation,
        [tools.call("write", path, text)],
        [
            rng.choice(
                (
                    "ok",
                    "OK",
                    "done",
                    f"Wrote {len(text)} bytes",
                    f"File written: {path}",
                    "success",
                    f"Wrote file {path} successfully.",
                )
            )
        ],
    )
    conversation.say("assistant", f"I wrote {path}.")


def edit(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """Replace a word in a file."""
    path, old, new = (
        path_of(rng, rng.choice(list(ENDINGS))),
        wide_phrase(rng, 3),
        wide_phrase(rng, 3),
    )
    conversation.say(
        "user",
        rng.choice(
            (
                f"Replace '{old}' by '{new}' in {path}.",
                f"In {path}, change '{old}' to '{new}'.",
                f"Edit {path}: '{old}' should be '{new}'.",
                f"Change '{old}' to '{new}' in {path}.",
            )
        ),
    )
    _call(
        rng,
        conversation,
        [tools.call("edit", path, old, new)],
        [
            rng.choice(
                (
                    "ok",
                    "OK",
                    "done",
                    "1 replacement",
                    f"Edited {path}",
                    f"The file {path} has been updated.",
                )
            )
        ],
    )
    conversation.say("assistant", f"I changed {path}.")


def turn(rng: Random, conversation: Conversation, tools: Tools) -> None:
    """Add one task for the agent."""
    kind = rng.random()
    tasks = (
        (0.1, "list", list_folder),
        (0.16, "grep", search),
        (0.22, "write", write),
        (0.27, "edit", edit),
    )
    for until, deed, task in tasks:
        if kind < until and deed in tools.names:
            return task(rng, conversation, tools)
    for until, task in ((0.35, notes_in_file), (0.4, whole_file), (0.42, two_files)):
        if kind < until:
            return task(rng, conversation, tools)
    return read_and_tell(rng, conversation, tools)


def begin(rng: Random) -> tuple[Conversation, Tools]:
    """A conversation that offers file tools."""
    tools = offer(rng)
    conversation = Conversation(tools=tools.schemas)
    if rng.random() < 0.55:
        text = rng.choice(_SYSTEM)
        if rng.random() < 0.2:
            text += "\n" + "\n".join(
                f"- {wide_phrase(rng, 8).capitalize()}." for _ in range(rng.randint(1, 6))
            )
        if rng.random() < 0.2:
            text += (
                f"\nWorking directory: /{wide_word(rng)}/{wide_word(rng)}\nPlatform: "
                f"{rng.choice(('linux', 'darwin'))}"
            )
        conversation.say("system", text)
    return conversation, tools
