"""The output of `holdfast sessions tree`."""

from __future__ import annotations

from typing import Any

from holdfast.cli.cached import tree_lines

TREE = {"kv_bits": "native", "adapter": "", "is_own": True}


def part(parent: int | None, *, start: int, tokens: int) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("tree", "bytes", "live_tokens", "ram_tokens", "disk_tokens", "session_count", "running"), 0
    )
    hidden = {"hidden_parts": 0, "hidden_tokens": 0}
    return {"parent": parent, "start": start, "tokens": tokens, "sessions": []} | counts | hidden


def shown(*parts: dict[str, Any]) -> list[str]:
    return [line.partition(";")[0] for line in tree_lines([TREE], parts)]


def test_parts_are_indented_below_their_parents() -> None:
    parts = [
        part(None, start=0, tokens=5),
        part(0, start=5, tokens=1),
        part(0, start=5, tokens=9),
        part(2, start=14, tokens=2),
    ]
    assert shown(*parts) == [
        "  tokens 0 to 5",
        "    tokens 5 to 6",
        "    tokens 5 to 14",
        "      tokens 14 to 16",
    ]


def test_a_root_of_one_token_is_hidden_unless_it_is_alone() -> None:
    root = part(None, start=0, tokens=1)
    assert shown(root) == ["  tokens 0 to 1"]
    assert shown(root, part(0, start=1, tokens=4)) == ["  tokens 1 to 5"]


def test_unlisted_trees_are_counted_at_the_end() -> None:
    lines = list(tree_lines([TREE], [part(None, start=0, tokens=5)], hidden_trees=1200))
    assert lines[-1] == "  and 1,200 more trees"
