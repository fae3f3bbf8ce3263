"""Serves the page of a run that is still going.

It answers requests for the page, for the document behind it, and for the files of the run. Files are looked up by name
in a list, never on the disk. As long as it listens on a loopback address only, it also refuses requests that were
addressed to another host name, so that a foreign page in the same browser cannot read it (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gossamer.errors import InputError
from gossamer.report.document import report_document
from gossamer.report.page import page
from gossamer.report.runs import find_runs, read_run
from gossamer.runs.run_folder import CONFIG, METRICS, MODEL, RECORDING, RUN, SUMMARY, TRACE

FILES = (RUN, CONFIG, METRICS, RECORDING, SUMMARY, TRACE, MODEL)
FILES_PREFIX = "/files/"
CHUNK_BYTES = 1 << 20

MAX_READING_SHARE = 0.1
"""Share of the time that may be spent on reading the run again."""


class LiveReport:
    """The document of a run, or of a comparison of several, that follows the files in their folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._signature: Any = None
        self._document: dict[str, Any] = {}
        self._next_read = 0.0
        self.document()

    def files(self) -> dict[str, Path]:
        """Return the files that may be served, by their names in URLs."""
        by_name = {}
        for run in find_runs(self.folder):
            for name in FILES:
                path = run / name
                # A link could lead out of the folder.
                if path.is_file() and path.resolve().parent == run.resolve():
                    by_name[path.relative_to(self.folder).as_posix()] = path
        return by_name

    def document(self) -> dict[str, Any]:
        """Return the document, read again if a file has changed."""
        with self._lock:
            began = time.monotonic()
            if began < self._next_read:
                return self._document
            files = self.files()
            signature = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files.items()]
            if signature != self._signature:
                runs = [read_run(run) for run in find_runs(self.folder)]
                self._document = {**report_document(runs), "live": {"files": sorted(files)}}
                self._signature = signature
            self._next_read = began + (time.monotonic() - began) / MAX_READING_SHARE
            return self._document


class ReportServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, report: LiveReport, host: str, port: int) -> None:
        self.report = report
        try:
            super().__init__((host, port), RequestHandler)
        except OSError as error:
            why = error.strerror or error
            raise InputError(
                f"{host}:{port} cannot be listened on: {why}; give another --port, or a --host of this machine"
            ) from None
        self.is_local = ipaddress.ip_address(self.server_address[0]).is_loopback  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class RequestHandler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "gossamer"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the run."""

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path
        try:
            if self.server.is_local and not _is_this_machine(self.headers.get("Host", "")):
                self._send_text("this page is for this machine only", with_body, HTTPStatus.FORBIDDEN)
            elif path == "/":
                self._send_text(page(self.server.report.document()), with_body, kind="text/html; charset=utf-8")
            elif path == "/report.json":
                text = json.dumps(self.server.report.document(), ensure_ascii=False, allow_nan=False)
                self._send_text(text, with_body, kind="application/json")
            elif (file := self._find_file(path)) is not None:
                self._send_file(file, with_body)
            else:
                self._send_text("not found", with_body, HTTPStatus.NOT_FOUND)
        except InputError as error:
            self._send_text(str(error), with_body, HTTPStatus.SERVICE_UNAVAILABLE)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _find_file(self, path: str) -> Path | None:
        if not path.startswith(FILES_PREFIX):
            return None
        return self.server.report.files().get(unquote(path.removeprefix(FILES_PREFIX)))

    def _send_text(
        self, text: str, with_body: bool, status: HTTPStatus = HTTPStatus.OK, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        content = text.encode()
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
            return
        self._send_head(status, kind, len(content), {"ETag": tag})
        if with_body:
            self.wfile.write(content)

    def _send_file(self, file: Path, with_body: bool) -> None:
        with file.open("rb") as content:
            # The file may grow meanwhile; what is added is for the next request.
            length = file.stat().st_size
            self._send_head(HTTPStatus.OK, "application/octet-stream", length, {"Content-Disposition": "attachment"})
            while with_body and length and (chunk := content.read(min(length, CHUNK_BYTES))):
                self.wfile.write(chunk)
                length -= len(chunk)

    def _send_head(self, status: HTTPStatus, kind: str, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        common = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        described = {"Content-Type": kind, "Content-Length": str(length)}
        for name, value in {**described, **common, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _is_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
