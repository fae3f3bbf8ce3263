"""The page of a run that goes on, served on this machine.

It answers for three kinds of paths and no others: the page, the figures behind it, and the files of the run by their
names, which are looked up in a list, never on the disk. As long as it listens to this machine only, it also refuses
requests that were addressed to another name, so that a page of somebody else's in the same browser cannot read it.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import shutil
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from gossamer.errors import InputError
from gossamer.report.figures import figures
from gossamer.report.page import page
from gossamer.report.runs import find_runs, read_run
from gossamer.runfolder import CONFIG, METRICS, MODEL, RECORDING, RUN, SUMMARY, TRACE

FILES = (RUN, CONFIG, METRICS, RECORDING, SUMMARY, TRACE, MODEL)

SHARE = 0.1
"""Of the time that may be spent on reading the run again."""


class Watched:
    """A run, or a comparison of several, as it is now."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._signature: Any = None
        self._document: dict[str, Any] = {}
        self._not_before = 0.0
        self.document()

    def files(self) -> dict[str, Path]:
        """The files that may be served, by the names under which they are."""
        found = {}
        for run in find_runs(self.folder):
            for name in FILES:
                path = run / name
                # Not what a link would lead to.
                if path.is_file() and path.resolve().parent == run.resolve():
                    found[path.relative_to(self.folder).as_posix()] = path
        return found

    def document(self) -> dict[str, Any]:
        """The figures, read again if something has changed."""
        with self._lock:
            if time.monotonic() < self._not_before:
                return self._document
            began = time.monotonic()
            files = self.files()
            signature = [(name, path.stat().st_size, path.stat().st_mtime_ns) for name, path in files.items()]
            if signature != self._signature:
                runs = [read_run(run) for run in find_runs(self.folder)]
                self._document = {**figures(runs), "live": {"files": sorted(files)}}
                self._signature = signature
            took = time.monotonic() - began
            self._not_before = began + took / SHARE
            return self._document


class Server(ThreadingHTTPServer):
    """Serves one ``Watched``."""

    daemon_threads = True

    def __init__(self, watched: Watched, host: str, port: int) -> None:
        self.watched = watched
        try:
            super().__init__((host, port), Handler)
        except OSError as error:
            why = error.strerror or error
            raise InputError(
                f"{host}:{port} cannot be listened on: {why}; give another --port, or a --host of this machine"
            ) from None
        self.own_names_only = ipaddress.ip_address(self.server_address[0]).is_loopback  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version = "gossamer"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        """Silence: the terminal belongs to the run."""

    def _answer(self, body: bool) -> None:
        path = urlsplit(self.path).path
        try:
            if self.server.own_names_only and not _names_this_machine(self.headers.get("Host", "")):
                self._text("this page is for this machine only", body, HTTPStatus.FORBIDDEN)
            elif path == "/":
                self._text(page(self.server.watched.document()), body, kind="text/html; charset=utf-8")
            elif path == "/report.json":
                text = json.dumps(self.server.watched.document(), ensure_ascii=False, allow_nan=False)
                self._text(text, body, kind="application/json")
            elif (file := self._file(path)) is not None:
                self._send(file, body)
            else:
                self._text("not here", body, HTTPStatus.NOT_FOUND)
        except InputError as error:
            self._text(str(error), body, HTTPStatus.SERVICE_UNAVAILABLE)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _file(self, path: str) -> Path | None:
        prefix = "/files/"
        return self.server.watched.files().get(unquote(path.removeprefix(prefix))) if path.startswith(prefix) else None

    def _text(
        self, text: str, body: bool, status: HTTPStatus = HTTPStatus.OK, kind: str = "text/plain; charset=utf-8"
    ) -> None:
        content = text.encode()
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.end_headers()
            return
        self._head(status, kind, len(content), {"ETag": tag})
        if body:
            self.wfile.write(content)

    def _send(self, file: Path, body: bool) -> None:
        with file.open("rb") as content:
            # What is added meanwhile is for the next request.
            length = file.stat().st_size
            self._head(HTTPStatus.OK, "application/octet-stream", length, {"Content-Disposition": "attachment"})
            if body and length:
                shutil.copyfileobj(_Part(content, length), self.wfile)

    def _head(self, status: HTTPStatus, kind: str, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        common = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        described = {"Content-Type": kind, "Content-Length": str(length)}
        for name, value in {**described, **common, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


class _Part:
    """The first bytes of a file that may be growing."""

    def __init__(self, content: Any, length: int) -> None:
        self.content, self.left = content, length

    def read(self, count: int = -1, /) -> bytes:
        piece: bytes = self.content.read(min(count, self.left))
        self.left -= len(piece)
        return piece


def _names_this_machine(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
