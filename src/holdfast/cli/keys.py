"""`holdfast keys …`: named API keys.

The file contains only hashes, so a key is shown once, when it is created.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias, get_args

import typer

from holdfast.cli.output import plain_errors
from holdfast.cli.settings_command import read_settings
from holdfast.errors import ConfigError
from holdfast.files import expanded
from holdfast.wire.requests import Priority

if TYPE_CHECKING:
    from holdfast.front.server.access import ApiKey

keys = typer.Typer(help="Add, list and remove named API keys.", no_args_is_help=True)

Name: TypeAlias = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key; the cache belongs to the name.")
]
File: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="File of keys; default: server.keys_file in your settings.",
    ),
]
Admin: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--admin", help="Allow it to load and unload models, and to see and cancel all requests."
    ),
]
PriorityOption: TypeAlias = Annotated[
    str,
    typer.Option(
        "--priority",
        metavar="interactive|batch",
        help="Highest priority of its requests; batch yields to interactive.",
    ),
]
MaxRequests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--max-requests", metavar="N", help="Maximum number of its running and waiting answers."
    ),
]


@keys.command("add")
def add(
    name: Name,
    admin: Admin = False,
    priority: PriorityOption = "interactive",
    max_requests: MaxRequests = None,
    file: File = None,
) -> None:
    """Create a key and print it, once.

    With the first key, the server starts to refuse requests without one.
    """
    from holdfast.front.server.access import named_key, new_secret, read_keys, write_keys

    with plain_errors():
        path = _path(file)
        known = read_keys(path) if path.exists() else ()
        if any(key.name == name for key in known):
            raise ConfigError(
                f"there is already a key named {name}; `holdfast keys rotate {name}` replaces its "
                "secret"
            )
        secret = new_secret()
        made = named_key(
            name, secret, is_admin=admin, priority=_priority(priority), max_requests=max_requests
        )
        write_keys(path, (*known, made))
        _tell(f"This is the key of {name}; it is not shown again. {_how_to_apply(path)}")
        typer.echo(secret)


@keys.command("rotate")
def rotate(name: Name, file: File = None) -> None:
    """Replace the key of a name and print the new one, once.

    Permissions and the cache stay.
    """
    from holdfast.front.server.access import named_key, new_secret, read_keys, write_keys

    with plain_errors():
        path = _path(file)
        known = read_keys(path)
        old = _find(known, name, path)
        secret = new_secret()
        made = named_key(
            name,
            secret,
            is_admin=old.is_admin,
            priority=old.priority,
            max_requests=old.max_requests,
        )
        write_keys(path, tuple(made if key is old else key for key in known))
        _tell(
            f"This is the new key of {name}; it replaces the old one and is not shown again. "
            f"{_how_to_apply(path)}"
        )
        typer.echo(secret)


@keys.command("ls")
def list_keys(file: File = None) -> None:
    """List the names with their permissions. The keys themselves are not stored."""
    from holdfast.front.server.access import read_keys

    with plain_errors():
        path = _path(file)
        known = read_keys(path) if path.exists() else ()
    if not known:
        typer.echo(f"no keys in {path}")
        return
    width = max(len(key.name) for key in known)
    for key in known:
        cap = f"at most {key.max_requests} requests" if key.max_requests is not None else ""
        words = filter(
            None,
            (
                "admin" if key.is_admin else "",
                key.priority,
                cap,
                f"since {key.created}" if key.created else "",
            ),
        )
        typer.echo(f"{key.name:<{width}}  {', '.join(words)}")


@keys.command("rm")
def remove(name: Name, file: File = None) -> None:
    """Remove a key.

    The cache stays for a later key with the same name.
    """
    from holdfast.front.server.access import read_keys, write_keys

    with plain_errors():
        path = _path(file)
        known = read_keys(path)
        gone = _find(known, name, path)
        left = tuple(key for key in known if key is not gone)
        write_keys(path, left)
    typer.echo(f"{name} is removed. {_how_to_apply(path)}")
    if not left:
        typer.echo(
            f"No keys are left, but clients still need one. To serve without keys, delete {path}."
        )


def _path(file: Path | None) -> Path:
    """The file of keys, which may not exist yet. Raises ConfigError."""
    from holdfast.front.server.access import OFF, key_file_of, own_key_file

    if file is not None:
        return expanded(file)
    setting = read_settings().settings.server.keys_file
    path = key_file_of(setting, os.environ) or (
        None if setting in ("", OFF) else own_key_file(os.environ)
    )
    if path is None:
        raise ConfigError(
            "there is no file for keys: name one with --file FILE, or as server.keys_file in the "
            "settings"
        )
    return path


def _find(known: tuple[ApiKey, ...], name: str, path: Path) -> ApiKey:
    found = next((key for key in known if key.name == name), None)
    if found is None:
        names = ", ".join(key.name for key in known) or "none"
        raise ConfigError(f"there is no key named {name} in {path}; there are: {names}")
    return found


def _priority(word: str) -> Priority:
    found: tuple[Priority, ...] = tuple(each for each in get_args(Priority) if each == word)
    if not found:
        raise ConfigError(f"--priority {word}: allowed are interactive and batch")
    return found[0]


def _how_to_apply(path: Path) -> str:
    return f"A running server reads {path} again on SIGHUP (`kill -HUP`) or after a restart."


def _tell(text: str) -> None:
    typer.echo(text, err=True)  # stdout has only the key, for pipes
