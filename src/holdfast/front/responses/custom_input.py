"""The text that a call of a custom tool carries: the string in `{"input": "…"}`, decoded while its
JSON comes in pieces.
"""

from __future__ import annotations

import json
import re

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_NO_LOW = r"(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
# what of a JSON string can be decoded already: up to its end, or to an escape that is not all there
_WHOLE = re.compile(
    rf'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_HIGH}(?:{_LOW}|{_NO_LOW}))*+'
)


class CustomInput:
    """Decodes one call's input.

    All that `more` and `rest` give joins to what the call's JSON has in `input`.
    """

    def __init__(self) -> None:
        self._arguments: list[str] = []
        self._waiting = ""  # behind what has been given
        self._is_open = False
        self._given = ""

    def more(self, fragment: str) -> str:
        """What a further fragment of the arguments brings of the input."""
        self._arguments.append(fragment)
        self._waiting += fragment
        if not self._is_open:
            opening = _OPENING.match(self._waiting)
            if opening is None:
                return ""
            self._is_open, self._waiting = True, self._waiting[opening.end() :]
        found = _WHOLE.match(self._waiting)
        piece = found[0] if found else ""
        self._waiting = self._waiting[len(piece) :]
        return self._give(_decoded(piece))

    def rest(self) -> str:
        """What of the input is still to be given when the call has ended.

        Arguments of another form are given as they are.
        """
        arguments = "".join(self._arguments)
        try:
            whole = json.loads(arguments, strict=False)
        except ValueError:
            whole = None
        text = whole.get("input") if isinstance(whole, dict) else None
        if not isinstance(text, str):
            return "" if self._is_open else self._give(arguments)
        text = _mended(text)
        return self._give(text[len(self._given) :]) if text.startswith(self._given) else ""

    def _give(self, text: str) -> str:
        self._given += text
        return text


def _decoded(piece: str) -> str:
    return _mended(json.loads(f'"{piece}"', strict=False)) if piece else ""


def _mended(text: str) -> str:
    """Without halves of surrogate pairs, which no JSON answer can carry."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
