"""Sealed texts: a client keeps them for this server and sends them back, but can neither read nor
change them.

Clients get a model's thoughts in this form, so that a server that stores nothing has them in the
next turn.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import logging
import secrets
import zlib
from pathlib import Path

from holdfast.files import atomic_create

_KEY_BYTES = 32
_MARK_BYTES = 16
_KEY_FILE = "seal.key"
_VERSION = "hf1"
_SIGNED = b"signed"
_CLOSED = b"closed"

_log = logging.getLogger(__name__)


class Seal:
    """Seals texts with a key of this server. Thread-safe.

    The same text gives the same seal, so that prompts stay the same.

    folder: where the key is stored. Without a folder, seals are valid only for this process. The
        key is read or created at its first use: by then the store has created its folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._key = functools.cache(functools.partial(_key_in, folder))

    def of(self, tenant: str) -> Seal:
        """The seal of a tenant: no other tenant can open what it has closed. Empty: this seal."""
        if not tenant:
            return self
        seal = Seal()

        def key() -> bytes:
            name = tenant.encode()
            return hashlib.blake2b(name, key=self._key(), digest_size=_KEY_BYTES).digest()

        seal._key = functools.cache(key)
        return seal

    def sign(self, text: str) -> str:
        """A signature of the text that only this server can make."""
        return f"{_VERSION}.{_shown(self._mark(text.encode('utf-8', 'surrogatepass'), _SIGNED))}"

    def is_signed(self, text: str, mark: str) -> bool:
        """Whether `sign` made this signature for the text."""
        return hmac.compare_digest(mark.encode("utf-8", "replace"), self.sign(text).encode())

    def close(self, text: str) -> str:
        """The text, encrypted so that only this server can open it."""
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
        mark = self._mark(packed, _CLOSED)
        return f"{_VERSION}.{_shown(mark + self._masked(packed, mark))}"

    def open(self, sealed: str) -> str | None:
        """The text of a closed seal; None if this server did not close it."""
        version, _, shown = sealed.partition(".")
        if version != _VERSION:
            return None
        try:
            raw = base64.b64decode(shown.encode("ascii"), validate=True)
        except ValueError:
            return None
        mark = raw[:_MARK_BYTES]
        packed = self._masked(raw[_MARK_BYTES:], mark)
        # Verified before unpacking: other bytes might unpack to the same text, or to gigabytes.
        if _shown(raw) != shown or not hmac.compare_digest(mark, self._mark(packed, _CLOSED)):
            return None
        return zlib.decompress(packed).decode("utf-8", "surrogatepass")

    def _mark(self, body: bytes, purpose: bytes) -> bytes:
        key = self._key()
        return hashlib.blake2b(body, key=key, digest_size=_MARK_BYTES, person=purpose).digest()

    def _masked(self, body: bytes, mark: bytes) -> bytes:
        """The bytes, encrypted with a stream from key and mark; applied twice, the bytes again."""
        stream = hashlib.shake_256(self._key() + mark).digest(len(body))
        return (int.from_bytes(body) ^ int.from_bytes(stream)).to_bytes(len(body))


def _key_in(folder: Path | None) -> bytes:
    """The key in a folder, created if there is none. If the folder cannot be used: a key that is
    valid only for this process.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    if folder is None or not folder.is_dir():
        return key
    path = folder / _KEY_FILE
    try:
        if not path.exists():
            with atomic_create(path) as file:
                file.write(key)
        kept = path.read_bytes()
        return kept if len(kept) == _KEY_BYTES else key
    except OSError as error:
        _log.warning("sealed texts are valid only until this process ends: %s", error)
        return key


def _shown(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
