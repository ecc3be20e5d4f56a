"""Converts a client's JSON schema to a schema that a grammar can enforce: references are collected,
and whatever cannot be enforced is refused or left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.front.structured import keywords
from holdfast.front.toolcalls.json_schema import References, named_types, strings

Schema: TypeAlias = dict[str, Any]


class SchemaFault(Exception):
    """A schema cannot be enforced.

    place: a JSON pointer to the keyword at fault. Never log it, because it contains names from the
        client's schema.
    """

    def __init__(self, reason: str, *, place: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place

    @property
    def where(self) -> str:
        """The place in the schema, as the last part of a message; empty if it is unknown."""
        return f", at {self.place}" if self.place else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaBounds:
    """How many subschemas a schema may have, and how deep they may be nested."""

    parts: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanSchema:
    """A schema in which a grammar can enforce every keyword.

    unenforced: paths of keywords that were left out. origins: the path of each definition in the
    client's schema, by the definition's name.
    """

    schema: Schema | bool
    unenforced: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)


def clean(schema: Any, *, bounds: SchemaBounds, strict: bool) -> CleanSchema:
    """Reduce a schema to the keywords that a grammar enforces. References to other documents are
    not followed.

    strict: raise SchemaFault for a keyword that cannot be enforced, instead of leaving it out.
    SchemaFault is always raised for anything that is not a schema or exceeds the bounds.
    """
    cleaner = _SchemaCleaner(schema, bounds=bounds, strict=strict)
    root = cleaner.clean_schema(schema, place="#", depth=0, may_close=True)
    if cleaner.definitions and isinstance(root, dict):
        root = {**root, "$defs": cleaner.definitions}
    return CleanSchema(schema=root, unenforced=tuple(cleaner.unenforced), origins=cleaner.origins)


class _SchemaCleaner:
    """Walks one schema and copies what a grammar enforces. The target of a reference becomes a
    definition, at the first reference to it.

    definitions: the clean definitions by name. origins, unenforced: as in `CleanSchema`. In all
    methods, `place` is the JSON pointer of a schema, and `depth` the number of schemas around it.
    """

    def __init__(self, root: Any, *, bounds: SchemaBounds, strict: bool) -> None:
        self.definitions: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.unenforced: list[str] = []
        self._references = References(root)
        self._bounds = bounds
        self._strict = strict
        # names of definitions, by the reference and by whether objects in the definition may be
        # closed, that is, may forbid properties that they do not declare
        self._definition_names: dict[tuple[str, bool], str] = {}
        self._counted_parts = 0

    def clean_schema(self, node: Any, *, place: str, depth: int, may_close: bool) -> Schema | bool:
        """Return a clean copy of a schema. Raises SchemaFault.

        may_close: whether an object that only lists its properties may forbid all others.
        """
        self._counted_parts += 1
        if isinstance(node, dict) and isinstance(node.get("enum"), list):
            self._counted_parts += len(node["enum"])
        if self._counted_parts > self._bounds.parts:
            raise SchemaFault(f"the schema has more than {self._bounds.parts} parts")
        if depth > self._bounds.depth:
            raise SchemaFault(
                f"the schema is nested deeper than {self._bounds.depth} levels", place=place
            )
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaFault("a schema must be an object or a boolean", place=place)
        cleaned: Schema = {}
        if "$ref" in node:
            may_close_target = may_close and _is_only_member_keyword(node, "$ref")
            name = self._definition(
                node["$ref"], place=place, depth=depth, may_close=may_close_target
            )
            if name:
                cleaned["$ref"] = f"#/$defs/{name}"
        for keyword in keywords.PLAIN:
            if keyword in node and self._accept_keyword(keyword, node, place=place):
                cleaned[keyword] = keywords.enforced_value(keyword, node[keyword])
        for keyword in keywords.UNSUPPORTED:
            if keyword in node and not keywords.says_nothing(keyword, node[keyword], node):
                self._leave_out(keyword, place=place)
        for keyword, child, key in children(node, place=place):
            # otherwise, a closed subschema would forbid members that the schemas beside it describe
            describes_members_alone = (
                keyword not in keywords.LISTS
                or keyword == "prefixItems"
                or (keyword != "allOf" and _is_only_member_keyword(node, keyword))
            )
            subschema = self.clean_schema(
                child,
                place=join_place(place, keyword, *key),
                depth=depth + 1,
                may_close=may_close if describes_members_alone else False,
            )
            _put_subschema(cleaned, keyword, key, subschema)
        if "maxLength" not in cleaned and (
            max_length := keywords.LONGEST_OF_FORMAT.get(str(cleaned.get("format")))
        ):
            cleaned["maxLength"] = max_length
        if may_close and _lists_its_properties(node):
            cleaned["additionalProperties"] = False
        if keywords.alternatives(cleaned) > keywords.MOST_ALTERNATIVES:
            raise SchemaFault(
                f"there are more than {keywords.MOST_ALTERNATIVES} branches in one place",
                place=place,
            )
        return cleaned

    def _leave_out(self, keyword: str, *, place: str, reason: str = "cannot be enforced") -> None:
        """Note that a keyword is not enforced. Raises SchemaFault in strict mode."""
        if self._strict:
            raise SchemaFault(f"the keyword {keyword!r} {reason}", place=join_place(place, keyword))
        self.unenforced.append(join_place(place, keyword))

    def _accept_keyword(self, keyword: str, node: Schema, *, place: str) -> bool:
        """Decide whether a keyword stays in the schema; if not, note that it is left out, unless it
        says nothing. Raises SchemaFault.
        """
        value = node[keyword]
        match keyword:
            case _ if not keywords.is_well_typed(keyword, value):
                self._leave_out(keyword, place=place, reason="has a value of the wrong type")
                return False
            case "minimum" | "exclusiveMinimum" if value > keywords.MOST_NUMBER:
                reason = "contains a number above the 64-bit range"
                self._leave_out(keyword, place=place, reason=reason)
                return False
            case "minimum" | "exclusiveMinimum":
                return True
            case _ if keywords.is_too_small(value):
                reason = "contains a number below the 64-bit range"
                self._leave_out(keyword, place=place, reason=reason)
                return False
            case "format" if value not in keywords.FORMATS:
                if value in keywords.UNKNOWN_FORMATS and (
                    "type" not in node or "string" in named_types(node)
                ):
                    self._leave_out(
                        keyword, place=place, reason=f"has the unsupported value {value!r}"
                    )
                return False
            case "pattern" if isinstance(value, str):
                reason = keywords.pattern_fault(value)
                if reason:
                    self._leave_out(keyword, place=place, reason=reason)
                return not reason
            case "enum" | "const":
                longest = keywords.LONGEST_LITERAL * (64 if keyword == "enum" else 1)
                if keywords.size_of_literal(value) > longest:
                    raise SchemaFault(
                        f"the value of {keyword!r} has too many characters",
                        place=join_place(place, keyword),
                    )
                return True
            case "minProperties":
                return bool(value > len(set(strings(node.get("required")))))
            case "maxProperties":
                return not (_lists_its_properties(node) and len(node["properties"]) <= value)
            case _:
                return True

    def _definition(self, reference: Any, *, place: str, depth: int, may_close: bool) -> str:
        """Return the name of the definition that a reference points to.

        Returns an empty name if the reference cannot be resolved; the schema is then enforced
        without its `$ref`.
        """
        where = join_place(place, "$ref")
        if not isinstance(reference, str):
            raise SchemaFault("a reference must be a string", place=where)
        name = self._definition_names.get((reference, may_close))
        if name is None:
            try:
                target = self._references.target(reference)
            except LookupError:
                reason = "does not point into the schema; other documents are not loaded"
                self._leave_out("$ref", place=place, reason=reason)
                return ""
            name = self._definition_names[reference, may_close] = f"d{len(self._definition_names)}"
            self.definitions[name] = {}
            self.origins[name] = reference if reference.startswith("#") else where
            self.definitions[name] = self.clean_schema(
                target, place=self.origins[name], depth=depth + 1, may_close=may_close
            )
        return name


def children(node: Schema, *, place: str) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Iterate over the subschemas of a schema.

    Yields the keyword that contains the subschema, the subschema, and its name or number, if any.
    Raises SchemaFault if one of these keywords contains anything but schemas.
    """
    for keyword in keywords.MAPS:
        members = node.get(keyword, {})
        if not isinstance(members, dict):
            raise SchemaFault(
                f"{keyword!r} must be an object of schemas", place=join_place(place, keyword)
            )
        for name, member in members.items():
            if len(name) > keywords.LONGEST_LITERAL:
                raise SchemaFault(
                    f"a name has more than {keywords.LONGEST_LITERAL:,} characters",
                    place=join_place(place, keyword),
                )
            yield keyword, member, (name,)
    for keyword in keywords.LISTS + keywords.SINGLES:
        value = node.get(keyword)
        if isinstance(value, list | tuple):
            yield from ((keyword, member, (str(number),)) for number, member in enumerate(value))
        elif value is not None:
            if keyword in keywords.LISTS:
                raise SchemaFault(
                    f"{keyword!r} must be a list of schemas", place=join_place(place, keyword)
                )
            yield keyword, value, ()


def _put_subschema(
    cleaned: Schema, keyword: str, key: tuple[str, ...], subschema: Schema | bool
) -> None:
    """Put a subschema where `children` found it: `key` is its name or number, or empty."""
    if not key:
        cleaned[keyword] = subschema
    elif keyword in keywords.MAPS:
        cleaned.setdefault(keyword, {})[key[0]] = subschema
    else:
        cleaned.setdefault(keyword, []).append(subschema)


def _lists_its_properties(node: Schema) -> bool:
    """Whether an object seems to allow only its declared properties, although no keyword says so."""
    properties = node.get("properties")
    allowing_others = ("allOf", "anyOf", "oneOf", "$ref", "if", *keywords.OPENING)
    if not isinstance(properties, dict) or any(keyword in node for keyword in allowing_others):
        return False
    return set(strings(node.get("required"))) <= properties.keys()


def _is_only_member_keyword(node: Schema, keyword: str) -> bool:
    """Whether no other keyword of a schema describes members.

    If so, the subschemas of this keyword may forbid members that they do not declare.
    """
    others = (*keywords.OF_OBJECTS, "allOf", "anyOf", "oneOf", "$ref")
    return not any(other in node for other in others if other != keyword)


def join_place(place: str, *steps: str) -> str:
    """Append steps to a JSON pointer."""
    return "/".join((place, *(step.replace("~", "~0").replace("/", "~1") for step in steps)))
