"""The server's certificate: read at the start and when it is to be renewed, for the connections
that come from then on.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError

_log = logging.getLogger(__name__)


class ServerCertificate:
    """What clients are shown. Loop's thread only."""

    def __init__(self, *, certificate: str, key: str) -> None:
        """Paths of PEM files: the certificate with those that vouch for it behind it, and its key.

        Raises ConfigError.
        """
        self._certificate, self._key = certificate, key
        self._current = self._read()
        # A listener keeps its context for good, so this one only passes each handshake on to the
        # one that is in force.
        self.context = self._read()
        self.context.sni_callback = self._hand_over  # called without a name as well

    def reload(self) -> None:
        """Take the files as they are now, for new connections; with files that cannot be used, all
        stays as it is.
        """
        try:
            self._current = self._read()
        except ConfigError as error:
            _log.error("the certificate was not renewed, the one before stays in use: %s", error)
        else:
            _log.info("new connections get the certificate as it is now in %s", self._certificate)

    def _hand_over(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = self._current

    def _read(self) -> ssl.SSLContext:
        for setting, path in (
            ("server.tls_cert", self._certificate),
            ("server.tls_key", self._key),
        ):
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{setting}: {path}: {error.strerror}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert, server.tls_key: {_why_not(error)}: {self._certificate}, "
                f"{self._key}"
            ) from None
        return context


def certificate_of(settings: ServerSettings) -> ServerCertificate | None:
    """The certificate that is set; None where none is.

    Raises ConfigError in one line when it cannot be used.
    """
    return (
        ServerCertificate(certificate=settings.tls_cert, key=settings.tls_key)
        if settings.tls_cert
        else None
    )


def _no_password() -> str:
    # Without this, OpenSSL would ask on the terminal.
    raise ValueError("the key is locked by a password, which a server cannot type")


def _why_not(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not the certificate's"
    return "these files are no certificate and key in PEM form"
