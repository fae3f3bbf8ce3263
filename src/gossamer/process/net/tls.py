"""Optional TLS: connections are encrypted, and both ends show certificates of one authority."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, fields
from functools import lru_cache

from gossamer.errors import InputError

VARIABLES = {"cert": "GOSSAMER_TLS_CERT", "key": "GOSSAMER_TLS_KEY", "ca": "GOSSAMER_TLS_CA"}


@dataclass(frozen=True)
class TlsFiles:
    """The files that a worker needs for encrypted connections, in PEM format.

    Both ends check that the certificate of the other is of this authority. Names in certificates are not checked, since
    workers reach each other by addresses: use an authority of your own, for this purpose alone.
    """

    cert: str
    """The certificate of this worker, or of all."""
    key: str
    """The private key that belongs to it, without a passphrase."""
    ca: str
    """The certificate of the authority."""


@dataclass(frozen=True)
class Tls:
    """The contexts of the two ends of a connection."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def find_tls_files() -> TlsFiles | None:
    """Return the files that the environment names; None if it names none."""
    given = {name: os.environ.get(variable, "") for name, variable in VARIABLES.items()}
    if not any(given.values()):
        return None
    return checked_files(TlsFiles(**given))


def checked_files(files: TlsFiles) -> TlsFiles:
    """Return ``files``. InputError if they cannot be used."""
    missing = [field.name for field in fields(files) if not getattr(files, field.name)]
    if missing:
        names = " and ".join(f"--tls-{name} or {VARIABLES[name]}" for name in missing)
        raise InputError(f"TLS needs a certificate, its key and the authority: give {names} too")
    make_tls(files)
    return files


@lru_cache(maxsize=8)
def make_tls(files: TlsFiles) -> Tls:
    """Read the files. InputError if they cannot be used."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(files.cert, files.key, password=_no_passphrase)
            context.load_verify_locations(files.ca)
        except OSError as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            raise InputError(
                f"the TLS files {files.cert!r}, {files.key!r} and {files.ca!r} cannot be used ({reason}): expected a "
                "certificate, its key without a passphrase and the authority's certificate, as PEM files"
            ) from None
    # Nobody resumes a session: every connection is greeted anew.
    server.num_tickets = 0
    return Tls(server, client)


def _no_passphrase() -> str:
    """Answer a key with a passphrase with a wrong one: OpenSSL would ask at the terminal."""
    return ""
