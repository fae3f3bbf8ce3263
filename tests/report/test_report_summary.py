"""The terminal's table, the JSON and the page show the same figures under the same names."""

import json
import re

import pytest

from gossamer.cli import main
from gossamer.report.summary import COLUMNS, cells, speedup
from gossamer.results import Point

METHODS = "allreduce,gossip"
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6}


def printed(capsys, *arguments):
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        "simulate --task digits --workers 5 --steps 20 --straggler 1:3",
        "simulate --task quadratic --workers 3 --steps 10 --clock ideal",
        "simulate --task consensus --workers 4 --steps 10",
    ],
)
def test_table_json_and_page_agree(options, tmp_path, capsys):
    run = [*options.split(), "--method", METHODS]
    lines = printed(capsys, *run).splitlines()
    table = [re.split(r"  +", line) for line in (lines[1], *lines[3:5])]
    results = json.loads(printed(capsys, *run, "--json", "--out", tmp_path / "runs"))["results"]
    document = json.loads(printed(capsys, "report", tmp_path / "runs", "--json"))
    for row, result, run in zip(table[1:], results, document["runs"], strict=True):
        shown = dict(zip(table[0], row, strict=True))
        assert shown.pop("method") == result["method"] == run["name"]
        # The table and the page: cell by cell, and the page has no column that the table lacks.
        assert shown == {name: run["cells"][name] for name in shown}
        assert {name for name, cell in run["cells"].items() if cell != "–"} <= shown.keys()
        # Both are the JSON's fields of that name.
        assert shown["steps"] == str(result["steps"])
        assert shown["exchanges"] == str(result["exchanges"])
        assert float(shown["consensus"]) == pytest.approx(result["consensus"], rel=0.01)
        number, unit = shown["sent"].split()
        assert float(number) == pytest.approx(result["bytes_sent"] / UNITS[unit], rel=0.01)
        assert shown["busy"] == f"{100 * result['utilization']:.0f}%"
        if result["loss"] is not None:
            assert float(shown["loss"]) == pytest.approx(result["loss"], rel=0.01)
        if result["accuracy"] is not None:
            assert shown["accuracy"] == f"{100 * result['accuracy']:.1f}%"
        pace = [end["total_steps"] / end["time"] for end in (results[0], result)]
        assert shown["speed-up"] == f"{pace[1] / pace[0]:.2f}×"
    # The same words explain the columns.
    legend = " ".join(" ".join(lines[6:]).split())
    for name in table[0][1:]:
        assert f"{name}: {document['columns'][name]}" in legend


def test_every_column_has_a_meaning():
    assert set(cells({}, "s", None)) == set(COLUMNS)
    assert set(cells({}, "s", None).values()) == {"–"}


def test_the_fields_are_those_of_a_point():
    fields = {"time", "steps", "loss", "accuracy", "worker_accuracy", "consensus", "exchanges", "bytes_sent"}
    assert fields | {"utilization", "total_steps"} <= set(Point.__annotations__)


def test_a_run_without_steps_has_no_speedup():
    assert speedup({"time": 2.0, "total_steps": 10}, {"time": 1.0, "total_steps": 10}) == 2.0
    assert speedup({"time": 0.0, "total_steps": 0}, {"time": 1.0, "total_steps": 10}) is None
    assert speedup({}, {"time": 1.0, "total_steps": 10}) is None


def test_a_single_run_has_no_speedup(tmp_path, capsys):
    run = ("simulate", "--task", "quadratic", "--workers", "2", "--steps", "4")
    assert "speed-up" not in printed(capsys, *run)
    printed(capsys, *run, "--json", "--out", tmp_path / "run")
    (shown,) = json.loads(printed(capsys, "report", tmp_path / "run", "--json"))["runs"]
    assert shown["cells"]["speed-up"] == "–"
