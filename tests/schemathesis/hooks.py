"""Settings for schemathesis: answers are kept short.

Only their form is checked, not their content.
"""

from __future__ import annotations

from typing import Any

import schemathesis

_MOST = 4
_BOUNDS = {
    "/v1/chat/completions": ("max_tokens",),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/responses/compact": ("max_output_tokens",),
    "/api/chat": ("options", "num_predict"),
    "/api/generate": ("options", "num_predict"),
}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Limit the requested tokens, unless the request is invalid anyway."""
    *outer, name = _BOUNDS.get(case.operation.path, ("",))
    body = case.body
    for key in outer:
        if isinstance(body, dict) and body.get(key) is None:
            body[key] = {}
        body = body.get(key) if isinstance(body, dict) else None
    if not name or not isinstance(body, dict):
        return
    if body.get(name) is None or (isinstance(body[name], int) and not 0 <= body[name] <= _MOST):
        body[name] = _MOST
    if isinstance(body.get("max_completion_tokens"), int):
        body["max_completion_tokens"] = min(body["max_completion_tokens"], _MOST)
