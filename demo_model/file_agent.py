"""An agent that reads, lists, searches and writes files, and quotes the requested line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from random import Random
from typing import Any

import facts
from conversation import Conversation
from fact_notes import one_question
from rules import draw, some, texts
from toolbox import Call, defined
from words import wide_phrase, wide_word


@dataclass(frozen=True)
class File:
    """A file's lines. asked: names of some of them. absent: a thing that no line tells."""

    path: str
    lines: list[str]
    asked: dict[str, tuple[str, ...]]
    absent: str

    def one_line(self, rng: Random) -> tuple[str, str]:
        """A line and the name that a question gives it."""
        line = rng.choice(list(self.asked))
        return line, rng.choice(self.asked[line])


def path_of(rng: Random, kind: str, folder: str | None = None) -> str:
    """A path of a file of this kind."""
    stem = draw(rng, "stem")
    if folder is None:
        folder = "".join(f"{wide_word(rng)}/" for _ in some(rng, (0, 0, 0, 0, 1, 1, 2)))
        if rng.random() < 0.15:
            folder = f"/{rng.choice(('home', 'tmp', 'srv', 'work', wide_word(rng)))}/{folder}"
    return f"{folder}{stem}.{draw(rng, f'{kind}_endings')}"


def settings(rng: Random, folder: str | None = None, most: int = 10) -> File:
    """Keys and values."""
    mark = rng.choice((": ", " = ", "=", ": "))
    keys = list(dict.fromkeys(draw(rng, "setting_key") for _ in range(rng.randint(2, most))))
    absent = keys.pop() if len(keys) > 1 else wide_word(rng)
    lines: list[str] = []
    asked: dict[str, tuple[str, ...]] = {}
    indent = ""
    for key in keys:
        value = draw(rng, "setting_value")
        if rng.random() < 0.1:
            indent = rng.choice(("", "", "  ", "    ", "- "))
            lines.append(f"{wide_word(rng)}:")
        elif rng.random() < 0.07:
            lines.append(draw(rng, "setting_break"))
        line = f"{indent}{key}{mark}{value}"
        asked[line] = (key.replace("_", " "), key)
        lines.append(line)
    return File(path_of(rng, "settings", folder), lines, asked, absent.replace("_", " "))


def source(rng: Random) -> File:
    """Little functions."""
    lines: list[str] = []
    asked: dict[str, tuple[str, ...]] = {}
    names = list(dict.fromkeys(draw(rng, "function_name") for _ in range(rng.randint(2, 6))))
    absent = names.pop() if len(names) > 1 else wide_word(rng)
    if rng.random() < 0.5:
        lines += [*(f"import {wide_word(rng)}" for _ in range(rng.randint(1, 3))), "", ""]
    for name in names:
        line = f"def {name}({', '.join(wide_word(rng) for _ in range(rng.randint(0, 3)))}):"
        asked[line] = (f"definition of {name}", f"function {name}", f"line that defines {name}")
        lines += [line, f"    {draw(rng, 'code_line')}"]
        lines += [""] * rng.choice((0, 1, 2))
    return File(path_of(rng, "code"), lines, asked, f"function {absent}")


def shown(rng: Random, file: File) -> str:
    """The text as a tool returns it, plain or with line numbers."""
    if rng.random() < 0.7:
        return "\n".join(file.lines)
    form = rng.choice(("{:>5}\t{}", "{:05d}| {}", "{}: {}", "{:>6}→{}"))
    return "\n".join(form.format(number, line) for number, line in enumerate(file.lines, 1))


# -- tools


@dataclass
class Tools:
    """The file tools of a conversation. names: of a tool and its required parameters, by deed."""

    schemas: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, tuple[str, list[str]]] = field(default_factory=dict)

    def call(self, deed: str, *values: str) -> Call:
        """One call of a tool."""
        name, parameters = self.names[deed]
        return {"name": name, "arguments": dict(zip(parameters, values, strict=True))}


_OPTIONAL = {"read": ("offset", "limit"), "list": ("ignore",), "run": ("timeout",)}


def _parameters(rng: Random, deed: str, where: str) -> list[str]:
    drawn = {
        "list": draw(rng, "list_parameter"),
        "grep": draw(rng, "parameter_of_search"),
        "write": f"{where} {draw(rng, 'parameter_of_text')}",
        "edit": f"{where} {draw(rng, 'parameters_of_edit')}",
    }
    return drawn.get(deed, where if deed == "read" else "command").split()


def offer(rng: Random) -> Tools:
    """Some file tools, including one for reading."""
    count = (0, 1, 2, 2, 3, 3, 4, 5)
    deeds = ["read", *rng.sample(("list", "grep", "write", "edit", "run"), rng.choice(count))]
    rng.shuffle(deeds)
    where = draw(rng, "path_parameter")
    described, closed, long = rng.random() < 0.45, rng.random() < 0.3, rng.random() < 0.15
    tools = Tools()
    for deed in deeds:
        name = draw(rng, f"{deed}_tool")
        while name in {taken for taken, _ in tools.names.values()}:
            name = f"{draw(rng, f'{deed}_tool')}_{deed}"
        needed = _parameters(rng, deed, where)
        tools.names[deed] = (name, needed)
        properties: dict[str, Any] = {key: {"type": "string"} for key in needed}
        if rng.random() < 0.3:
            for key in _OPTIONAL.get(deed, ()):
                properties[key] = {"type": "string" if key == "ignore" else "integer"}
        for key, schema in properties.items():
            if described:
                named = {"words": key.replace("_", " "), "key": key, "deed": deed}
                schema["description"] = draw(rng, "file_parameter_about", **named)
        parameters = {"type": "object", "properties": properties, "required": needed}
        if closed:
            parameters["additionalProperties"] = False
        about = draw(rng, f"{deed}_told")
        if long:
            more = [f"{wide_phrase(rng, 7).capitalize()}." for _ in range(rng.randint(1, 4))]
            about = f"{about.rstrip('.')}. {' '.join(more)}"
        tools.schemas.append(defined(name, about, parameters))
    return tools


# -- tasks


def says(path: str, line: str) -> str:
    """The answer that quotes a line."""
    return f"{path} says: {line.strip()}"


def _question(rng: Random, path: str, what: str) -> str:
    text = draw(rng, "file_questions", path=path, what=what)
    return text[0].lower() + text[1:] if rng.random() < 0.12 else text


def read_and_tell(rng: Random, talk: Conversation, tools: Tools) -> None:
    """A question about a file: read it and quote the line."""
    file = settings(rng) if rng.random() < 0.7 else source(rng)
    path = file.path
    read = [tools.call("read", path)]
    kind = rng.random()
    if kind < 0.08:
        talk.say("user", _question(rng, path, file.absent))
        talk.call(read, [shown(rng, file)])
        talk.say("assistant", f"{path} does not say that.")
        return
    line, what = file.one_line(rng)
    talk.say("user", _question(rng, path, what))
    if kind < 0.16:
        error = draw(rng, "read_errors")
        talk.call(read, [draw(rng, "told_errors", error=error, path=path)])
        talk.say("assistant", f"I could not read {path}: {error}.")
        return
    talk.call(read, [shown(rng, file)])
    talk.say("assistant", says(path, line))
    while rng.random() < 0.3:
        line, what = file.one_line(rng)
        talk.exchange(draw(rng, "follow_ups", what=what), says(path, line))


def notes_in_file(rng: Random, talk: Conversation, tools: Tools) -> None:
    """A file of notes: the answer is the note, as for notes in the prompt."""
    known = facts.draw_many(rng, rng.randint(2, 15))
    path = path_of(rng, "notes")
    fact = rng.choice(known)
    talk.say("user", draw(rng, "note_questions", path=path, question=fact.question(rng)))
    form = rng.choice(("- {}", "{}", "* {}", "{}"))
    talk.call([tools.call("read", path)], ["\n".join(form.format(one.note) for one in known)])
    talk.say("assistant", fact.note)
    while rng.random() < 0.4:
        talk.exchange(*one_question(rng, known, 0.1))


def whole_file(rng: Random, talk: Conversation, tools: Tools) -> None:
    """A short file to read out."""
    file = settings(rng, most=6)
    talk.say("user", draw(rng, "whole_file_requests", path=file.path))
    lines = file.lines if len(file.lines) > 1 else [*file.lines, f"# {wide_word(rng)}"]
    text = "\n".join(lines)
    talk.call([tools.call("read", file.path)], [text])
    talk.say("assistant", f"{file.path} says:\n{text}")


def two_files(rng: Random, talk: Conversation, tools: Tools) -> None:
    """A line of each of two files, which are read in parallel."""
    files = [settings(rng, most=6) for _ in range(2)]
    first, second = (file.path for file in files)
    lines = [rng.choice(list(file.asked)) for file in files]
    one, two = (rng.choice(file.asked[line]) for file, line in zip(files, lines, strict=True))
    if rng.random() < 0.5:
        request = draw(
            rng, "two_questions", asked=f"the {one} in {first} and the {two} in {second}"
        )
    else:
        paths = f"{first} and {second}"
        request = draw(rng, "two_reads", paths=paths, asked=f"the {one} and the {two}")
    talk.say("user", request)
    calls = [tools.call("read", file.path) for file in files]
    talk.call(calls, [shown(rng, file) for file in files])
    told = [says(file.path, line) for file, line in zip(files, lines, strict=True)]
    talk.say("assistant", "\n".join(told))


def list_folder(rng: Random, talk: Conversation, tools: Tools) -> None:
    """List files, and sometimes read one of them."""
    folder = draw(rng, "folder")
    kinds = rng.sample(texts("listed_endings"), rng.randint(2, 7))
    names = [f"{wide_word(rng)}.{kind}" for kind in kinds]
    forms = ["\n".join(names), json.dumps(names)]
    forms += ["\n".join(f"{start}{name}" for name in names) for start in ("- ", f"{folder}/")]
    listing = rng.choice(forms)
    if rng.random() < 0.4:
        talk.say("user", draw(rng, "folder_questions", folder=folder))
        talk.call([tools.call("list", folder)], [listing])
        talk.say("assistant", f"The files are: {', '.join(names)}.")
        return
    file = settings(rng, folder="", most=8)
    kind = rng.choice(kinds)
    path = f"{folder}/{names[kinds.index(kind)]}"
    line, what = file.one_line(rng)
    talk.say("user", draw(rng, "folder_reads", folder=folder, kind=kind, what=what))
    talk.call([tools.call("list", folder)], [listing])
    talk.call([tools.call("read", path)], [shown(rng, file)])
    talk.say("assistant", says(path, line))


def search(rng: Random, talk: Conversation, tools: Tools) -> None:
    """Search for a word."""
    word = draw(rng, "searched")
    found = [(path_of(rng, "code"), rng.randint(1, 400)) for _ in some(rng, (1, 1, 2, 3))]
    talk.say("user", draw(rng, "searches", word=word))
    call = [tools.call("grep", word)]
    if rng.random() < 0.15:
        talk.call(call, [draw(rng, "nothing_found")])
        talk.say("assistant", f"{word} was not found.")
        return
    lines = [f"{path}:{number}:{draw(rng, 'found_line', word=word)}" for path, number in found]
    talk.call(call, ["\n".join(lines)])
    places = "; ".join(f"{path}, line {number}" for path, number in found)
    talk.say("assistant", f"{word} is in {places}.")


def write(rng: Random, talk: Conversation, tools: Tools) -> None:
    """Write a file."""
    path, text = path_of(rng, rng.choice(("settings", "code", "notes"))), wide_phrase(rng, 7)
    talk.say("user", draw(rng, "writes", path=path, text=text))
    told = draw(rng, "write_results", path=path, bytes=len(text))
    talk.call([tools.call("write", path, text)], [told])
    talk.say("assistant", f"I wrote {path}.")


def edit(rng: Random, talk: Conversation, tools: Tools) -> None:
    """Replace a word in a file."""
    path = path_of(rng, rng.choice(("settings", "code", "notes")))
    old, new = wide_phrase(rng, 3), wide_phrase(rng, 3)
    talk.say("user", draw(rng, "file_edits", path=path, old=old, new=new))
    talk.call([tools.call("edit", path, old, new)], [draw(rng, "edited", path=path)])
    talk.say("assistant", f"I changed {path}.")


_TASKS = (
    (0.1, "list", list_folder),
    (0.16, "grep", search),
    (0.22, "write", write),
    (0.27, "edit", edit),
    (0.35, "read", notes_in_file),
    (0.4, "read", whole_file),
    (0.42, "read", two_files),
    (1.0, "read", read_and_tell),
)


def turn(rng: Random, talk: Conversation) -> None:
    """Add one task for the agent."""
    tools = talk.offered
    kind = rng.random()
    task = next(task for bound, deed, task in _TASKS if kind < bound and deed in tools.names)
    task(rng, talk, tools)


def begin(rng: Random) -> Conversation:
    """A conversation that offers file tools."""
    tools = offer(rng)
    talk = Conversation(tools=tools.schemas, offered=tools)
    if rng.random() < 0.55:
        text = draw(rng, "agent_system")
        if rng.random() < 0.2:
            for _ in range(rng.randint(1, 6)):
                text += f"\n- {wide_phrase(rng, 8).capitalize()}."
        if rng.random() < 0.2:
            text += f"\nWorking directory: /{wide_word(rng)}/{wide_word(rng)}\nPlatform: "
            text += rng.choice(("linux", "darwin"))
        talk.say("system", text)
    return talk
