"""The page in a real browser: pictures are drawn, switches work, nothing fails or is loaded from elsewhere."""

import json
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from gossamer.cli import main
from gossamer.recording import Recorder
from gossamer.report.document import report_document
from gossamer.report.page import page
from gossamer.report.runs import find_runs, read_run
from gossamer.report.server import LiveReport, ReportServer

PLOTS = ("loss", "accuracy", "consensus", "timelines", "steps", "staleness", "graph")


@pytest.fixture(scope="module")
def document(comparison):
    return report_document([read_run(folder) for folder in find_runs(comparison)])


@pytest.fixture(scope="module")
def url(document, tmp_path_factory):
    return write_page(document, tmp_path_factory.mktemp("page"))


def write_page(document, folder):
    path = Path(folder) / "report.html"
    path.write_text(page(document), encoding="utf-8")
    return path.as_uri()


def page_of(folder, *runs):
    return write_page(report_document([read_run(run) for run in runs]), folder)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 400)])
def test_everything_is_drawn_and_fits(url, open_page, scheme, width):
    opened = open_page(url, scheme=scheme, width=width)
    for plot in PLOTS:
        box = opened.page.locator(f"#{plot} svg").first.bounding_box()
        assert box["height"] > 100, plot
        assert 0 <= box["x"] <= box["x"] + box["width"] <= width, plot
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    ink = opened.evaluate("getComputedStyle(document.body).color")
    assert ink == ("rgb(227, 232, 238)" if scheme == "dark" else "rgb(31, 40, 51)")
    opened.assert_well()
    assert [url for url in opened.requests if not url.startswith("data:")] == [url]


def test_the_page_opens_with_one_sentence(url, open_page, document):
    opened = open_page(url)
    assert opened.text("h1") == document["headline"]
    assert " to 80% accuracy: " in document["headline"]
    first = opened.evaluate("document.body.innerText.trim().split('\\n')[0]")
    assert first == document["headline"]


def test_the_summary_and_its_target(url, open_page, document):
    opened = open_page(url)
    targets = document["targets"]
    chosen = targets["choices"][targets["default"]]
    assert opened.text("#target option:checked") == chosen["text"]
    assert opened.texts("#summary td.target") == chosen["cells"]
    rows = opened.page.locator("#summary tbody tr")
    assert rows.count() == 3
    for row, run in enumerate(document["runs"]):
        assert rows.nth(row).locator("th").text_content() == run["name"]
        assert set(run["cells"].values()) <= set(rows.nth(row).locator("td").all_text_contents())
    meanings = opened.text("#summary-meanings")
    for name, meaning in document["columns"].items():
        assert f"{name}: {meaning}" in meanings
    # The reader chooses another one.
    easiest = targets["choices"][0]
    opened.page.locator("#target").select_option(easiest["text"])
    assert opened.texts("#summary td.target") == easiest["cells"]
    assert opened.text("#summary-meanings").startswith(f"time to {easiest['text']}: ")
    opened.assert_well()


def test_time_and_speedup_are_visible_on_a_phone(url, open_page):
    opened = open_page(url, width=400)
    heads = opened.texts("#summary thead th")
    assert heads[1].startswith("time to ")
    table = opened.page.locator(".scroll").first.bounding_box()
    for column in (1, heads.index("time"), heads.index("speed-up")):
        for cell in opened.page.locator(f"#summary tr > *:nth-child({column + 1})").all():
            box = cell.bounding_box()
            assert table["x"] <= box["x"] <= box["x"] + box["width"] <= table["x"] + table["width"] <= 400
    # Names stay in one line.
    assert {row.bounding_box()["height"] < 40 for row in opened.page.locator("#summary tbody tr").all()} == {True}


def test_the_switch_puts_the_curves_on_four_axes(url, open_page, document):
    opened = open_page(url)
    titles = set()
    for axis in ("steps", "samples", "time", "bytes"):
        opened.page.locator("#axis label", has_text=axis).click()
        for plot in ("loss", "accuracy"):
            curves = opened.curves(plot)
            for run in document["runs"]:
                assert curves[run["name"]] == (run["points"][axis], run["curves"][plot])
        titles.add(opened.page.locator("#loss [aria-label='x-axis label']").text_content())
    assert titles == {"steps per worker", "samples seen by all workers", "simulated seconds", "sent by all workers"}
    # The consensus distance stays on time.
    curves = opened.curves("consensus")
    assert all(curves[run["name"]][0] == run["points"]["time"] for run in document["runs"])
    assert "one number" in opened.text("#prediction-meaning")
    opened.assert_well()


def test_runs_are_hidden_and_shown_again(url, open_page):
    opened = open_page(url)
    before = set(opened.curves("loss"))
    button = opened.page.locator("#legend button", has_text="gossip")
    button.click()
    assert set(opened.curves("loss")) == set(opened.curves("consensus")) == before - {"gossip"}
    for other in ("a2cid2", "allreduce"):
        opened.page.locator("#legend button", has_text=other).click()
    # Hidden by the reader, not empty: the cards stay.
    assert opened.page.locator("#loss-card").is_visible()
    assert opened.page.locator("#loss svg").count() == 0
    for button in opened.page.locator("#legend button").all():
        button.click()
    assert set(opened.curves("loss")) == before
    opened.assert_well()


def test_curves_are_told_apart_by_symbols_and_the_tooltip_lists_all(url, open_page, document):
    opened = open_page(url)
    marks = opened.evaluate("[...document.querySelectorAll('#legend .mark path')].map(p => p.getAttribute('d'))")
    assert len(set(marks)) == len(document["runs"]) > 1
    # Symbols of different curves are at different positions.
    positions = opened.evaluate(
        "[...document.querySelectorAll('#loss .symbol > *')].map(symbol => {"
        " const { x, y } = symbol.getBoundingClientRect(); return `${x} ${y}`; })"
    )
    assert len(set(positions)) == len(positions) >= 4 * len(document["runs"])
    opened.page.locator("#accuracy svg").hover(position={"x": 200, "y": 100})
    tooltip = opened.texts("#tooltip div")
    assert {line.split(":")[0] for line in tooltip} == {run["name"] for run in document["runs"]}
    # The others fade while one is pointed at.
    opened.page.locator("#legend button", has_text="gossip").hover()
    assert opened.page.locator("#loss .curve.faded").count() == 2
    assert opened.page.locator("#loss .curve.run-0:not(.faded)").count() == 1
    opened.assert_well()


def test_curves_that_lie_on_each_other_are_drawn_as_alternating_dashes(comparison, open_page, tmp_path):
    """Two equal runs: where one has a dash, the other has its gap."""
    twin = shutil.copytree(comparison / "gossip", tmp_path / "twin")
    opened = open_page(page_of(tmp_path, comparison / "gossip", Path(twin), comparison / "allreduce"))
    lines = opened.evaluate(
        "[...document.querySelectorAll('#loss .curve')].map(g =>"
        " [g.getAttribute('stroke-dasharray'), Number(g.getAttribute('stroke-dashoffset'))])"
    )
    assert lines == [["9 9", 0], ["9 9", -9], [None, 0]]
    opened.assert_well()


def test_a_range_is_zoomed_to_and_left(url, open_page, document):
    opened = open_page(url)
    opened.page.locator("#loss").scroll_into_view_if_needed()
    box = opened.page.locator("#loss svg").bounding_box()
    y = box["y"] + box["height"] / 2
    opened.page.mouse.move(box["x"] + 0.4 * box["width"], y)
    opened.page.mouse.down()
    opened.page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=3)
    opened.page.mouse.up()
    times = opened.curves("loss")["allreduce"][0]
    assert 0 < len(times) < len(document["runs"][2]["points"]["time"]) / 2
    opened.page.locator("#loss svg").dblclick()
    assert opened.curves("loss")["allreduce"][0] == document["runs"][2]["points"]["time"]
    opened.assert_well()


def test_the_time_lines_of_all_runs_share_one_axis(url, open_page, document):
    opened = open_page(url)
    names = [run["name"] for run in document["runs"]]
    assert [name.split(" ")[0] for name in opened.texts(".timeline-name")] == [
        f"{run['name']}{run['cells']['time'].split(' ')[0]}" for run in document["runs"]
    ]
    # One axis; the picture of a run is as long as the run lasted, and all begin at the same place.
    assert opened.page.locator("#timelines .axis").count() == 1
    images = opened.evaluate(
        "[...document.querySelectorAll('#timelines image')].map(image => {"
        " const matrix = image.getScreenCTM(); return [matrix.e, matrix.a * image.width.baseVal.value]; })"
    )
    assert len(images) == len(names)
    assert len({round(start, 3) for start, _ in images}) == 1
    lasted = [run["workers"]["timeline"]["width"] * run["workers"]["timeline"]["columns"] for run in document["runs"]]
    scale = images[0][1] / lasted[0]
    assert [width for _, width in images] == pytest.approx([scale * time for time in lasted], rel=1e-3)
    opened.assert_well()


def test_the_time_line_shows_who_was_dead(url, open_page):
    """The colour of the dead is in the picture of worker 2 and in no other."""
    opened = open_page(url)
    rows = opened.evaluate(
        """async () => {
          const image = document.querySelector("#timelines image"), loaded = new Image();
          loaded.src = image.getAttribute("href");
          await loaded.decode();
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [loaded.width, loaded.height];
          const context = canvas.getContext("2d");
          context.drawImage(loaded, 0, 0);
          const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
          const dead = d3.rgb(getComputedStyle(document.documentElement).getPropertyValue("--dead"));
          const rows = new Set();
          for (let k = 0; k < pixels.length; k += 4) {
            if (pixels[k] === dead.r && pixels[k + 1] === dead.g && pixels[k + 2] === dead.b && pixels[k + 3] === 255) {
              rows.add(Math.floor((6 * Math.floor(k / 4 / canvas.width)) / canvas.height));
            }
          }
          return [...rows];
        }"""
    )
    assert rows == [2]
    opened.page.locator("#timelines svg.timelines").hover(position={"x": 200, "y": 40})
    assert opened.text("#tooltip strong").startswith("gossip, worker ")
    opened.assert_well()


def test_the_workers_of_each_run(url, open_page, document):
    opened = open_page(url)
    for run in document["runs"]:
        opened.page.locator("#run label", has_text=run["name"]).click()
        bars = opened.evaluate("['steps', 'staleness'].map(id => document.getElementById(id).bars.map(bar => bar.y))")
        counts = [count for _, count in run["workers"]["staleness"]["counts"]]
        assert bars[0] == run["workers"]["steps"]
        assert bars[1] == pytest.approx([count / sum(counts) for count in counts])
        events = opened.texts("#events li")
        assert len(events) == len(run["events"])
        assert "worker 2 gone" in events[0]
    opened.assert_well()


def test_edges_are_as_thick_as_their_traffic(copied, open_page, tmp_path):
    recording = json.loads((copied / "recording.json").read_text())
    recording["edges"] = [[0, 1, 8000, 8], [1, 2, 4000, 4], [2, 3, 1000, 1]]
    (copied / "recording.json").write_text(json.dumps(recording))
    opened = open_page(page_of(tmp_path, copied))
    assert opened.page.locator("#graph .unused path").count() == 3
    widths = opened.evaluate(
        "[...document.querySelectorAll('#graph .edges path')].map(p => Number(p.getAttribute('stroke-width')))"
    )
    assert widths[0] - 0.6 == pytest.approx(2 * (widths[1] - 0.6)) == pytest.approx(8 * (widths[2] - 0.6))
    opened.assert_well()


def test_light_and_dark_follow_the_system(url, open_page):
    opened = open_page(url)
    colours, images = [], []
    for scheme in ("light", "dark", "light"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.page.wait_for_timeout(200)
        colours.append(opened.evaluate("getComputedStyle(document.querySelector('#loss .curve path')).stroke"))
        images.append(opened.page.locator("#timelines image").first.get_attribute("href"))
    assert colours[0] == colours[2] != colours[1]
    assert images[0] == images[2] != images[1]
    opened.assert_well()


def test_it_prints_in_light(url, open_page):
    opened = open_page(url, scheme="dark")
    card = "getComputedStyle(document.documentElement).getPropertyValue('--card').trim()"
    opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert opened.evaluate(card) == "#ffffff"
    opened.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert opened.evaluate(card) == "#1b2027"
    assert opened.page.pdf(format="A4").startswith(b"%PDF")
    opened.assert_well()


def test_the_settings_and_the_command(url, open_page, document):
    opened = open_page(url, width=400)
    assert opened.texts("#commands pre") == [document["runs"][0]["command"]]
    differing = opened.texts("#differences tbody th")
    assert "method" in differing
    assert "workers" not in differing
    opened.page.locator("#all-settings summary").click()
    assert "workers" in opened.texts("#settings tbody th")


def test_text_from_files_is_never_interpreted(copied, open_page, tmp_path):
    evil = "</script><!--<script><img src=x onerror='document.title=\"owned\"'><b>&amp;"
    about = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**about, "command": evil, "gossamer": evil, "method": evil}))
    config = (copied / "config.toml").read_text()
    (copied / "config.toml").write_text(
        config.replace('method = "gossip"', f"method = {json.dumps(evil)}").replace('"digits"', json.dumps(evil))
    )
    recording = json.loads((copied / "recording.json").read_text())
    (copied / "recording.json").write_text(json.dumps({**recording, "events": [[1.0, evil]]}))
    opened = open_page(page_of(tmp_path, copied))
    assert opened.text("h1").startswith(f"{evil} reached ")
    assert opened.text("#events span") == evil
    assert opened.text("#commands pre") == evil
    opened.page.locator("#loss svg").hover()
    assert f"{evil}: " in opened.text("#tooltip")
    assert opened.page.locator("img, b").count() == 0
    assert opened.page.title() == f"{evil} · gossamer"
    opened.assert_well()


def test_cards_without_content_are_hidden(copied, open_page, tmp_path):
    def visible(url):
        opened = open_page(url)
        opened.assert_well()
        cards = opened.evaluate("[...document.querySelectorAll('figure')].filter(f => f.offsetParent).map(f => f.id)")
        return {card.removesuffix("-card") for card in cards}, set(opened.texts("h2:visible"))

    learning, workers = {"accuracy", "loss", "consensus"}, {"timelines", "steps", "staleness", "graph"}
    assert visible(page_of(tmp_path, copied))[0] == {*learning, *workers, "events"}
    # No recording, and with it no times of events; what the summary says of them is shown.
    (copied / "recording.json").unlink()
    cards, headings = visible(page_of(tmp_path, copied))
    assert cards == {*learning, "events"}
    assert "Time lines" not in headings
    # A run at its very start.
    (copied / "metrics.jsonl").unlink()
    (copied / "summary.json").unlink()
    opened = open_page(page_of(tmp_path, copied))
    assert "not finished" in opened.text("#notes")
    assert visible(page_of(tmp_path, copied)) == (set(), {"Summary", "Configuration"})
    # Averaging without gradients has neither loss nor accuracy, and the consensus distance needs no choice of axes.
    folder = tmp_path / "consensus"
    assert main(["simulate", "--task", "consensus", "--workers", "4", "--steps", "5", "--out", str(folder)]) == 0
    url = page_of(tmp_path, folder)
    assert visible(url)[0] == {"consensus", *workers}
    assert open_page(url).page.locator("#axis").is_hidden()


def test_real_workers_show_their_own_models_and_the_averaged_one_at_the_end(copied, open_page, tmp_path):
    points = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for point in points[:-1]:
        point |= {"loss": None, "accuracy": None}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    opened = open_page(page_of(tmp_path, copied))
    assert set(opened.curves("accuracy")) == {"gossip, workers"}
    assert set(opened.curves("loss")) == {"gossip, training"}
    for plot in ("accuracy", "loss"):
        assert opened.page.locator(f"#{plot} .end > *").count() == 1
    assert "own models" in opened.text("#accuracy-meaning")
    opened.assert_well()


def test_64_workers_are_drawn_and_the_page_is_light(open_page, tmp_path):
    rng = np.random.default_rng(0)
    recorder = Recorder(range(64))
    for step in range(64 * 1500):
        rank, time = step % 64, 0.05 * (step // 64)
        waits = 0.02 * rng.random()
        recorder.stepped(rank, time, time + 0.05 - waits, time + 0.05)
        recorder.waited(rank, time + 0.05 - waits, time + 0.05)
        recorder.exchanged((rank, (rank + 1) % 64), time, time + 0.03, 40_000)
        recorder.merged(rank, time, time, int(rng.integers(9)))
    folders = []
    for name in ("gossip", "a2cid2", "overlap", "allreduce", "localsgd", "lasgd", "divisible"):
        options = f"--task quadratic --workers 64 --steps 5 --method {name} --json --out"
        folders.append(tmp_path / name)
        assert main(["simulate", *options.split(), str(folders[-1])]) == 0
        (folders[-1] / "recording.json").write_text(json.dumps(recorder.document()))
        point = json.loads((folders[-1] / "metrics.jsonl").read_text().splitlines()[-1])
        lines = [
            json.dumps({**point, "time": 0.05 * k, "total_steps": 64 * k, "loss": rng.random()}) for k in range(3000)
        ]
        (folders[-1] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    url = page_of(tmp_path, *folders)
    assert (tmp_path / "report.html").stat().st_size < 2e6
    opened = open_page(url)
    assert opened.evaluate("document.getElementById('steps').bars.map(bar => bar.y)") == [1500] * 64
    assert opened.page.locator("#timelines image").count() == 7
    opened.assert_well()


def test_the_live_page_follows_the_run(copied, open_page):
    lines = (copied / "metrics.jsonl").read_text().splitlines()
    summary = (copied / "summary.json").read_text()
    (copied / "metrics.jsonl").write_text("\n".join(lines[:5]) + "\n")
    (copied / "summary.json").unlink()
    num_points = "() => document.getElementById('loss').curves[0].points.length"
    with ReportServer(LiveReport(copied), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        opened = open_page(server.url)
        assert opened.text("#live-text") == "10%"
        assert opened.text("h1").startswith("gossip is at step 4 of 40")
        assert opened.evaluate(num_points) == 5
        with (copied / "metrics.jsonl").open("a") as more:
            more.write("\n".join(lines[5:20]) + "\n")
        opened.page.wait_for_function(f"{num_points} === 20", timeout=60_000)
        assert opened.text("#live-text") == f"{round(100 * 19 / 40)}%"
        (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        (copied / "summary.json").write_text(summary)
        opened.page.wait_for_function(
            "() => document.getElementById('live-text').textContent === 'finished'", timeout=60_000
        )
        assert opened.page.locator("#notes li").count() == 0
        assert opened.text("h1").startswith("gossip reached ")
        assert "summary.json" in opened.texts("#footer a")
        opened.assert_well()
        server.shutdown()
        thread.join()
    opened.page.wait_for_function(
        "() => document.getElementById('live-text').textContent.includes('does not answer')", timeout=60_000
    )


def test_the_ranks_of_replicas_are_folded(document, open_page, tmp_path):
    changed = json.loads(json.dumps(document))
    assert open_page(write_page(changed, tmp_path)).page.locator("#ranks-of-replicas").is_hidden()
    times = dict.fromkeys(changed["runs"][0]["workers"]["time"], 0.0)
    changed["runs"][0]["replica_size"] = 2
    changed["runs"][0]["workers"]["of_replicas"] = [
        {"worker": 1, "rank": rank, "steps": 40, "time": {**times, "compute": 3.0, "wait": rank}} for rank in range(2)
    ]
    opened = open_page(write_page(changed, tmp_path))
    assert "6 replicas of 2 ranks" in opened.text("#subtitle")
    folded = opened.page.locator("#ranks-of-replicas")
    assert not opened.page.locator("#ranks").is_visible()
    folded.locator("summary").click()
    assert opened.page.locator("#ranks").is_visible()
    assert opened.texts("#ranks tbody td") == ["1", "0", "40", "100%", "0%", "1", "1", "40", "75%", "25%"]
    opened.assert_well()
