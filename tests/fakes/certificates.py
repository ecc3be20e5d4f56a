"""Certificates made for tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import trustme


class CertificateFiles:
    """An authority, and the files of a certificate that it signs."""

    def __init__(self, folder: Path) -> None:
        self.authority = trustme.CA()
        self.certificate, self.key, self.trusted = (
            folder / "cert.pem",
            folder / "key.pem",
            folder / "ca.pem",
        )
        self.authority.cert_pem.write_to_path(self.trusted)
        self.renew()

    def renew(self) -> bytes:
        """Write a new certificate with its key; returns it in the form that clients see."""
        made = self.authority.issue_cert("localhost", "127.0.0.1")
        made.private_key_pem.write_to_path(self.key)
        for place, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(self.certificate, append=place > 0)
        return ssl.PEM_cert_to_DER_cert(made.cert_chain_pems[0].bytes().decode())

    def trust(self) -> ssl.SSLContext:
        """A client's context that trusts the authority."""
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context
