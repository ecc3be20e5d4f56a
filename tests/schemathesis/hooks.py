"""What schemathesis is told of the server: answers are kept short. Their form is what is looked at, not what they say."""

from __future__ import annotations

from typing import Any

import schemathesis

_BOUNDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_MOST = 4


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Bound the tokens that a request asks for, where they are a number that would be served."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in _BOUNDS:
        if isinstance(body.get(name), int) and body[name] > _MOST:
            body[name] = _MOST
