"""``gossamer watch``: what it serves, and what it refuses."""

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
from gossamer.report.server import LiveReport, ReportServer


@pytest.fixture
def serve():
    """Serve a folder; returns a function that requests a path and returns status, headers and body."""
    running = []

    def start(folder, host="127.0.0.1"):
        server = ReportServer(LiveReport(folder), host, 0)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        running.append((server, thread))

        def request(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
            connection.putrequest(method, path, skip_host="Host" in headers, skip_accept_encoding=True)
            for name, value in headers.items():
                connection.putheader(name.replace("_", "-"), value)
            connection.endheaders()
            answer = connection.getresponse()
            body = answer.read()
            connection.close()
            return answer.status, dict(answer.headers), body

        return request

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_page_and_the_figures(copied, serve):
    request = serve(copied)
    status, headers, body = request("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"connect-src 'self'" in body
    status, headers, body = request("/report.json")
    assert status == 200
    document = json.loads(body)
    assert [run["name"] for run in document["runs"]] == ["gossip"]
    assert set(document["live"]["files"]) == {path.name for path in copied.iterdir()}
    assert request("/report.json", If_None_Match=headers["ETag"])[0] == 304
    assert request("/report.json?anything=1")[0] == 200
    status, headers, body = request("/", method="HEAD")
    assert (status, body) == (200, b"")
    assert 400e3 < int(headers["Content-Length"]) < 2e6


def test_the_files_of_the_run(copied, serve):
    request = serve(copied)
    for path in copied.iterdir():
        status, headers, body = request(f"/files/{path.name}")
        assert status == 200
        assert body == path.read_bytes()
        assert headers["Content-Disposition"] == "attachment"
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_files_of_a_comparison(comparison, serve):
    request = serve(comparison)
    assert request("/files/gossip/summary.json")[2] == (comparison / "gossip" / "summary.json").read_bytes()
    assert request("/files/summary.json")[0] == 404


def test_nothing_else_is_served(copied, serve, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (copied / "notes.txt").write_text("mine")
    (copied / "trace.json").symlink_to(tmp_path / "secret.txt")
    request = serve(copied)
    paths = [
        *("/secret.txt", "/../secret.txt", "/files/../secret.txt", "/files/../../../../../../etc/passwd", "/files/"),
        *("/files/%2e%2e/secret.txt", "/files/..%2fsecret.txt", "/files/%2e%2e%2fsecret.txt", "/files//etc/passwd"),
        *("/files/..\\secret.txt", "/files/%5c..%5csecret.txt", "/files/run.json/../../secret.txt", "/files/%00"),
        *(f"/files/{tmp_path}/secret.txt", f"/files/{(tmp_path / 'secret.txt').as_uri()}", "/files/./run.json"),
        *("/files/notes.txt", "/files/trace.json", "/config.toml", "//etc/passwd", "/files/copied/run.json", "/report"),
        *("/files/config.toml%20", "/files/CONFIG.TOML", "/.", "/..", "/files/config.toml/"),
    ]
    for path in paths:
        status, _, body = request(path)
        assert (status, body) == (404, b"not found"), path
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert request("/", method=method)[0] == 501


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
def test_requests_addressed_to_other_hosts_are_refused(copied, serve, host, status):
    assert serve(copied)("/report.json", Host=host)[0] == status


def test_a_server_on_all_addresses_answers_any_host(copied, serve):
    assert serve(copied, host="0.0.0.0")("/report.json", Host="cluster.example:80")[0] == 200


def test_a_run_that_breaks_meanwhile_is_reported_and_recovers(copied, serve, monkeypatch):
    monkeypatch.setattr("gossamer.report.server.MAX_READING_SHARE", 1e9)
    request = serve(copied)
    text = (copied / "run.json").read_text()
    (copied / "run.json").unlink()
    status, _, body = request("/report.json")
    assert status == 503
    assert b"is not the folder of a run" in body
    (copied / "run.json").write_text(text)
    assert request("/report.json")[0] == 200


def test_bad_input_is_refused_in_one_line(copied, tmp_path, capsys):
    def refused(*arguments):
        assert main(["watch", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "does not exist" in refused(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in refused(tmp_path / "empty")
    assert "--port is 70000" in refused(copied, "--port", 70000)
    assert "--port is -1" in refused(copied, "--port=-1")
    assert "--host is 'here'" in refused(copied, "--host", "here")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be listened on" in refused(copied, "--port", taken.getsockname()[1])


def test_the_command_prints_its_url_and_ends_with_ctrl_c(copied):
    program = [sys.executable, "-m", "gossamer", "watch", str(copied), "--json"]
    running = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    printed = ""
    while not printed.endswith("}\n"):
        line = running.stdout.readline()
        assert line, running.communicate()
        printed += line
    url = json.loads(printed)["url"]
    assert url.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(url + "report.json", timeout=60) as answer:
        assert json.load(answer)["runs"][0]["name"] == "gossip"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out, err) == (0, "", "")
