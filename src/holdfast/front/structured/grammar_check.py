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
_MOST_LEFT_OUT: Final = 4  # maximum number of keywords to leave out of one schema
_ANY_OBJECT: Final = CleanSchema(schema={"type": "object"}, unenforced=("#",))
_BOUNDS_FAULT: Final = "the bounds are too large to enforce"
_COMPLEXITY_FAULT: Final = "the schema is too complex to enforce"


def is_endless(clean: CleanSchema) -> bool:
    """Whether every value of a schema must contain another one, so that no answer could end."""
    if isinstance(clean.schema, bool):
        return False
    definitions: dict[str, Any] = clean.schema.get("$defs", {})
    finite: set[str] = set()
    while True:  # a definition is finite once everything it needs is; iterate to the fixed point
        newly_finite = {
            name
            for name, node in definitions.items()
            if name not in finite and _can_end(node, finite)
        }
        if not newly_finite:
            return not _can_end(clean.schema, finite)
        finite |= newly_finite


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
    types = named_types(node)
    if not types or set(types) - {"object", "array"}:
        return True  # a value without members or items is possible
    return ("object" in types and _object_can_end(node, finite)) or (
        "array" in types and _array_can_end(node, finite)
    )


def _object_can_end(node: Schema, finite: set[str]) -> bool:
    """Whether all required members can be finite."""
    properties, other_schema = node.get("properties", {}), node.get("additionalProperties", True)
    return all(
        _can_end(properties.get(name, other_schema), finite) for name in node.get("required", ())
    )


def _array_can_end(node: Schema, finite: set[str]) -> bool:
    """Whether the least number of items can all be finite."""
    min_items = node.get("minItems", 0)
    first_items, other_items = items_of(node)
    return all(_can_end(item, finite) for item in first_items[:min_items]) and (
        min_items <= len(first_items) or _can_end(other_items, finite)
    )


_FIRST_MARKER_ID: Final = 257
_MARKER_COUNT: Final = 64
_TOKEN_EXPRESSION: Final = re.compile(r"<\[\d+\]>")


class _ByteTokenizer:
    """A tokenizer whose tokens are bytes, to try out grammars for any model.

    This is possible because what a grammar allows does not depend on a model's tokens. Token n is
    the byte n, token 256 is the end of the text, and the markers follow.
    """

    eos_token_id, bos_token_id = 256, None
    tokens: Sequence[bytes] = [
        *(bytes([value]) for value in range(256)),
        *(b"<marker %d>" % number for number in range(_MARKER_COUNT + 1)),
    ]
    special_token_ids: Sequence[int] = [*range(256, 257 + _MARKER_COUNT)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _trial_tools(limit_factor: int) -> tuple[LLTokenizer, LLParserLimits]:
    """The tokenizer and the limits with which a grammar is tried out.

    limit_factor: limits on the work, as a multiple of the limits for one schema.
    """
    # imported here because the import takes 0.1 s
    from llguidance import LLParserLimits, LLTokenizer, TokenizerWrapper

    # llguidance measures its work in fuel. A grammar that needs more fuel makes every token of its
    # answer slow; grammars of agents' tools need less than a tenth. Refusing one takes 5 to 40 ms
    # of one core.
    limits = LLParserLimits(
        initial_lexer_fuel=100_000 * limit_factor,
        step_lexer_fuel=50_000,
        step_max_items=10_000,
        max_lexer_states=20_000 * limit_factor,
        max_grammar_size=50_000 * limit_factor,
        verbose_errors=False,
    )
    return LLTokenizer(TokenizerWrapper(_ByteTokenizer())), limits


def fault_of(grammar: str) -> str:
    """Return the error in a grammar; empty if it is valid. Releases the GIL."""
    return _fault_within(grammar, 1)


def _fault_within(grammar: str, limit_factor: int) -> str:
    """Why a grammar cannot be used; empty if it can. limit_factor: as for `_trial_tools`."""
    from llguidance import LLMatcher

    tokenizer, limits = _trial_tools(limit_factor)
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
    # ids of the trial tokenizer's markers, by the expressions for the model's tokens
    marker_ids: dict[str, int] = {}

    def trial_marker(match: re.Match[str]) -> str:
        new_id = _FIRST_MARKER_ID + len(marker_ids) % _MARKER_COUNT
        return f"<[{marker_ids.setdefault(match[0], new_id)}]>"

    return _fault_within(_TOKEN_EXPRESSION.sub(trial_marker, grammar), 6)


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
        cleaned = clean(msgspec.json.decode(schema), bounds=bounds, strict=strict)
    except SchemaFault:
        if strict:
            raise
        return _ANY_OBJECT
    for _ in range(_MOST_LEFT_OUT):
        fault = _fault_of_part(cleaned, cleaned.schema)
        if not fault:
            return cleaned
        if fault == _COMPLEXITY_FAULT and strict:
            raise SchemaFault(fault)
        if fault == _COMPLEXITY_FAULT:
            break
        place, node = _innermost_fault(cleaned)
        keyword = _faulty_keyword(cleaned, node)
        if strict:
            raise SchemaFault(
                _with_keyword(keyword, _fault_of_part(cleaned, node)),
                place=join_place(place, keyword) if keyword else place,
            )
        cleaned = _without_fault(cleaned, place, node, keyword=keyword)
    return _ANY_OBJECT


def _fault_of_part(cleaned: CleanSchema, node: Schema | bool) -> str:
    """Return the error in a part of a schema; empty if it is valid."""
    definitions = cleaned.schema.get("$defs") if isinstance(cleaned.schema, dict) else None
    part = {**node, "$defs": definitions} if isinstance(node, dict) and definitions else node
    if is_endless(replace(cleaned, schema=part)):
        return "no finite value satisfies the schema"
    fault = fault_of(grammar_text(f"start: {json_value(part)}"))
    _, schema_separator, reason = fault.partition("failed to compile JSON schema: ")
    if not fault:
        return ""
    if not schema_separator or "too large" in reason:
        return _COMPLEXITY_FAULT
    return (
        _BOUNDS_FAULT
        if reason.startswith("Failed to generate regex for")
        else reason.split("\n   1 |")[0]
    )


def _innermost_fault(cleaned: CleanSchema) -> tuple[str, Schema | bool]:
    """Return the path and the content of the smallest part that is faulty by itself."""
    place, node, visited_definitions, trials = "#", cleaned.schema, set[str](), 0
    while isinstance(node, dict):
        for inner_place, inner in _inner_parts(
            cleaned, node, place=place, visited_definitions=visited_definitions
        ):
            trials += 1
            if trials > _MOST_TRIALS:
                return place, node
            if _fault_of_part(cleaned, inner):
                place, node = inner_place, inner
                break
        else:
            return place, node
    return place, node


def _inner_parts(
    cleaned: CleanSchema, node: Schema, *, place: str, visited_definitions: set[str]
) -> Iterator[tuple[str, Schema | bool]]:
    """Yield the paths and contents of a part's subschemas, and of the definition it refers to."""
    for keyword, inner, key in children(node, place=place):
        if isinstance(inner, dict):  # `false`, which no value satisfies, is not a fault by itself
            yield join_place(place, keyword, *key), inner
    name = definition_name(node.get("$ref", ""))
    if name and name not in visited_definitions and isinstance(cleaned.schema, dict):
        visited_definitions.add(name)
        yield cleaned.origins[name], cleaned.schema["$defs"][name]


def _faulty_keyword(cleaned: CleanSchema, node: Schema | bool) -> str:
    """Return the only keyword that makes a part faulty; empty if there is no such keyword."""
    if not isinstance(node, dict):
        return ""
    object_keywords = ("patternProperties", "additionalProperties", "properties")
    for keyword in (*PLAIN[1:], "oneOf", "anyOf", "allOf", *object_keywords, "type"):
        remaining = {name: value for name, value in node.items() if name != keyword}
        if keyword in node and not _fault_of_part(cleaned, remaining):
            return keyword
    return ""


def _with_keyword(keyword: str, fault: str) -> str:
    """The message of a fault, which names its keyword if it is known."""
    return fault if not keyword or keyword in fault else f"the keyword {keyword!r}: {fault}"


def _without_fault(
    cleaned: CleanSchema, place: str, node: Schema | bool, *, keyword: str
) -> CleanSchema:
    """Return the schema without one keyword of the faulty part, or with that part left empty."""
    if not isinstance(node, dict):
        return _ANY_OBJECT
    if keyword:
        del node[keyword]  # this schema is an unshared copy
        return replace(cleaned, unenforced=(*cleaned.unenforced, join_place(place, keyword)))
    definitions = node.get("$defs")
    node.clear()
    if definitions:
        node["$defs"] = definitions
    return replace(cleaned, unenforced=(*cleaned.unenforced, place))
