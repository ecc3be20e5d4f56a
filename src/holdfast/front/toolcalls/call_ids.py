"""Ids of calls, in the form that a family's chat template takes back.

Pure but for its source of random text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable

from holdfast.front.toolcalls.call_format import IdForm

_ALPHABET = string.ascii_letters + string.digits
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
_FUNCTION = re.compile(r"functions\.(.+):[0-9]+")


def random_text(length: int) -> str:
    """So many letters and digits, from the system's source."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


class CallIds:
    """Gives the calls of one answer their ids. No id is given twice in a conversation."""

    def __init__(
        self,
        form: IdForm,
        *,
        earlier: Iterable[str] = (),
        random_text: Callable[[int], str] = random_text,
    ) -> None:
        """earlier: ids of the conversation's calls before this answer; where ids count, they count
        on from these.
        """
        self._form, self._random_text = form, random_text
        self._taken = set(earlier)
        self._count = len(self._taken)

    def next(self, name: str, *, written: str = "") -> str:
        """The id of the answer's next call. written: what the model wrote as its id; it stays if it
        is of the family's form.
        """
        call_id = (
            written
            if written and written not in self._taken and self._is_of_form(written, name)
            else self._new(name)
        )
        self._taken.add(call_id)
        self._count += 1
        return call_id

    def _is_of_form(self, written: str, name: str) -> bool:
        match self._form:
            case "alnum9":
                return _NINE.fullmatch(written) is not None
            case "function_number":
                found = _FUNCTION.fullmatch(written)
                return found is not None and found[1] == name
            case "number":
                return written.isascii() and written.isdigit()
        return True

    def _new(self, name: str) -> str:
        while True:
            match self._form:
                case "alnum9":
                    call_id = self._random_text(9)
                case "function_number":
                    call_id = f"functions.{name}:{self._count}"
                case "number":
                    call_id = str(self._count)
                case _:
                    call_id = "call_" + self._random_text(24)
            if call_id not in self._taken:
                return call_id
            self._count += 1  # a client may have ids of its own
