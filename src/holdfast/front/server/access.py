"""API keys, the caller of a request, limits per caller, the drain before the server stops, and the
encryption of texts that clients store for the server.

The key file contains hashes, never keys. An encrypted ("sealed") text is stored by the client and
sent back in the next turn, but the client can neither read nor change it. A model's thoughts are
sent in this form, so the server gets them back without storing them.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from holdfast.config import LimitsSettings
from holdfast.errors import ConfigError, ServerStopping
from holdfast.files import (
    atomic_create,
    atomic_write,
    configuration_folder,
    expanded,
    open_regular,
    read_regular,
    sync_to_drive,
)
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import Priority

if TYPE_CHECKING:  # the web framework is imported only after the keys are read
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from starlette.requests import Request

AUTO, OFF = "auto", "off"  # values of `server.keys_file` that are not paths
_PREFIX = "sk-holdfast-"  # some clients require the first three characters
_SECRET_BYTES = 32
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}\Z"
KEY_HEADER_NAMES = ("x-api-key", "api-key")  # headers that may carry a key, besides Authorization
KEY_HEADERS = (b"authorization", *(name.encode() for name in KEY_HEADER_NAMES))
CALLER = "holdfast.caller"  # key of a request's Caller in its ASGI scope
_LONGEST_RETRY_SECONDS = 60  # most that clients are told to wait; they do not wait longer
_GAIN = 0.2  # weight of a new value in the moving average of request durations
# methods that a draining server accepts; DELETE is among them because, like the paths `/cancel`, it
# only ends things
_READS = frozenset({"GET", "HEAD", "OPTIONS", "DELETE"})
_RESTART_SECONDS = 2.0  # estimated time until the restarted server, or another one, listens
_SEAL_KEY_BYTES = 32
_CIPHER_KEY_BYTES = 64  # AES-SIV with AES-256, which uses two keys
_SIGNATURE_BYTES = 16
_SEAL_KEY_FILE = "seal.key"
_SIGNED_VERSION = "hf1"
_ENCRYPTED_VERSION = "hf2"  # "hf1" was another cipher, whose texts are refused
_log = logging.getLogger(__name__)


class ApiKey(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A named API key.

    The name determines the tenant: if a key is replaced by one with the same name, its client keeps
    using the same cached prefixes.
    """

    name: Annotated[str, Meta(pattern=_NAME)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # the hash of the key
    is_admin: bool = False
    priority: Priority = "interactive"  # the highest priority that its requests can have
    # maximum of running and waiting answers; None: `limits.max_requests_per_key`
    max_requests: Annotated[int, Meta(ge=1)] | None = None
    created: str = ""


class KeyFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the key file.

    `keys` is required, because a file without this field is damaged, and a damaged file must not
    lock everybody out.
    """

    format: Literal[1] = 1
    keys: tuple[ApiKey, ...]


def new_secret() -> str:
    """Create a random API key."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def hash_of(key: bytes) -> str:
    """The hash under which the file stores a key.

    One round of SHA-256 is enough: slow hashes protect passwords that people choose. A key of 256
    random bits cannot be guessed, and the hash is computed for every request.
    """
    return hashlib.sha256(key).hexdigest()


def key_file_of(setting: str, environ: Mapping[str, str]) -> Path | None:
    """The path of the key file to use; None if no key file is used.

    setting: value of `server.keys_file`; `auto` means the user's own file, if that exists.

    Raises ConfigError if the home directory does not exist.
    """
    if setting in ("", OFF):
        return None
    if setting == AUTO:
        user_file = own_key_file(environ)
        return user_file if user_file is not None and user_file.exists() else None
    return expanded(setting)


def own_key_file(environ: Mapping[str, str]) -> Path | None:
    """The path of the user's own key file, which may not exist; None if the user lacks a home
    folder.
    """
    try:
        return configuration_folder(environ) / "keys.json"
    except RuntimeError:
        return None


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the entries of a key file.

    Raises ConfigError if the file is unreadable or invalid, or if other users may read or change
    it.
    """
    try:
        with open_regular(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read()
    except FileNotFoundError:
        raise ConfigError(
            f"server.keys_file: {path} does not exist; `holdfast keys add NAME` creates it"
        ) from None
    except OSError as error:
        raise ConfigError(f"server.keys_file: {path} cannot be read: {error.strerror}") from None
    if os.name == "posix" and mode & 0o077:
        raise ConfigError(
            f"server.keys_file: other users can read or change {path}; make it private: chmod 600 "
            f"{path}"
        )
    try:
        key_file = msgspec.json.decode(content, type=KeyFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"server.keys_file: {path} is not a key file: {error}") from None
    for name in ("name", "sha256"):
        values = [getattr(key, name) for key in key_file.keys]
        if len(set(values)) < len(values):
            raise ConfigError(f"server.keys_file: {path} has two keys with the same {name}")
    return key_file.keys


def write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Replace the key file atomically. Only the file's owner can read the new file.

    Raises ConfigError if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(
                msgspec.json.format(msgspec.json.encode(KeyFile(keys=tuple(keys))), indent=2)
                + b"\n"
            )
            file.flush()
            sync_to_drive(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def named_key(
    name: str, secret: str, *, is_admin: bool, priority: Priority, max_requests: int | None
) -> ApiKey:
    """Create the key file's entry for a new key.

    Raises ConfigError if `name` or `max_requests` is invalid.
    """
    if not re.match(_NAME, name):
        raise ConfigError(
            f"{name!r} is not a valid name for a key: use 1 to 64 letters, digits, and . _ @ -; the "
            "first must be a letter or a digit"
        )
    if max_requests is not None and max_requests < 1:
        raise ConfigError(f"a key must allow at least 1 concurrent request, not {max_requests}")
    created = time.strftime("%Y-%m-%d")
    return ApiKey(
        name=name,
        sha256=hash_of(secret.encode()),
        is_admin=is_admin,
        priority=priority,
        max_requests=max_requests,
        created=created,
    )


class KeyRing:
    """The named keys that a running server knows. Only use it in the event loop's thread."""

    def __init__(self, setting: str = "", environ: Mapping[str, str] | None = None) -> None:
        """setting: value of `server.keys_file`. Raises ConfigError if the file cannot be used."""
        self._setting, self._environ = setting, environ or {}
        self._path: Path | None = None
        self._by_hash: dict[str, ApiKey] = {}
        self.reload()

    def reload(self) -> str:
        """Read the file again; returns a summary of the keys for the log.

        Raises ConfigError and keeps the old keys if the file cannot be used.
        """
        # A file that has disappeared must never open the server to everyone.
        path = key_file_of(self._setting, self._environ) or self._path
        if path is None:
            return "no API key file"
        try:
            keys = read_keys(path)
        except ConfigError as error:
            raise ConfigError(f"{error}; the API keys are not reloaded") from (
                None if self._path else error
            )
        self._path, self._by_hash = path, {key.sha256: key for key in keys}
        return (
            f"{len(keys)} API {'key' if len(keys) == 1 else 'keys'} in {path}: "
            f"{', '.join(sorted(key.name for key in keys)) or 'no client can connect'}"
        )

    @property
    def is_needed(self) -> bool:
        """Whether a key file is in use, so that clients need a key."""
        return self._path is not None

    @property
    def names_an_admin(self) -> bool:
        """Whether one of the keys is an admin key."""
        return any(key.is_admin for key in self._by_hash.values())

    def find(self, key: bytes) -> ApiKey | None:
        """The entry of a key; None if the key is unknown.

        The lookup uses the hash, so its timing reveals nothing about other keys.
        """
        return self._by_hash.get(hash_of(key)) if self._by_hash else None


def given_keys(headers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The API keys in the headers, by header name.

    The clients of OpenAI, Anthropic and Azure each use a different header. An Authorization header
    with a scheme other than Bearer is ignored.
    """
    keys = {name: headers[name].strip() for name in KEY_HEADERS[1:] if name in headers}
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        keys[b"authorization"] = token.strip()
    return {name: key for name, key in keys.items() if key}


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request, as identified by the middleware `Guard`."""

    address: str = ""
    key: ApiKey | None = None  # the named key that the caller sent
    server_key: str = ""  # `server.api_key`, if the caller sent that
    is_admin: bool = False
    is_let_in: bool = (
        True  # if false, the caller lacks a valid key and may only use paths without one
    )

    @property
    def has_key(self) -> bool:
        """Whether the caller sent a valid key."""
        return self.key is not None or bool(self.server_key)

    @property
    def key_name(self) -> str:
        """The name of the caller's key; empty if the caller sent none or sent `server.api_key`."""
        return self.key.name if self.key is not None else ""


def caller_of(request: Request) -> Caller:
    """The sender of a request, as identified by the middleware `Guard`."""
    caller: Caller = request.scope[CALLER]
    return caller


def check_admin(request: Request) -> None:
    """Raise RequestRefused if the caller may not administer the server.

    With API keys, this requires an admin key: a named one created by `holdfast keys add --admin`,
    or `server.api_key` if no named key is an admin key. Without API keys, it requires a connection
    from this machine, not through a proxy and not from a web page that only `server.cors_origins =
    *` admits.
    """
    caller = caller_of(request)
    if caller.is_admin:
        return
    if caller.has_key:
        message = (
            "this requires an admin key; `holdfast keys add NAME --admin` on the server's machine "
            "creates one"
        )
    else:
        message = (
            "without API keys, the server can only be administered from its own machine; `holdfast "
            "keys add NAME --admin` creates one"
        )
    raise RequestRefused(message, status=403, code="admin_only")


class ConcurrentAnswers:
    """Counts the running and waiting answers of each caller. Event loop's thread only."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._average_seconds = 1.0  # moving average of how long a request takes

    @contextlib.contextmanager
    def counted(self, caller: Caller, answers: int, *, limits: LimitsSettings) -> Iterator[None]:
        """While the block runs, count `answers` more answers for a caller.

        Raises RequestRefused (429) if the caller would then have too many answers.
        """
        # in words, such as "the key NAME" → most concurrent answers; 0: no limit, but a reload of
        # the key file may set one
        caps = dict(_caps(caller, limits))
        for holder, cap in caps.items():
            if cap:
                self._refuse_above(cap, holder, answers=answers)
        began = self._clock()
        for holder in caps:
            self._counts[holder] += answers
        try:
            yield
        finally:
            self._average_seconds += _GAIN * (self._clock() - began - self._average_seconds)
            for holder in caps:
                self._counts[holder] -= answers
                if not self._counts[holder]:
                    del self._counts[holder]

    def _refuse_above(self, cap: int, holder: str, *, answers: int) -> None:
        """Raise RequestRefused if `answers` more answers would exceed the limit of this holder."""
        running = self._counts[holder]
        if answers > cap:
            message = (
                f"{answers} answers in one request exceed the limit of {cap} concurrent answers for "
                f"{holder}; request fewer"
            )
            raise RequestRefused(message, code="request_too_large_for_cap")
        if running + answers > cap:
            retry = min(max(1, math.ceil(self._average_seconds / running)), _LONGEST_RETRY_SECONDS)
            message = (
                f"{holder} has {running} answers running or waiting, and the limit is {cap}; "
                f"please try again in {retry} s"
            )
            raise RequestRefused(
                message, status=429, code="rate_limit_exceeded", retry_after_seconds=retry
            )


def _caps(caller: Caller, limits: LimitsSettings) -> Iterator[tuple[str, int]]:
    """Yield the limits that apply to a caller: the holder (whom the limit applies to, in words),
    and the number of concurrent answers, where 0 means no limit.
    """
    if caller.key is not None:
        cap = caller.key.max_requests
        yield f"the key {caller.key.name}", limits.max_requests_per_key if cap is None else cap
    elif caller.server_key:
        yield "this API key", limits.max_requests_per_key
    if caller.address:
        yield f"the address {caller.address}", limits.max_requests_per_address


class Drain:
    """The state of a stopping server: it starts no new work, and running answers get a time limit.

    Only use it in the event loop's thread.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether the server is draining."""
        return self._ends_at is not None

    @property
    def seconds_left(self) -> float:
        """How many more seconds running answers may continue; 0 before the drain begins."""
        return 0.0 if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def begin(self, limit_seconds: float) -> None:
        """Refuse new work from now on; running answers get `limit_seconds` to finish."""
        self._ends_at = self._clock() + limit_seconds

    def refusal(self, method: str, path: str) -> ServerStopping | None:
        """Return the error for a request that would start new work while the server stops.

        Returns None for requests that only read state or cancel something: they still work.
        """
        if not self.is_on or method in _READS or path.endswith("/cancel"):
            return None
        return ServerStopping(
            retry_after_seconds=min(self.seconds_left + _RESTART_SECONDS, _LONGEST_RETRY_SECONDS)
        )


class Seal:
    """Signs and encrypts ("seals") texts with a key of this server. Thread-safe.

    Encryption is deterministic (AES-SIV, RFC 5297): the same text always gives the same sealed
    text, so a prompt that contains it does not change.

    folder: where the key is stored. Without a folder, seals are valid only for this process. The
        key is read or created at its first use, because the store has created the folder by then.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # returns the secret key, from which those for signatures and encryption are derived
        self._key = functools.cache(functools.partial(_key_in, folder))

    def for_tenant(self, tenant: str) -> Seal:
        """Return a seal for one tenant: no other tenant can decrypt the texts that it encrypts.

        Returns this seal itself if `tenant` is empty.
        """
        if not tenant:
            return self
        seal = Seal()

        def tenant_key() -> bytes:
            name = tenant.encode()
            return hashlib.blake2b(name, key=self._key(), digest_size=_SEAL_KEY_BYTES).digest()

        seal._key = functools.cache(tenant_key)
        return seal

    def sign(self, text: str) -> str:
        """A signature of the text that only this server can make."""
        return (
            f"{_SIGNED_VERSION}.{_base64(self._signature(text.encode('utf-8', 'surrogatepass')))}"
        )

    def is_signed(self, text: str, signature: str) -> bool:
        """Whether `sign` made this signature for the text."""
        return hmac.compare_digest(signature.encode("utf-8", "replace"), self.sign(text).encode())

    def encrypt(self, text: str) -> str:
        """Encrypt the text so that only this server can decrypt it."""
        packed = zlib.compress(text.encode("utf-8", "surrogatepass"))
        return f"{_ENCRYPTED_VERSION}.{_base64(self._cipher().encrypt(packed, None))}"

    def decrypt(self, sealed: str) -> str | None:
        """Decrypt a text that `encrypt` encrypted. Returns None if this seal did not encrypt it."""
        version, _, encoded = sealed.partition(".")
        if version != _ENCRYPTED_VERSION:
            return None
        from cryptography.exceptions import InvalidTag

        try:
            raw = base64.b64decode(encoded.encode("ascii"), validate=True)
            packed = self._cipher().decrypt(raw, None)
        except (ValueError, InvalidTag):
            return None
        if _base64(raw) != encoded:  # the same bytes, written in base64 in another way
            return None
        return zlib.decompress(packed).decode("utf-8", "surrogatepass")

    def _cipher(self) -> AESSIV:
        """The cipher, whose key is derived from the secret key."""
        # imported at its first use, because importing it takes 9 ms and 6 MB of memory
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV

        key = hashlib.blake2b(key=self._key(), digest_size=_CIPHER_KEY_BYTES, person=b"closed")
        return AESSIV(key.digest())

    def _signature(self, body: bytes) -> bytes:
        """A keyed hash of a text."""
        key = self._key()
        return hashlib.blake2b(
            body, key=key, digest_size=_SIGNATURE_BYTES, person=b"signed"
        ).digest()


def _key_in(folder: Path | None) -> bytes:
    """Read the secret key of a seal from a folder, or create it there if there is none.

    If the folder cannot be used, returns a new key that only this process knows.
    """
    key = secrets.token_bytes(_SEAL_KEY_BYTES)
    if folder is None or not folder.is_dir():
        return key
    path = folder / _SEAL_KEY_FILE
    try:
        if not path.exists():
            with atomic_create(path) as file:
                file.write(key)
        stored_key = read_regular(path)
        return stored_key if len(stored_key) == _SEAL_KEY_BYTES else key
    except OSError as error:
        _log.warning("thoughts encrypted for clients are valid only in this process: %s", error)
        return key


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
