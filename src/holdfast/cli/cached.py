"""`holdfast sessions tree` and `holdfast sessions misses`: what the prefix cache of a running server
contains, and what it lacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import typer

from holdfast.cli.output import Json, count_text, print_json, size_text, time_text
from holdfast.cli.server_client import CACHE_OPTIONS, ServerClient, server_command
from holdfast.front.telemetry.request_log import printable

# as in front/admin/cache.py, which needs the web framework
CACHE_PATH = "/admin/cache"
MISSES_PATH = "/admin/misses"
_LONGEST_LINE = 250  # characters
_LONGEST_TEXT = 1000


@partial(server_command, options=CACHE_OPTIONS)
def show_tree(server: ServerClient, as_json: Json = False) -> None:
    """Show what the prefix cache contains, as a tree: where each part is, and who uses it."""
    models = server.call("GET", CACHE_PATH)["models"]
    if as_json:
        print_json(models)
        return
    for model in models:
        blocks = count_text(model["blocks"], "block")
        typer.echo(f"{model['model']}: {blocks}{'' if model['is_complete'] else ' and more'}")
        for line in tree_lines(model["trees"], model["parts"], hidden_trees=model["hidden_trees"]):
            typer.echo(line)


@partial(server_command, options=CACHE_OPTIONS)
def list_misses(server: ServerClient, as_json: Json = False) -> None:
    """List recent prompts that missed the prefix cache, and what changed in them."""
    misses = server.call("GET", MISSES_PATH)["misses"]
    if as_json:
        print_json(misses)
    elif not misses:
        typer.echo("no prompt has missed the cache since the server started")
    for miss in () if as_json else misses:
        cached = f"{miss['cached_tokens']:,} of {count_text(miss['prompt_tokens'], 'token')} cached"
        who = " ".join(filter(None, (miss["model"], miss["session_id"])))
        typer.echo(f"{time_text(miss['at'])}  {who}  {cached}")
        typer.echo(f"  {printable(_why(miss), longest=_LONGEST_TEXT)}")
        if (change := miss["change"]) is not None:
            if change["kind"] != "added":
                typer.echo(f"  - {printable(change['cached'], longest=_LONGEST_LINE)}")
            if change["kind"] != "left_out":
                typer.echo(f"  + {printable(change['now'], longest=_LONGEST_LINE)}")


def _why(miss: Mapping[str, Any]) -> str:
    change = miss["change"]
    return str(miss["explanation"] if change is None else change["summary"])


def tree_lines(
    trees: Sequence[Mapping[str, Any]],
    parts: Sequence[Mapping[str, Any]],
    *,
    hidden_trees: int = 0,
) -> Iterator[str]:
    """Each part of the cache in a line, indented by its depth, children after their parents.

    A root of one token, which all prompts of many models begin with, is left out if there are parts
    below it.
    """
    children: dict[int | None, list[int]] = {}
    for place, part in enumerate(parts):
        children.setdefault(part["parent"], []).append(place)
    pending = [(place, 1) for place in reversed(children.get(None, []))]
    while pending:
        place, depth = pending.pop()
        below = [(child, depth + 1) for child in reversed(children.get(place, []))]
        if parts[place]["parent"] is None and parts[place]["tokens"] == 1 and below:
            pending += [(child, depth) for child, _ in below]
            continue
        yield "  " * depth + _part_text(parts[place], trees)
        if hidden := parts[place]["hidden_parts"]:
            tokens = parts[place]["hidden_tokens"]
            yield "  " * (depth + 1) + f"{count_text(hidden, 'smaller part')}, {tokens:,} tokens"
        pending += below
    if hidden_trees:
        yield f"  and {count_text(hidden_trees, 'more tree')}"


def _part_text(part: Mapping[str, Any], trees: Sequence[Mapping[str, Any]]) -> str:
    where = [
        f"{part[f'{tier}_tokens']:,} {words}"
        for tier, words in (("live", "live"), ("ram", "in RAM"), ("disk", "on disk"))
        if part[f"{tier}_tokens"]
    ]
    tree = trees[part["tree"]]
    users = ", ".join(part["sessions"])
    more = part["session_count"] - len(part["sessions"])
    facts = [
        f"tokens {part['start']:,} to {part['start'] + part['tokens']:,}",
        ", ".join(where),
        size_text(part["bytes"]),
        "" if tree["kv_bits"] in (None, "native") else f"KV bits {tree['kv_bits']}",
        tree["adapter"],
        "" if tree["is_own"] else "another tenant",
        f"used by {users}{f' and {more} more' if more else ''}" if users else "",
        count_text(part["running"], "running request") if part["running"] else "",
    ]
    return "; ".join(filter(None, facts))
