"""The named keys that a running server knows; they can be read again while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from holdfast.errors import ConfigError
from holdfast.front.server.key_file import ApiKey, hash_of, key_file_of, read_keys


class KeyRing:
    """Who holds which key. Loop's thread only."""

    def __init__(self, setting: str = "", environ: Mapping[str, str] | None = None) -> None:
        """setting: `server.keys_file`. Raises ConfigError for a file that cannot be used."""
        self._setting, self._environ = setting, environ or {}
        self._path: Path | None = None
        self._by_hash: dict[str, ApiKey] = {}
        self.reload()

    def reload(self) -> str:
        """Read the file again; returns what there is now, in words.

        Raises ConfigError; everything stays as it was then.
        """
        # a file that is gone never opens the server to all
        path = key_file_of(self._setting, self._environ) or self._path
        if path is None:
            return "no file of API keys"
        try:
            keys = read_keys(path)
        except ConfigError as error:
            raise ConfigError(f"{error}; the keys stay as they were") from (
                None if self._path else error
            )
        self._path, self._by_hash = path, {key.sha256: key for key in keys}
        return (
            f"{len(keys)} API keys in {path}: "
            f"{', '.join(sorted(key.name for key in keys)) or 'no client can connect'}"
        )

    @property
    def is_needed(self) -> bool:
        """Whether there is a file of keys, so that who has none may not come in."""
        return self._path is not None

    @property
    def names_an_admin(self) -> bool:
        """Whether one of the keys is an admin's."""
        return any(key.is_admin for key in self._by_hash.values())

    def find(self, key: bytes) -> ApiKey | None:
        """Whose key it is.

        Looked up by its hash, so that how long it takes tells nothing of other keys.
        """
        return self._by_hash.get(hash_of(key)) if self._by_hash else None
