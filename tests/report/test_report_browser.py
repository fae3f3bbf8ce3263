"""The pages in a real browser: everything is drawn, the switches work, nothing goes wrong and nothing leaves."""

import json
import threading

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.recording import Recorder
from gossamer.report.figures import figures
from gossamer.report.page import page
from gossamer.report.runs import find_runs, read_run
from gossamer.report.server import Server, Watched

PLOTS = ("loss", "accuracy", "consensus", "timeline", "steps", "staleness", "graph")


@pytest.fixture(scope="module")
def document(kept):
    return figures([read_run(folder) for folder in find_runs(kept)])


@pytest.fixture(scope="module")
def url(document, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(document), encoding="utf-8")
    return path.as_uri()


def assert_well(look):
    assert look.errors == []
    assert look.left_the_machine() == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 400)])
def test_everything_is_drawn_and_fits(url, look, scheme, width):
    seen = look(url, scheme=scheme, width=width)
    for plot in PLOTS:
        box = seen.page.locator(f"#{plot} .main-svg").first.bounding_box()
        assert box["height"] > 100, plot
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width, plot
        assert len(seen.curves(plot)) > 0, plot
    assert seen.ask("document.documentElement.scrollWidth") <= width
    ink = seen.ask("getComputedStyle(document.body).color")
    assert ink == ("rgb(227, 232, 238)" if scheme == "dark" else "rgb(31, 40, 51)")
    assert_well(seen)
    assert len(seen.requests) == 1


def test_the_switch_puts_the_curves_on_four_axes(url, look, document):
    seen = look(url)
    titles = set()
    for axis in ("steps", "samples", "time", "bytes"):
        seen.page.locator("#axis label", has_text=axis).click()
        for plot, name in (("loss", "loss"), ("accuracy", "accuracy")):
            drawn = [curve for curve in seen.curves(plot) if curve["mode"] == "lines"]
            for run in document["runs"]:
                expected = run["curves"][name]
                assert any(curve["x"] == expected[axis] and curve["y"] == expected["value"] for curve in drawn)
        titles.add(seen.page.locator("#loss .xtitle").text_content())
    assert titles == {"steps per worker", "samples seen by all workers", "simulated seconds", "sent by all workers"}
    # Consensus stays on time.
    times = [run["consensus"]["time"] for run in document["runs"]]
    assert all(any(curve["x"] == time for curve in seen.curves("consensus")) for time in times)
    assert_well(seen)


def test_the_prediction_lies_under_the_consensus(url, look, document):
    seen = look(url)
    order = [curve["x"] for curve in seen.curves("consensus")]
    for run in document["runs"]:
        if run["predicted"]:
            assert order.index(run["predicted"]["time"]) < order.index(run["consensus"]["time"])
    assert "one number" in seen.page.locator("#prediction-words").text_content()


def test_runs_are_hidden_and_shown_again(url, look):
    seen = look(url)
    before = {curve["name"] for curve in seen.curves("loss")}
    button = seen.page.locator("#legend button", has_text="gossip")
    button.click()
    assert {curve["name"] for curve in seen.curves("loss")} == before - {"gossip"}
    assert {curve["name"] for curve in seen.curves("consensus")} == before - {"gossip"}
    button.click()
    assert {curve["name"] for curve in seen.curves("loss")} == before
    assert_well(seen)


def test_the_workers_of_each_run(url, look, document):
    seen = look(url)
    for run in document["runs"]:
        seen.page.locator("#run label", has_text=run["name"]).click()
        (bars,) = seen.curves("steps")
        assert bars["y"] == run["workers"]["steps"]
        (ages,) = seen.curves("staleness")
        counts = [count for _, count in run["workers"]["staleness"]["counts"]]
        assert ages["y"] == pytest.approx([count / sum(counts) for count in counts])
        (timeline,) = seen.curves("timeline")
        assert timeline["type"] == "heatmap"
        events = seen.page.locator("#events li").all_text_contents()
        assert len(events) == len(run["events"])
        assert "worker 2 gone" in events[0]
    # The dead worker's band holds the colour of the dead, and only its.
    z = seen.ask("Array.from(document.getElementById('timeline').data[0].z, row => Array.from(row))")
    rows_of_dead = {k // (len(z) // 6) for k, row in enumerate(z) if 4 in row}
    assert rows_of_dead == {2}
    seen.page.locator("#timeline").hover(position={"x": 300, "y": 40})
    seen.page.wait_for_function("() => document.getElementById('readout').textContent.startsWith('worker ')")
    assert_well(seen)


def test_edges_are_as_thick_as_their_traffic(copied, look, tmp_path):
    recording = json.loads((copied / "recording.json").read_text())
    recording["edges"] = [[0, 1, 8000, 8], [1, 2, 4000, 4], [2, 3, 1000, 1]]
    (copied / "recording.json").write_text(json.dumps(recording))
    (tmp_path / "page.html").write_text(page(figures([read_run(copied)])), encoding="utf-8")
    seen = look((tmp_path / "page.html").as_uri())
    lines = seen.ask(
        "document.getElementById('graph').data.filter(t => t.mode === 'lines').map(t => [t.line.width, t.x.length / 3])"
    )
    unused, *used = lines
    assert unused == [1, 3]
    widths = [width for width, edges in used]
    assert widths == sorted(widths)
    assert len(widths) == 3
    assert widths[2] - 0.6 == pytest.approx(2 * (widths[1] - 0.6)) == pytest.approx(8 * (widths[0] - 0.6))


def test_light_and_dark_follow_the_system(url, look):
    seen = look(url)
    colours = []
    for scheme in ("light", "dark", "light"):
        seen.page.emulate_media(color_scheme=scheme)
        seen.page.wait_for_timeout(200)
        colours.append(seen.ask("document.getElementById('loss').layout.font.color"))
    assert colours[0] == colours[2] != colours[1]
    assert_well(seen)


def test_it_prints_in_light(url, look):
    seen = look(url, scheme="dark")
    seen.ask("window.dispatchEvent(new Event('beforeprint'))")
    assert seen.ask("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#ffffff"
    assert seen.ask("document.getElementById('loss').layout.font.color") == "#66717f"
    seen.ask("window.dispatchEvent(new Event('afterprint'))")
    assert seen.ask("getComputedStyle(document.documentElement).getPropertyValue('--card').trim()") == "#1b2027"
    assert seen.page.pdf(format="A4").startswith(b"%PDF")
    assert_well(seen)


def test_the_summary_the_settings_and_the_command(url, look, document):
    seen = look(url, width=400)
    table = seen.page.locator("#summary tbody tr")
    assert table.count() == 3
    for row, run in enumerate(document["runs"]):
        cells = table.nth(row).locator("th, td").all_text_contents()
        assert cells[0] == run["name"]
        assert f"{100 * run['summary']['accuracy']:.1f}%" in cells
        assert f"{run['summary']['speedup']:.2f}×" in cells
    assert seen.page.locator("#commands pre").all_text_contents() == [document["runs"][0]["command"]]
    different = seen.page.locator("#differences tbody th").all_text_contents()
    assert "method" in different
    assert "workers" not in different
    seen.page.locator("#all-settings summary").click()
    assert "workers" in seen.page.locator("#settings tbody th").all_text_contents()


def test_text_of_others_is_never_run(copied, look, tmp_path):
    evil = "</script><!--<script><img src=x onerror='document.title=\"owned\"'><b>&amp;"
    about = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**about, "command": evil, "gossamer": evil}))
    config = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(
        config.replace('method = "gossip"', f"method = {json.dumps(evil)}").replace('"digits"', json.dumps(evil))
    )
    recording = json.loads((copied / "recording.json").read_text())
    (copied / "recording.json").write_text(json.dumps({**recording, "events": [[1.0, evil]]}))
    (tmp_path / "page.html").write_text(page(figures([read_run(copied)])), encoding="utf-8")
    seen = look((tmp_path / "page.html").as_uri())
    assert seen.page.locator("#title").text_content() == evil
    assert seen.page.locator("#events span").text_content() == evil
    assert seen.page.locator("#commands pre").text_content() == evil
    assert seen.page.locator("img, b").count() == 0
    assert seen.page.title() == f"{evil} · gossamer"
    assert_well(seen)


def test_a_run_at_its_start_and_one_without_a_recording(copied, look, tmp_path):
    (copied / "recording.json").unlink()
    place = tmp_path / "page.html"
    place.write_text(page(figures([read_run(copied)])), encoding="utf-8")
    seen = look(place.as_uri())
    assert seen.page.locator("#no-workers").is_visible()
    assert_well(seen)
    (copied / "metrics.jsonl").unlink()
    (copied / "summary.json").unlink()
    place.write_text(page(figures([read_run(copied)])), encoding="utf-8")
    seen = look(place.as_uri())
    assert "not finished" in seen.page.locator("#notes").text_content()
    assert_well(seen)


def test_64_workers_are_drawn_and_the_page_is_small(kept, look, tmp_path):
    rng = np.random.default_rng(0)
    recorder = Recorder(range(64))
    for step in range(64 * 1500):
        rank, time = step % 64, 0.05 * (step // 64)
        waits = 0.02 * rng.random()
        recorder.stepped(rank, time, time + 0.05 - waits, time + 0.05)
        recorder.waited(rank, time + 0.05 - waits, time + 0.05)
        recorder.exchanged((rank, (rank + 1) % 64), time, time + 0.03, 40_000)
        recorder.merged(rank, time, time, int(rng.integers(9)))
    folder = tmp_path / "big"
    assert (
        main(["simulate", "--task", "quadratic", "--workers", "64", "--steps", "5", "--out", str(folder), "--json"])
        == 0
    )
    (folder / "recording.json").write_text(json.dumps(recorder.document()))
    place = tmp_path / "page.html"
    place.write_text(page(figures([read_run(folder)])), encoding="utf-8")
    assert place.stat().st_size < 10e6
    seen = look(place.as_uri())
    (bars,) = seen.curves("steps")
    assert bars["y"] == [1500] * 64
    assert_well(seen)


def test_the_live_page_follows_the_run(copied, look):
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    summary = (copied / "summary.json").read_text()
    (copied / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    (copied / "summary.json").unlink()
    with Server(Watched(copied), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        seen = look(server.url)
        assert seen.page.locator("#live-text").text_content() == "10%"
        assert len(seen.curves("loss")[-1]["x"]) == 5
        with (copied / "metrics.jsonl").open("a") as more:
            more.write("\n".join(lines[5:20]) + "\n")
        seen.page.wait_for_function("() => document.getElementById('loss').data.at(-1).x.length === 20", timeout=10_000)
        assert seen.page.locator("#live-text").text_content() == f"{round(100 * 19 / 40)}%"
        (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (copied / "summary.json").write_text(summary)
        seen.page.wait_for_function(
            "() => document.getElementById('live-text').textContent === 'finished'", timeout=10_000
        )
        assert seen.page.locator("#notes li").count() == 0
        assert "summary.json" in seen.page.locator("#footer a").all_text_contents()
        assert_well(seen)
        server.shutdown()
        thread.join()
    seen.page.wait_for_function(
        "() => document.getElementById('live-text').textContent.includes('does not answer')", timeout=10_000
    )
