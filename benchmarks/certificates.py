"""Certificates for benchmarks and tests, made by the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from gossamer.process.net.tls import TlsFiles


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def make_certificates(folder: Path) -> TlsFiles:
    """Make an authority and a certificate of it in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    ca, ca_key, cert, key, request = (folder / name for name in ("ca.pem", "ca.key", "cert.pem", "key.pem", "request"))
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new, "-keyout", ca_key, "-out", ca, "-subj", "/CN=authority", "-days", 2)
    openssl("req", *new, "-keyout", key, "-out", request, "-subj", "/CN=worker")
    openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-out", cert, "-days", 2)
    return TlsFiles(str(cert), str(key), str(ca))
