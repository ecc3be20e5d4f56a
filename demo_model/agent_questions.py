"""Held-out questions about tools that nobody has seen and about files: made up as in training
(other seeds), and by hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import agent_mix
import file_agent
import odd_requests
import odd_tools
import tool_tasks
from conversation import Conversation
from questions import Question, Row, calls_of, exactly


def _asked(conversation: Conversation, request: str, expected: list[dict[str, Any]]) -> Question:
    conversation.say("user", request)
    return Question(conversation, lambda answer: calls_of(answer) == expected, json.dumps(expected))


def odd_call(rng: Random, several: bool) -> Question:
    """A request for one call or several of tools with made-up names, descriptions and schemas; up
    to eight are offered.
    """
    tools = odd_tools.family(rng, rng.choice((1, 2, 3, 4, 6, 8)))
    style = odd_tools.SchemaStyle.draw(rng)
    conversation = tool_tasks.begin(rng, [])
    conversation.tools = [tool.schema(rng, style) for tool in tools]
    if several:
        request, steps = agent_mix.several_requests(rng, tools)
        return _asked(conversation, request, steps[0])
    request, call = odd_requests.ask(rng, rng.choice(tools))
    return _asked(conversation, request, [call])


def _talk(rng: Random) -> Conversation:
    """One task of an agent with files, done."""
    conversation, tools = file_agent.begin(rng)
    file_agent.turn(rng, conversation, tools)
    return conversation


def file_call(rng: Random) -> Question:
    """The first call of an agent with files."""
    conversation = _talk(rng)
    place = next(
        place
        for place, message in enumerate(conversation.messages)
        if message["role"] == "assistant"
    )
    expected = [call["function"] for call in conversation.messages[place]["tool_calls"]]
    conversation.messages = conversation.messages[:place]
    return Question(conversation, lambda answer: calls_of(answer) == expected, json.dumps(expected))


def file_told(rng: Random) -> Question:
    """What an agent says when it has seen the file."""
    conversation = _talk(rng)
    return exactly(conversation, conversation.messages.pop()["content"])


def _tool(name: str, about: str, **described: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in described.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": parameters},
    }


_READ = _tool("read_file", "Read a file and return its text.", path="Path of the file")
_LIST = _tool("list_files", "List the files in a directory.", path="The directory")
_GREP = _tool("grep", "Search all files for a pattern.", pattern="What to search for")
_WRITE = _tool("write_file", "Write text to a file.", path="Where to write", content="The text")
_CONFIG = "# settings of the service\nhost: 0.0.0.0\nport: 8080\nlog_level: info\nworkers: 4"
_NOTES = (
    "Shopping on Monday.\nThe meeting with Greta is at 15:30 in room 12.\nThe door code is "
    "4711.\nCall the dentist."
)
_ENV = "DATABASE_URL=postgres://localhost/app\nSECRET_KEY=s3cr3t-99\nDEBUG=false"
_CODE = (
    "import sys\n\n\ndef greet(name):\n    return f'Hello {name}'\n\n\ndef main():\n    "
    "print(greet(sys.argv[1]))\n"
)
_TOML = '[project]\nname = "kelp"\nversion = "1.4.2"\nrequires-python = ">=3.11"\n'
BY_HAND = (
    ("What is the port in config.yaml?", "config.yaml", _CONFIG, "port: 8080"),
    ("Which port does config.yaml say?", "config.yaml", _CONFIG, "port: 8080"),
    ("Read config.yaml and tell me the log level.", "config.yaml", _CONFIG, "log_level: info"),
    ("How many workers are set in conf/config.yaml?", "conf/config.yaml", _CONFIG, "workers: 4"),
    ("What is the door code? It is in notes.txt.", "notes.txt", _NOTES, "The door code is 4711."),
    (
        "Read notes.txt. When is the meeting with Greta?",
        "notes.txt",
        _NOTES,
        "The meeting with Greta is at 15:30 in room 12.",
    ),
    ("What is the secret key in .env?", ".env", _ENV, "SECRET_KEY=s3cr3t-99"),
    (
        "What is the DATABASE_URL in deploy/.env?",
        "deploy/.env",
        _ENV,
        "DATABASE_URL=postgres://localhost/app",
    ),
    (
        "Show me the line that defines greet in src/main.py.",
        "src/main.py",
        _CODE,
        "def greet(name):",
    ),
    ("What is the version in pyproject.toml?", "pyproject.toml", _TOML, 'version = "1.4.2"'),
    ("Please read pyproject.toml and tell me the name.", "pyproject.toml", _TOML, 'name = "kelp"'),
    (
        "Which python version does pyproject.toml require?",
        "pyproject.toml",
        _TOML,
        'requires-python = ">=3.11"',
    ),
)
"""Request, the file that has to be read, its text, the line that the answer must hold; none of it
made by the training's code.
"""


def by_hand(rng: Random, read: bool) -> Question:
    """The read-file loop of a small agent, its first step or its second."""
    request, path, text, line = rng.choice(BY_HAND)
    tools = [_READ, *rng.sample((_LIST, _GREP, _WRITE), rng.randint(0, 3))]
    rng.shuffle(tools)
    conversation = Conversation(tools=tools)
    if rng.random() < 0.5:
        conversation.say(
            "system",
            rng.choice(
                (
                    "You are a coding agent.",
                    "You are a helpful assistant.",
                    "Answer with the tools.",
                )
            ),
        )
    call = {"name": "read_file", "arguments": {"path": path}}
    if not read:
        return _asked(conversation, request, [call])
    conversation.say("user", request)
    conversation.messages.append(tool_tasks.call_message([call]))
    conversation.say("tool", text)
    return Question(conversation, lambda answer: line in answer and not calls_of(answer), line)


def rows() -> Iterator[Row]:
    """The rows of this file."""
    yield Row("made-up tools: one call", lambda rng: odd_call(rng, False), None)
    yield Row("made-up tools: several at once", lambda rng: odd_call(rng, True), None)
    yield Row("files: first call", file_call, None)
    yield Row("files: told", file_told, None)
    yield Row("files by hand: read", lambda rng: by_hand(rng, False), None)
    yield Row("files by hand: line quoted", lambda rng: by_hand(rng, True), None)
