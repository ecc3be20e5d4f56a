"""Fields that clients send and whose meaning is known, but which are not served: refused, not
ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.front.server.problem import RequestRefused

_log = logging.getLogger(__name__)
_NOT_YET = "this version does not support it yet"
_MOST_REMEMBERED = 1000
_already_logged: set[str] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedFields:
    """Those of a dialect: field → the values with which it asks for nothing (null does for every
    field), and why not.
    """

    neutral: Mapping[str, tuple[Any, ...]]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, extras: Mapping[str, Any] | None) -> None:
        """Raise for the first field of `extras` that asks for something known and unsupported; log
        unknown ones, each once.
        """
        for name, value in (extras or {}).items():
            if name not in self.neutral:
                log_once("ignored an unknown request field: %r", name)
            elif value is not None and not any(
                _same(value, neutral) for neutral in self.neutral[name]
            ):
                reason = self.reasons.get(name, _NOT_YET)
                raise RequestRefused(
                    f"`{name}`: {reason}", code="unsupported_parameter", field=name
                )


def _same(value: Any, neutral: Any) -> bool:
    # True == 1 in Python, but not for who reads JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def log_once(message: str, name: str) -> None:
    """Warn of what a client asks for in vain, once for each name; `message` has a place for it."""
    if name not in _already_logged and len(_already_logged) < _MOST_REMEMBERED:
        _already_logged.add(name)
        _log.warning(message, name[:100])
