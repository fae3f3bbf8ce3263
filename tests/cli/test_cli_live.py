"""The screen of a run that trains, and the lines that replace it where there is no terminal."""

import io
import math

import pytest
from rich.console import Console

from gossamer.cli import live
from gossamer.cli.live import BARS, SPARKLINE_LENGTH, LiveView, Sparkline, line, most_notable
from gossamer.report.view import View, WorkerRow, states_of
from gossamer.runs.status import WorkerStatus


def view_of(count, share=0.5, states=None, **changes):
    rows = [
        WorkerRow(rank, 100 - rank, 2.0 - 0.01 * rank, None, 3 * rank, (states or {}).get(rank, "training"))
        for rank in range(count)
    ]
    values = {"time": 30.0, "time_unit": "s", "wall_s": 60.0, "train_loss": 0.25, "accuracy": 0.9, "consensus": 0.01}
    return View(share=share, rows=rows, **{**values, **changes})


def screen(view, width=80, height=40, encoding="utf-8"):
    """The lines of the screen."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, height=height, force_terminal=False, highlight=False)
    shown = LiveView("gossip", quiet=False)
    for value in (4.0, 3.0, 2.0, 1.0):
        shown._train_loss.add(value)
        shown._consensus.add(1 / value)
    shown._accuracy = view.accuracy
    console.print(shown._screen(view, console))
    stream.seek(0)
    return [text.rstrip() for text in stream.read().splitlines()]


def test_real_workers_show_the_mean_accuracy_of_their_own_models():
    view = view_of(2, accuracy=None, worker_accuracy=0.9)
    assert "workers' accuracy 90.0%" in line(view)
    assert "  accuracy" not in line(view)
    assert [text.split()[:2] for text in screen(view) if text.startswith("workers")] == [["workers", "90.0%"]]


def test_everything_is_on_the_screen():
    lines = screen(view_of(4, states={2: "gone", 3: "slow"}))
    assert lines[0].startswith("gossip  ━")
    assert lines[0].endswith("50%  30.0 s  60 s left")
    assert lines[1].split() == ["train", "loss", "0.25", "█▆▃▁"]
    assert lines[2].split() == ["consensus", "0.01", "▁▂▃█"]
    assert lines[3].split() == ["accuracy", "90.0%"]
    assert lines[4].split() == ["worker", "steps", "steps/s", "exchanges"]
    assert [text.split() for text in lines[5:]] == [
        ["0", "100", "2", "0"],
        ["1", "99", "1.99", "3"],
        ["2", "98", "1.98", "6", "gone"],
        ["3", "97", "1.97", "9", "slow"],
    ]


def test_of_many_workers_the_most_notable_ones_have_a_row():
    lines = screen(view_of(64, states={5: "gone"}), height=16)
    assert len(lines) <= 16
    ranks = [int(text.split()[0]) for text in lines[5:-1]]
    assert ranks[0] == 5
    assert ranks[1:] == list(range(64 - len(ranks) + 1, 64))
    assert lines[-1] == f"{64 - len(ranks)} more: {2 - 0.01 * (64 - len(ranks)):.3g}–2 steps/s, " + (
        f"{sum(3 * rank for rank in range(64) if rank not in ranks)} exchanges"
    )


@pytest.mark.parametrize("width", [40, 60, 100])
def test_it_fits_narrow_terminals_and_those_without_bars(width):
    assert max(map(len, screen(view_of(4), width=width))) <= width
    assert "█" not in "".join(screen(view_of(4), width=width, encoding="ascii"))


def test_a_sparkline_has_a_bounded_length_however_long_the_run():
    sparkline = Sparkline()
    assert sparkline.text() == ""
    for step in range(10_000):
        sparkline.add(math.exp(-step / 2000))
        assert len(sparkline.means) < 2 * SPARKLINE_LENGTH
    text = sparkline.text()
    assert SPARKLINE_LENGTH / 2 < len(text) <= SPARKLINE_LENGTH
    assert (text[0], text[-1]) == (BARS[-1], BARS[0])
    assert list(text) == sorted(text, reverse=True)
    for value in (None, math.nan, math.inf):
        sparkline.add(value)
    assert sparkline.text() == text
    flat = Sparkline()
    flat.add(1.0)
    assert flat.text() == BARS[0]


def test_lines_hold_the_same_figures():
    assert line(view_of(2)) == "50%  time 30.0 s  train loss 0.25  accuracy 90.0%  consensus 0.01  60 s left"
    assert line(view_of(2, states={1: "gone"}, share=1.0)).endswith("consensus 0.01  worker 1 gone")
    assert line(view_of(2, states={0: "starting", 1: "starting"})) == "2 workers starting"
    assert line(view_of(1, time=7.5, time_unit="gradients", train_loss=None)).startswith("50%  time 7.5  accuracy")


def test_without_a_terminal_a_line_is_printed_now_and_then(capsys, monkeypatch):
    clock = iter([0.0, 1.0, 6.0, 6.5, 7.0, 8.0])
    monkeypatch.setattr(live.time, "monotonic", lambda: next(clock))
    with LiveView("gossip", quiet=False) as shown:
        shown.show(view_of(2, share=0.1), [])
        shown.show(view_of(2, share=0.2), ["worker 1 gone; going on with 1"])
        shown.show(lambda: view_of(2, share=1.0), [])
    printed = capsys.readouterr().err
    assert "\x1b" not in printed
    lines = printed.splitlines()
    assert lines[0] == "gossip: worker 1 gone; going on with 1"
    assert lines[1].startswith("gossip: 20%")
    assert lines[2].startswith("gossip: 100%")
    assert len(lines) == 3


def test_a_quiet_view_prints_nothing(capsys):
    with LiveView("gossip", quiet=True) as shown:
        shown.show(view_of(2), ["worker 1 gone"])
    assert capsys.readouterr().err == ""


def test_which_workers_are_slow_and_which_are_notable():
    assert states_of([1.0, 1.0, 0.4]) == ["training", "training", "slow"]
    assert states_of([1.0, 1.0, 0.6]) == ["training"] * 3
    assert [row.rank for row in most_notable(view_of(9, states={1: "silent"}).rows, 3)] == [1, 7, 8]


def test_a_workers_loss_is_that_of_its_newest_batches():
    earlier = WorkerStatus(0, loss_sum=40.0, loss_count=10)
    assert WorkerStatus(0, loss_sum=42.0, loss_count=20).loss_since(earlier) == 0.2
    assert earlier.loss_since(earlier) is None
    assert WorkerStatus(0, loss_sum=3.0, loss_count=1).loss_since(earlier) == 3.0
