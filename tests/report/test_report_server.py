"""``gossamer watch``: what it serves, and what it does not."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import pytest

from gossamer.cli import main
from gossamer.report.server import Server, Watched


@pytest.fixture
def serve():
    """Serve a folder; returns a function that asks for a path and gives status, headers and body."""
    running = []

    def start(folder, host="127.0.0.1"):
        server = Server(Watched(folder), host, 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((server, thread))

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, dict(answer.headers), body

        return ask

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_page_and_the_figures(copied, serve):
    ask = serve(copied)
    status, headers, body = ask("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"connect-src 'self'" in body
    status, headers, body = ask("/report.json")
    assert status == 200
    document = json.loads(body)
    assert [run["name"] for run in document["runs"]] == ["gossip"]
    assert set(document["live"]["files"]) == {path.name for path in copied.iterdir()}
    assert ask("/report.json", If_None_Match=headers["ETag"])[0] == 304
    assert ask("/report.json?anything=1")[0] == 200
    status, headers, body = ask("/", method="HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1e6


def test_the_files_of_the_run(copied, serve):
    ask = serve(copied)
    for path in copied.iterdir():
        status, headers, body = ask(f"/files/{path.name}")
        assert status == 200
        assert body == path.read_bytes()
        assert headers["Content-Disposition"] == "attachment"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_files_of_a_comparison(kept, serve):
    ask = serve(kept)
    assert ask("/files/gossip/summary.json")[2] == (kept / "gossip" / "summary.json").read_bytes()
    assert ask("/files/summary.json")[0] == 404


def test_nothing_else_is_served(copied, serve, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (copied / "notes.txt").write_text("mine")
    (copied / "trace.json").symlink_to(tmp_path / "secret.txt")
    ask = serve(copied)
    paths = [
        *("/secret.txt", "/../secret.txt", "/files/../secret.txt", "/files/../../../../../../etc/passwd", "/files/"),
        *("/files/%2e%2e/secret.txt", "/files/..%2fsecret.txt", "/files/%2e%2e%2fsecret.txt", "/files//etc/passwd"),
        *("/files/..\\secret.txt", "/files/%5c..%5csecret.txt", "/files/run.json/../../secret.txt", "/files/%00"),
        *(f"/files/{tmp_path}/secret.txt", f"/files/{(tmp_path / 'secret.txt').as_uri()}", "/files/./run.json"),
        *("/files/notes.txt", "/files/trace.json", "/config.toml", "//etc/passwd", "/files/copied/run.json", "/report"),
        *("/files/config.toml%20", "/files/CONFIG.TOML", "/.", "/..", "/files/config.toml/"),
    ]
    for path in paths:
        status, _, body = ask(path)
        assert (status, body) == (404, b"not here"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask("/", method=method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:80", 200),
        ("localhost:9", 200),
        ("[::1]:9", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("10.0.0.1", 403),
        ("", 403),
    ],
)
def test_only_who_addresses_this_machine_is_answered(copied, serve, host, status):
    assert serve(copied)("/report.json", Host=host)[0] == status


def test_on_all_addresses_any_name_is_answered(copied, serve):
    assert serve(copied, host="0.0.0.0")("/report.json", Host="cluster.example:80")[0] == 200


def test_a_run_that_breaks_meanwhile_is_said_and_comes_back(copied, serve, monkeypatch):
    monkeypatch.setattr("gossamer.report.server.SHARE", 1e9)
    ask = serve(copied)
    text = (copied / "run.json").read_text()
    (copied / "run.json").unlink()
    status, _, body = ask("/report.json")
    assert status == 503
    assert b"is not the folder of a run" in body
    (copied / "run.json").write_text(text)
    assert ask("/report.json")[0] == 200


def test_bad_input_is_one_line(copied, tmp_path, capsys):
    def refused(*arguments):
        assert main(["watch", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "is not there" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in refused(tmp_path / "empty")
    assert "--port is 70000" in refused(copied, "--port", 70000)
    assert "--port is -1" in refused(copied, "--port=-1")
    assert "--host is 'here'" in refused(copied, "--host", "here")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be listened on" in refused(copied, "--port", taken.getsockname()[1])


def test_the_command_says_where_and_ends_with_ctrl_c(copied):
    program = [sys.executable, "-m", "gossamer", "watch", str(copied), "--json"]
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    said = ""
    while not said.endswith("}\n"):
        line = running.stdout.readline()
        assert line, running.communicate()
        said += line
    url = json.loads(said)["url"]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url + "report.json", timeout=10) as answer:
        assert json.load(answer)["runs"][0]["name"] == "gossip"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out, err) == (0, "", "")
