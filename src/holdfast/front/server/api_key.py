"""The API key of a request, whichever header brings it: OpenAI's clients, Anthropic's and Azure's
use one each.
"""

from __future__ import annotations

from collections.abc import Mapping

KEY_HEADER_NAMES = ("x-api-key", "api-key")  # beside Authorization
KEY_HEADERS = (b"authorization", *(name.encode() for name in KEY_HEADER_NAMES))


def given_keys(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Header → key, for every header that brings one.

    An Authorization that is no Bearer is somebody else's, not a key.
    """
    keys = {name: headers[name].strip() for name in KEY_HEADERS[1:] if name in headers}
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        keys[b"authorization"] = token.strip()
    return {name: key for name, key in keys.items() if key}
