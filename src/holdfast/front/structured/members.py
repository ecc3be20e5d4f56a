"""Members of an object in the order of its schema, separators between those that are there."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.front.structured.lark import Rules, literal


def members(
    rules: Rules,
    given: Mapping[str, str],
    *,
    required: frozenset[str],
    separator: str,
    others: str = "",
) -> str:
    """Some members, each an expression by its name: all that are required, and any of the rest.

    others: further members that may come last, any number of them; empty: none may.
    """
    between = f"{separator} " if separator else ""
    tail = f"({between}{others})*" if others else ""  # once something stands before
    head = f"({others} {tail})?" if others else ""  # while nothing does
    for name, member in reversed([*given.items()]):
        if name in required:
            tail, head = f"{between}{member} {tail}", f"{member} {tail}"
        else:
            follows = rules.rule(tail or literal(""))
            leads = rules.rule(head or literal(""))
            tail, head = f"({between}{member})? {follows}", f"({member} {follows} | {leads})"
    return head
