"""Texts that a client keeps for this server: it cannot read or change them, and brings them back as
they are.

What a model has thought goes to clients in such a form, so that a server that stores nothing finds
it again in the next turn.
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

_KEY_BYTES, _MARK_BYTES = 32, 16
_KEY_FILE = "seal.key"
_VERSION = "hf1"
_SIGNED, _CLOSED = b"signed", b"closed"

_log = logging.getLogger(__name__)


class Seal:
    """Seals texts with a key of this server.

    The same text gives the same seal, so that prompts stay the same. Any thread.

    folder: keeps the key from one start to the next, where there is one; without it a seal is good
    for this process only. The key is read or made when it is first needed: by then the store has
    made its folder.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._key = functools.cache(functools.partial(_key_in, folder))

    def of(self, tenant: str) -> Seal:
        """The seal of a tenant: what it has closed no other tenant can open.

        That of the nameless one is this.
        """
        if not tenant:
            return self
        seal = Seal()
        seal._key = functools.cache(
            lambda: hashlib.blake2b(
                tenant.encode(), key=self._key(), digest_size=_KEY_BYTES
            ).digest()
        )
        return seal

    def sign(self, text: str) -> str:
        """A mark that only this server can have put on the text."""
        return f"{_VERSION}.{_shown(self._mark(text.encode('utf-8', 'surrogatepass'), _SIGNED))}"

    def is_signed(self, text: str, mark: str) -> bool:
        """Whether `sign` has given that mark for the text."""
        return hmac.compare_digest(mark.encode("utf-8", "replace"), self.sign(text).encode())

    def close(self, text: str) -> str:
        """The text in a form that only this server can open."""
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
        mark = self._mark(packed, _CLOSED)
        return f"{_VERSION}.{_shown(mark + self._masked(packed, mark))}"

    def open(self, sealed: str) -> str | None:
        """The text that was closed; None for what this server did not close."""
        version, _, shown = sealed.partition(".")
        try:
            raw = (
                base64.b64decode(shown.encode("ascii"), validate=True)
                if version == _VERSION
                else b""
            )
        except ValueError:
            return None
        mark = raw[:_MARK_BYTES]
        packed = self._masked(raw[_MARK_BYTES:], mark)
        # The mark is of the packed bytes: some others unpack to the same text, and some to
        # gigabytes.
        if _shown(raw) != shown or not hmac.compare_digest(mark, self._mark(packed, _CLOSED)):
            return None
        return zlib.decompress(packed).decode("utf-8", "surrogatepass")

    def _mark(self, body: bytes, purpose: bytes) -> bytes:
        return hashlib.blake2b(
            body, key=self._key(), digest_size=_MARK_BYTES, person=purpose
        ).digest()

    def _masked(self, body: bytes, mark: bytes) -> bytes:
        """The bytes under a stream that key and mark give; the same again takes it off."""
        stream = hashlib.shake_256(self._key() + mark).digest(len(body))
        return (int.from_bytes(body) ^ int.from_bytes(stream)).to_bytes(len(body))


def _key_in(folder: Path | None) -> bytes:
    """The key in a folder, made if there is none; one for this process where there is no folder, or
    it cannot be written.
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
        _log.warning("sealed texts will not outlive this process: %s", error)
        return key


def _shown(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
