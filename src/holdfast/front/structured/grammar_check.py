"""Tests grammars before they are used: whether they compile, can end, and stay small enough."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec

from holdfast.front.structured.keywords import PLAIN
from holdfast.front.structured.lark import grammar_text, json_value
from holdfast.front.structured.schema import (
    CleanSchema,
    Schema,
    SchemaBounds,
    SchemaFault,
    children,
    clean,
    join_place,
)
from holdfast.front.toolcalls.json_schema import definition_name, items_of, named_types

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

_MOST_TRIALS: Final = 20  # maximum when searching for the part with a fault; takes about 20 ms
_MOST_LEFT_OUT: Final = 4
_ANY_OBJECT: Final = CleanSchema(schema={"type": "object"}, unenforced=("#",))
_BEYOND: Final = "the bounds are too large to enforce"
_TOO_MUCH: Final = "the schema is too complex to enforce"


def is_endless(clean: CleanSchema) -> bool:
    """Whether every value of a schema must contain another one, so that no answer could end."""
    if isinstance(clean.schema, bool):
        return False
    definitions: dict[str, Any] = clean.schema.get("$defs", {})
    finite: set[str] = set()
    while True:  # a definition is finite once everything it needs is; iterate to the fixed point
        more = {
            name
            for name, node in definitions.items()
            if name not in finite and _can_end(node, finite)
        }
        if not more:
            return not _can_end(clean.schema, finite)
        finite |= more


def _can_end(node: Schema | bool, finite: set[str]) -> bool:
    """Whether some value of a schema is finite. finite: the definitions known to have one."""
    if isinstance(node, bool) or "enum" in node or "const" in node:
        return True
    if "$ref" in node and definition_name(node["$ref"]) not in finite:
        return False
    if not all(_can_end(member, finite) for member in node.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if keyword in node and not any(_can_end(member, finite) for member in node[keyword]):
            return False
    kinds = named_types(node)
    if not kinds or set(kinds) - {"object", "array"}:
        return True  # a value without members or items is possible
    return ("object" in kinds and _object_can_end(node, finite)) or (
        "array" in kinds and _array_can_end(node, finite)
    )


def _object_can_end(node: Schema, finite: set[str]) -> bool:
    properties, others = node.get("properties", {}), node.get("additionalProperties", True)
    return all(_can_end(properties.get(name, others), finite) for name in node.get("required", ()))


def _array_can_end(node: Schema, finite: set[str]) -> bool:
    least = node.get("minItems", 0)
    first, others = items_of(node)
    return all(_can_end(item, finite) for item in first[:least]) and (
        least <= len(first) or _can_end(others, finite)
    )


_FIRST: Final = 257
_MARKERS: Final = 64
_TOKEN: Final = re.compile(r"<\[\d+\]>")


class _Bytes:
    """A tokenizer whose tokens are bytes, to try out grammars for any model.

    This is possible because what a grammar allows does not depend on a model's tokens. Token n is
    the byte n, token 256 is the end of the text, and the markers follow.
    """

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [
        *(bytes([value]) for value in range(256)),
        *(b"<marker %d>" % number for number in range(_MARKERS + 1)),
    ]
    special_token_ids: Sequence[int] = [*range(256, 257 + _MARKERS)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _trial(times: int) -> tuple[LLTokenizer, LLParserLimits]:
    """The tokenizer and the limits with which a grammar is tried out.

    times: limits on the work, as a multiple of the limits for one schema.
    """
    # imported here because the import takes 0.1 s
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    # llguidance measures its work in fuel. A grammar that needs more fuel makes every token of its
    # answer slow; grammars of agents' tools need less than a tenth. Refusing one takes 5 to 40 ms
    # of one core.
    limits = LLParserLimits(
        initial_lexer_fuel=100_000 * times,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000 * times,
        max_grammar_size=50_000 * times,
        verbose_errors=False,
    )
    return LLTokenizer(TokenizerWrapper(_Bytes())), limits


def fault_of(grammar: str) -> str:
    """Return the error in a grammar; empty if it is valid. Releases the GIL."""
    return _tried(grammar, 1)


def _tried(grammar: str, times: int) -> str:
    """Why a grammar cannot be used; empty if it can. times: as for `_trial`."""
    from llguidance import LLMatcher

    tokenizer, limits = _trial(times)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error() and not any(mask):
            return "no text satisfies it"
        if not matcher.is_error():
            # detects forced text that never ends
            matcher.consume_tokens(matcher.compute_ff_tokens())
    return matcher.get_error()


@lru_cache(maxsize=128)
def fault_of_composed(grammar: str) -> str:
    """Return the error in a grammar that refers to tokens of a model; empty if it is valid.

    Cached, because agents send the same tools with every turn.
    """
    numbers: dict[str, int] = {}
    return _tried(
        _TOKEN.sub(
            lambda found: f"<[{numbers.setdefault(found[0], len(numbers) % _MARKERS) + _FIRST}]>",
            grammar,
        ),
        6,
    )


def checked_schema(schema: Any, *, bounds: SchemaBounds, strict: bool) -> CleanSchema:
    """Reduce a schema to the parts that a grammar can enforce.

    Takes a few milliseconds the first time. May be called from any thread.

    strict: raise SchemaFault for anything that is not a schema, is too large, or cannot be enforced
    or satisfied. If False, such parts are left out; in the worst case, the result only requires an
    object.
    """
    return _checked(msgspec.json.encode(schema), bounds, strict)


@lru_cache(maxsize=512)
def _checked(schema: bytes, bounds: SchemaBounds, strict: bool) -> CleanSchema:
    """Clean a schema, and leave out one keyword after another until its grammar compiles. In strict
    mode, raises SchemaFault instead of leaving anything out.
    """
    try:
        found = clean(msgspec.json.decode(schema), bounds=bounds, strict=strict)
    except SchemaFault:
        if strict:
            raise
        return _ANY_OBJECT
    for _ in range(_MOST_LEFT_OUT):
        fault = _fault(found, found.schema)
        if not fault:
            return found
        if fault == _TOO_MUCH and strict:
            raise SchemaFault(fault)
        if fault == _TOO_MUCH:
            break
        place, node = _innermost(found)
        keyword = _culprit(found, node)
        if strict:
            raise SchemaFault(
                _named(keyword, _fault(found, node)),
                place=join_place(place, keyword) if keyword else place,
            )
        found = _without_fault(found, place, node, keyword=keyword)
    return _ANY_OBJECT


def _fault(found: CleanSchema, node: Schema | bool) -> str:
    """Return the error in a part of a schema; empty if it is valid."""
    definitions = found.schema.get("$defs") if isinstance(found.schema, dict) else None
    part = {**node, "$defs": definitions} if isinstance(node, dict) and definitions else node
    if is_endless(replace(found, schema=part)):
        return "no finite value satisfies the schema"
    fault = fault_of(grammar_text(f"start: {json_value(part)}"))
    _, is_of_schema, said = fault.partition("failed to compile JSON schema: ")
    if not fault:
        return ""
    if not is_of_schema or "too large" in said:
        return _TOO_MUCH
    return _BEYOND if said.startswith("Failed to generate regex for") else said.split("\n   1 |")[0]


def _innermost(found: CleanSchema) -> tuple[str, Schema | bool]:
    """Return the path and the content of the smallest part that is faulty by itself."""
    place, node, seen, trials = "#", found.schema, set[str](), 0
    while isinstance(node, dict):
        for inner_place, inner in _parts(found, node, place=place, seen=seen):
            trials += 1
            if trials > _MOST_TRIALS:
                return place, node
            if _fault(found, inner):
                place, node = inner_place, inner
                break
        else:
            return place, node
    return place, node


def _parts(
    found: CleanSchema, node: Schema, *, place: str, seen: set[str]
) -> Iterator[tuple[str, Schema | bool]]:
    for keyword, inner, key in children(node, place=place):
        if isinstance(inner, dict):  # `false`, which no value satisfies, is not a fault by itself
            yield join_place(place, keyword, *key), inner
    name = definition_name(node.get("$ref", ""))
    if name and name not in seen and isinstance(found.schema, dict):
        seen.add(name)
        yield found.origins[name], found.schema["$defs"][name]


def _culprit(found: CleanSchema, node: Schema | bool) -> str:
    """Return the only keyword that makes a part faulty; empty if there is no such keyword."""
    if not isinstance(node, dict):
        return ""
    objects = ("patternProperties", "additionalProperties", "properties")
    for keyword in (*PLAIN[1:], "oneOf", "anyOf", "allOf", *objects, "type"):
        rest = {name: value for name, value in node.items() if name != keyword}
        if keyword in node and not _fault(found, rest):
            return keyword
    return ""


def _named(keyword: str, fault: str) -> str:
    return fault if not keyword or keyword in fault else f"the keyword {keyword!r}: {fault}"


def _without_fault(
    found: CleanSchema, place: str, node: Schema | bool, *, keyword: str
) -> CleanSchema:
    """Return the schema without one keyword of the faulty part, or with that part left empty."""
    if not isinstance(node, dict):
        return _ANY_OBJECT
    if keyword:
        del node[keyword]  # this schema is an unshared copy
        return replace(found, unenforced=(*found.unenforced, join_place(place, keyword)))
    definitions = node.get("$defs")
    node.clear()
    if definitions:
        node["$defs"] = definitions
    return replace(found, unenforced=(*found.unenforced, place))
