"""Last resort for unknown models: the `response_template` of tokenizer_config.json, with which
transformers reads a model's answers. Pure.

Supported: reasoning between two literals, and calls whose content is JSON or tags. The rest of a
template is ignored. Its patterns come with the model, so only those that match in linear time are
used: nested or optional groups, look-around and back references are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from holdfast.front.toolcalls.call_format import Call, CallParts, IdForm
from holdfast.front.toolcalls.declared import ToolName
from holdfast.front.toolcalls.incoming import Incoming, Waiting
from holdfast.front.toolcalls.literals import Literals, whole
from holdfast.front.toolcalls.typed_values import ParameterTypes, json_text

Kind: TypeAlias = Literal["literal", "space", "newline", "capture"]
_LONGEST: Final = 500
_PIECE: Final = re.compile(
    r"\(\?P<(?P<name>\w+)>(?P<inner>(?:\[\^?\]?(?:\\.|[^\]\\])+\]|\\[wSs]|\.)[*+]\??)\)"
    r"|(?P<space>\\s[*+]\??|\[(?:\\[nrst]| )+\][*+]\??|\\n[*+])"
    r"|(?P<newline>(?:\\n| )\?)"
    r"|(?P<escape>\\[^\w]|\\[nt])(?![*+?{])"
    r"|(?P<plain>[^.^$*+?{}\[\]\\|()])(?![*+?{])",
    re.DOTALL,
)
_ESCAPED: Final = {"\\n": "\n", "\\t": "\t"}
_LONGEST_CALL: Final = 200_000  # characters; a longer one is text
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")


class PatternPiece(NamedTuple):
    """A part of a pattern: its text, any white space, one line break or none, or a word to capture
    (`text`: what it may be).
    """

    kind: Kind
    text: str
    name: str = ""


Pieces: TypeAlias = tuple[PatternPiece, ...]


class Found(NamedTuple):
    """Where a pattern matches, and the words that it captured."""

    start: int
    end: int
    words: Mapping[str, str]


def literal(text: str) -> Pieces:
    """The pattern of a text."""
    return (PatternPiece("literal", text),)


def pieces(pattern: str) -> Pieces | None:
    """A pattern's parts, white space at its beginning left out.

    None: it is not of the kind that is read here.
    """
    if len(pattern) > _LONGEST:
        return None
    found: list[PatternPiece] = []
    place = 0
    while place < len(pattern):
        match = _PIECE.match(pattern, place)
        if match is None:
            return None
        place = match.end()
        piece = _piece(match)
        if piece.kind == "literal" and found and found[-1].kind == "literal":
            piece = PatternPiece("literal", found.pop().text + piece.text)
        if piece.kind == "capture" and found and found[-1].kind == "capture":
            return None
        found.append(piece)
    while found and found[0].kind in ("space", "newline"):
        found.pop(0)
    return tuple(found) if found and found[0].kind == "literal" else None


def match_at(parts: Pieces, text: str, place: int) -> Found | None:
    """Match at this place. A word ends where the next literal stands first, or as it can."""
    start, words = place, dict[str, str]()
    for index, part in enumerate(parts):
        if part.kind == "literal":
            if not text.startswith(part.text, place):
                return None
            place += len(part.text)
        elif part.kind == "space":
            place += len(text[place:]) - len(text[place:].lstrip())
        elif part.kind == "newline":
            place += text.startswith(("\n", " "), place)
        else:
            following = next(
                (other.text for other in parts[index + 1 :] if other.kind == "literal"), ""
            )
            last = None if following else re.compile(part.text, re.DOTALL).match(text, place)
            end = text.find(following, place) if following else last.end() if last else -1
            if end < 0:
                return None
            word = text[place:end]
            place = end
            between = parts[index + 1].kind if index + 1 < len(parts) else "capture"
            kept = (
                word.rstrip()
                if between == "space"
                else word.removesuffix("\n")
                if between == "newline"
                else word
            )
            place -= len(word) - len(kept)
            if not re.fullmatch(part.text, kept, re.DOTALL):
                return None
            words[part.name] = kept
    return Found(start, place, words)


def matches(parts: Pieces, text: str, place: int = 0) -> Iterator[Found]:
    """All matches from there on, none of which overlap."""
    while (at := text.find(parts[0].text, place)) >= 0:
        found = match_at(parts, text, at)
        place = found.end if found else at + 1
        if found:
            yield found


def written(parts: Pieces, words: Mapping[str, str]) -> str:
    """A text that the pattern matches, with these words."""
    return "".join(
        part.text
        if part.kind == "literal"
        else "\n"
        if part.kind == "newline"
        else words.get(part.name, "")
        for part in parts
    )


def _piece(match: re.Match[str]) -> PatternPiece:
    if match["name"]:
        return PatternPiece("capture", match["inner"], match["name"])
    if match["space"]:
        return PatternPiece("space", "")
    if match["newline"]:
        return PatternPiece("newline", "")
    if match["escape"]:
        return PatternPiece("literal", _ESCAPED.get(match["escape"], match["escape"][1:]))
    return PatternPiece("literal", match["plain"])


class TemplateSays(NamedTuple):
    """What of a response template is served."""

    calls: TemplateCalls | None
    reasoning: tuple[str, str] | None  # marker before and behind a thought


def read_response_template(template: Any) -> TemplateSays:
    """What a template says of calls and reasoning.

    Never raises: what is not understood is not there.
    """
    fields = (
        template.get("fields")
        if isinstance(template, Mapping) and template.get("version", 1) == 1
        else None
    )
    if not isinstance(fields, Mapping):
        return TemplateSays(None, None)
    thought: Mapping[str, Any] = next(
        (fields[name] for name in _REASONING if isinstance(fields.get(name), Mapping)), {}
    )
    opener, closer = _mark(thought, "open"), _mark(thought, "close")
    both = opener and closer and len(opener) == len(closer) == 1
    reasoning = (opener[0].text, closer[0].text) if both and opener and closer else None
    return TemplateSays(_calls(fields.get("tool_calls")), reasoning)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCalls:
    """Calls between two patterns, their content as JSON or as tags.

    tag: matches one argument, as `key` and `value`; empty: the content is JSON. transform: the
    shape of a call, in which words in braces stand for what was captured. each: the content is a
    list of calls.
    """

    open: Pieces
    close: Pieces
    transform: Any = None
    tag: Pieces = ()
    each: bool = False
    quotes: tuple[str, ...] = ()
    bare_keys: bool = False
    id_form: IdForm = "random"

    @property
    def marks(self) -> Sequence[str]:
        """All markers."""
        return tuple(
            dict.fromkeys(
                part.text.strip()
                for side in (self.open, self.close)
                for part in side
                if part.kind == "literal"
            )
        )

    @property
    def openers(self) -> Sequence[str]:
        """What a call may begin with."""
        return (self.open[0].text.strip(),)

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the template reads them, if it says where the name stands."""
        return "\n".join(self._written(call) for call in calls)

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read what stands between the patterns, once all of it is there. False: that is no call."""
        start = source.place
        found, place, sought = None, start + len(self.openers[0]), self.close[0].text
        while found is None:
            at, mark = yield from source.find((sought,), place, limit=_LONGEST_CALL)
            if not mark:
                return False
            found = match_at(self.close, source.text, at)
            while found is None and len(source.text) - at < _LONGEST_CALL and not source.ended:
                rest = source.text[at + len(sought) :].strip()
                if rest and not any(part.text.startswith(rest) for part in self.close[1:]):
                    break
                yield
                found = match_at(self.close, source.text, at)
            place = at + 1
        opened = match_at(self.open, source.text, start)
        calls = (
            self._calls(source.plain(source.text[opened.end : found.start]), opened.words, parts)
            if opened
            else []
        )
        for tool, arguments in calls:
            parts.begin(tool)
            parts.json(json_text(arguments))
            parts.end(complete=True)
        source.place = found.end
        return bool(calls)

    def _calls(
        self, text: str, words: Mapping[str, str], parts: CallParts
    ) -> list[tuple[ToolName, dict[str, Any]]]:
        content = self._content(text)
        items = content if self.each and isinstance(content, list) else [content]
        found = []
        for item in items:
            scope = (
                {**words, **item}
                if self.each and isinstance(item, dict)
                else {**words, "content": item}
            )
            call = _filled(self.transform, scope) if self.transform is not None else item
            function = call.get("function", call) if isinstance(call, dict) else {}
            name, arguments = (
                (function.get("name"), function.get("arguments"))
                if isinstance(function, dict)
                else (None, None)
            )
            tool = parts.tools.named(name) if isinstance(name, str) else None
            if tool is None or not isinstance(arguments, dict):
                return []
            found.append(
                (
                    tool,
                    _typed(arguments, parts.tools.parameters(tool.name)) if self.tag else arguments,
                )
            )
        return found

    def _content(self, text: str) -> Any:
        if self.tag:
            return {
                found.words["key"].strip(): found.words["value"]
                for found in matches(self.tag, text)
            }
        read = whole(text, Literals(raw_quotes=self.quotes, bare_keys=self.bare_keys))
        return None if read is None else json.loads(read)

    def _written(self, call: Call) -> str:
        if self.tag:
            content = "".join(
                written(self.tag, {"key": key, "value": _text(value)})
                for key, value in call.arguments.items()
            )
        elif any(part.name for part in self.open):
            content = _text(dict(call.arguments))
        else:
            content = _text({"name": call.name, "arguments": dict(call.arguments)})
        return (
            written(self.open, {part.name: call.name for part in self.open if part.name})
            + content
            + written(self.close, {})
        )


def _calls(field: Any) -> TemplateCalls | None:
    if not isinstance(field, Mapping):
        return None
    opener, closer = _mark(field, "open"), _mark(field, "close")
    kind, more = field.get("content", "text"), field.get("content_args")
    arguments: Mapping[str, Any] = more if isinstance(more, Mapping) else {}
    tag = pieces(str(arguments.get("tag_pattern"))) if kind == "xml-inline" else ()
    if not opener or not closer or kind not in ("json", "xml-inline") or tag is None:
        return None
    if tag and {part.name for part in tag if part.name} != {"key", "value"}:
        return None
    quotes = arguments.get("string_delims", ())
    same = tuple(
        pair[0]
        for pair in quotes
        if isinstance(pair, list) and len(pair) == 2 and pair[0] == pair[1]
    )
    return TemplateCalls(
        open=opener,
        close=closer,
        transform=field.get("transform"),
        tag=tag,
        each=field.get("transform_each") is True,
        quotes=same,
        bare_keys=arguments.get("unquoted_keys") is True,
    )


def _mark(field: Mapping[str, Any], side: str) -> Pieces | None:
    """The mark that opens or closes a field; the first of several."""
    named, pattern = field.get(side), field.get(f"{side}_pattern")
    named = named[0] if isinstance(named, list) and named else named
    if isinstance(named, str) and named.strip():
        return literal(named.strip())
    return pieces(pattern) if isinstance(pattern, str) else None


def _filled(shape: Any, scope: Mapping[str, Any]) -> Any:
    """The shape with values for the words in braces; one that is not there is None."""
    if isinstance(shape, Mapping):
        return {key: _filled(value, scope) for key, value in shape.items()}
    if isinstance(shape, (list, tuple)):
        return [_filled(value, scope) for value in shape]
    if not (isinstance(shape, str) and shape.startswith("{") and shape.endswith("}")):
        return shape
    value: Any = scope
    for word in shape[1:-1].split("."):
        value = value.get(word) if isinstance(value, Mapping) else None
    return value


def _typed(arguments: Mapping[str, Any], types: ParameterTypes) -> dict[str, Any]:
    return {
        key: json.loads(types.value(key, value).json) if isinstance(value, str) else value
        for key, value in arguments.items()
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
