"""Pieces of a grammar in llguidance's Lark: literals, markers, JSON values, free text. Each is an expression."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import regex_to_lark

# A space, or a new line and its indent: what models write. Without a bound a small model writes white space for ever.
WHITE_SPACE: Final = r"( |\n[ \t]{0,24})?"
ANY_TEXT: Final = r"/(.|\n)*/"  # of no token that stands for a marker: those have no text for a grammar
_JSON_OPTIONS: Final = {"whitespace_pattern": WHITE_SPACE, "coerce_one_of": True, "lenient": False}


def literal(text: str) -> str:
    """This text, and no other."""
    return json.dumps(text) if text else '""'


def pattern(regex: str) -> str:
    """What matches a regular expression, as a whole."""
    return f"/{regex_to_lark(regex, use_ascii='')}/"


def json_value(schema: Any) -> str:
    """A value of a schema that is clean, as JSON text."""
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return "%json " + json.dumps({**schema, "x-guidance": _JSON_OPTIONS})


def marker(text: str, marker_ids: Mapping[str, int]) -> str:
    """A marker, as its token where it is a single one of the model, else as its text."""
    token_id = marker_ids.get(text)
    return literal(text) if token_id is None else f"<[{token_id}]>"


def escaped(text: str) -> str:
    """A text as a part of a regular expression in slashes."""
    return re.sub(r"[]\\.+*?()|[{}^$#&~/-]", lambda found: "\\" + found[0], text).replace("\n", "\\n")


def grammar_text(lark: str, **grammars: str) -> str:
    """What the worker takes: a grammar, and others that it refers to as `@name`."""
    texts = {"answer": lark, **grammars}
    return json.dumps({"grammars": [{"name": name, "lark_grammar": text} for name, text in texts.items()]})
