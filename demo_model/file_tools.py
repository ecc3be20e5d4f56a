"""File tools under the many names that agents use."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from wide_words import wide_phrase

_NAMES = {
    "read": "read_file read_file read_file readFile read Read open_file cat view_file file_read get_file ReadFile view".split(),
    "list": "list_files list_files ls list_dir listFiles LS list_directory list_folder glob ListFiles".split(),
    "grep": "grep grep search_files Grep searchFiles search find_in_files ripgrep search_text".split(),
    "write": "write_file write_file writeFile write Write create_file save_file".split(),
    "edit": "edit_file edit Edit replace_in_file str_replace editFile".split(),
    "run": "run_command bash Bash shell execute_command run_shell terminal".split(),
}
_PATHS = "path path path file_path filePath file filename file_name".split()
_FOLDERS = "path path directory dir folder".split()
_TOLD = {
    "read": (
        "Read a file",
        "Read the contents of a file",
        "Reads a file from the local filesystem.",
        "Read a text file and return its lines.",
        "Show a file.",
    ),
    "list": (
        "List the files of a folder",
        "List files in a directory",
        "Lists files and directories in a given path.",
        "List a directory.",
    ),
    "grep": (
        "Search files for a pattern",
        "Search for a text in files",
        "Find lines that match a pattern.",
        "A search tool for file contents.",
    ),
    "write": (
        "Write text to a file",
        "Write a file",
        "Writes a file to the local filesystem.",
        "Create a file with this content.",
    ),
    "edit": (
        "Replace text in a file",
        "Edit a file",
        "Performs exact string replacements in files.",
    ),
    "run": (
        "Run a shell command",
        "Executes a given bash command",
        "Run a command and return its output.",
    ),
}


@dataclass
class Tools:
    """The file tools of a conversation, by purpose."""

    schemas: list[dict[str, Any]]
    names: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """What it does -> the tool's name and the names of its required parameters."""

    def call(self, deed: str, *values: str) -> dict[str, Any]:
        """One call of a tool."""
        name, parameters = self.names[deed]
        return {"name": name, "arguments": dict(zip(parameters, values, strict=True))}


def _parameters(rng: Random, deed: str, where: str) -> tuple[str, ...]:
    return {
        "read": (where,),
        "list": (rng.choice(_FOLDERS),),
        "grep": (rng.choice(("pattern", "pattern", "query", "text", "regex")),),
        "write": (where, rng.choice(("content", "content", "text", "contents"))),
        "edit": (
            where,
            *rng.choice(
                (
                    ("old", "new"),
                    ("old_string", "new_string"),
                    ("oldString", "newString"),
                    ("search", "replace"),
                )
            ),
        ),
        "run": ("command",),
    }[deed]


def offer(rng: Random) -> Tools:
    """Some file tools, including one for reading."""
    deeds = [
        "read",
        *rng.sample(("list", "grep", "write", "edit", "run"), rng.choice((0, 1, 2, 2, 3, 3, 4, 5))),
    ]
    rng.shuffle(deeds)
    where = rng.choice(_PATHS)
    described, closed, long = rng.random() < 0.45, rng.random() < 0.3, rng.random() < 0.15
    tools = Tools([])
    for deed in deeds:
        name = rng.choice(_NAMES[deed])
        while name in {taken for taken, _ in tools.names.values()}:
            name = f"{rng.choice(_NAMES[deed])}_{deed}"
        needed = _parameters(rng, deed, where)
        tools.names[deed] = (name, needed)
        more = {
            "read": ("offset", "limit"),
            "grep": (),
            "list": ("ignore",),
            "run": ("timeout",),
        }.get(deed, ())
        properties: dict[str, Any] = {key: {"type": "string"} for key in needed}
        if rng.random() < 0.3:
            properties |= {
                key: {"type": "string" if key == "ignore" else "integer"} for key in more
            }
        for key, schema in properties.items():
            if described:
                schema["description"] = rng.choice(
                    (
                        f"The {key.replace('_', ' ')}",
                        f"The {key} to {deed}",
                        f"{key}: {wide_phrase(rng, 6)}",
                    )
                )
        schema = {"type": "object", "properties": properties, "required": list(needed)}
        if closed:
            schema["additionalProperties"] = False
        about = rng.choice(_TOLD[deed])
        if long:
            about = (
                f"{about.rstrip('.')}. "
                f"{' '.join(wide_phrase(rng, 7).capitalize() + '.' for _ in range(rng.randint(1, 4)))}"
            )
        tools.schemas.append(
            {
                "type": "function",
                "function": {"name": name, "description": about, "parameters": schema},
            }
        )
    return tools
