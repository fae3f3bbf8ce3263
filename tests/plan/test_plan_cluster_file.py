"""Cluster files: reading, writing, and one-line errors that name the field."""

import json

import pytest

from gossamer.errors import InputError
from gossamer.hardware import Link
from gossamer.plan import cluster_file
from gossamer.plan.cluster_parser import ClusterParser
from gossamer.plan.cluster_spec import ClusterSpec, ComputeProfile, Costs, GroupShape, TimingTable

GOOD = {
    "cluster": {"nodes": 2, "workers_per_node": 2},
    "compute": {"step": "60ms"},
    "links": {"inside": "100gbit/10us", "between": "25gbit/50us"},
}
ROW = {"what": "mean", "members": 4, "nodes": 2, "bytes": [4096, 1000000], "seconds": [0.001, 0.1]}


def changed(field, value):
    """Return the good document with one field set, or removed if ``value`` is None."""
    document = json.loads(json.dumps(GOOD))
    section, _, key = field.partition(".")
    if key:
        document.setdefault(section, {})[key] = value
        if value is None:
            del document[section][key]
    else:
        document[section] = value
    return document


def read(document):
    return ClusterParser("c.toml", document).parse()


def test_a_file_written_by_hand(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        """
        [cluster]
        nodes = 8
        workers_per_node = 4
        [compute]
        step = "60ms"
        spread = 0.05
        [links]
        inside = "100gbit/10us"
        between = "25gbit/50us"
        """
    )
    spec = cluster_file.read(path)
    assert (spec.nodes, spec.per_node, spec.workers) == (8, 4, 32)
    assert spec.compute == ComputeProfile(mean_s=0.06, spread=0.05)
    assert spec.inside == Link(12.5e9, pytest.approx(1e-5))
    assert spec.between == Link(3.125e9, pytest.approx(5e-5))
    assert spec.costs == Costs()
    assert not spec.measured


@pytest.mark.parametrize("name", ["c.toml", "c.json"])
def test_a_written_file_reads_back_equal(tmp_path, name):
    spec = ClusterSpec(
        nodes=2,
        per_node=2,
        compute=ComputeProfile(
            mean_s=0.05, sample_s=(0.04, 0.05, 0.06), factors=(1, 1, 3, 1), correlation=0.25, backward_s=0.03
        ),
        inside=Link(1e9, 1e-3),
        between=Link(1e8, 2e-3),
        costs=Costs(slowdown=1.2, mixing_bytes_per_s=2e9, compressing_bytes_per_s=1e8, overhead_s=0.001),
        tables=(
            TimingTable(
                kind="mean", shape=GroupShape(4, 2, 1), sizes_bytes=(4096, 10**6), seconds=(0.001, 0.1), spread=0.05
            ),
            TimingTable(
                kind="gather", shape=GroupShape(2, 1), sizes_bytes=(4096,), seconds=(0.001,), in_a_row=(0.002,)
            ),
        ),
        parameters=1234,
        memory_bytes=8e9,
        source="by hand",
    )
    cluster_file.write(spec, tmp_path / name)
    assert cluster_file.read(tmp_path / name) == spec


def test_one_worker_per_node_needs_no_links_inside_and_one_node_none_between():
    assert read({**GOOD, "cluster": {"nodes": 4, "workers_per_node": 1}, "links": {"between": "1gbit"}}).workers == 4
    assert read({**GOOD, "cluster": {"nodes": 1, "workers_per_node": 4}, "links": {"inside": "1gbit"}}).workers == 4


def test_the_parts_of_a_step_are_added():
    compute = {"forward": 0.02, "backward": "40ms", "optimizer": 0.005}
    assert read({**GOOD, "compute": compute}).compute == ComputeProfile(mean_s=pytest.approx(0.065), backward_s=0.04)


BAD = [
    ("cluster.nodes", None, "missing"),
    ("cluster.nodes", -2, "1 or more"),
    ("cluster.nodes", 2.5, "whole number"),
    ("cluster.workers_per_node", 0, "1 or more"),
    ("cluster.memory", "lots", "4GB"),
    ("compute.step", None, "missing"),
    ("compute.step", -0.1, "0 or more"),
    ("compute.step", "soon", "60ms"),
    ("compute.step", 0, "above 0"),
    ("compute.spread", -1, "0 or more"),
    ("compute.correlation", 1.5, "from 0 to 1"),
    ("compute.factors", [1, 1, 1], "4 workers"),
    ("compute.factors", [1, 1, 1, 0], "above 0"),
    ("compute.factors", [1, 1, 1, -1], "0 or more"),
    ("compute.sample", [], "list of numbers"),
    ("compute.sample", [0.1, "x"], "number"),
    ("compute.sample", [1.0, 1.2], "compute.step"),
    ("compute.backward", 0.2, "compute.step"),
    ("links.inside", None, "missing"),
    ("links.between", None, "missing"),
    ("links.between", "-1gbit", "25gbit/50us"),
    ("links.between", 25, "25gbit/50us"),
    ("links.between", "0gbit", "25gbit/50us"),
    ("costs.slowdown", 0.5, "1 or more"),
    ("costs.mixing", "fast", "4GB"),
    ("model.parameters", -1, "0 or more"),
    ("compute.stepp", 1, "did you mean step"),
    ("clutser", {}, "did you mean cluster"),
    ("links", "fast", "[links]"),
    ("measured", {}, "[[measured]]"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD)
def test_errors_name_the_field(field, value, words):
    with pytest.raises(InputError) as error:
        read(changed(field, value))
    message = str(error.value)
    assert field in message
    assert words in message
    assert "\n" not in message


BAD_ROWS = [
    ("what", "nap", "mean, exchange, gather"),
    ("what", "exchange", "an exchange has 2"),
    ("members", 5, "2 to 4"),
    ("members", 1, "2 to 4"),
    ("nodes", 3, "at most 2"),
    ("at_once", 0, "1 or more"),
    ("bytes", [1000000, 4096], "ascending"),
    ("seconds", [0.1], "2 sizes"),
    ("seconds", [0.1, -0.1], "0 or more"),
    ("in_a_row", [0.1], "2 sizes"),
    ("spread", -1, "0 or more"),
]


@pytest.mark.parametrize(("field", "value", "words"), BAD_ROWS)
def test_errors_in_a_table_name_it(field, value, words):
    good = {**GOOD, "measured": [ROW]}
    assert read(good).tables[0].shape == GroupShape(4, 2, 1)
    name = "members" if field == "what" and value == "exchange" else field
    with pytest.raises(InputError, match=rf"measured\[1\]\.{name}") as error:
        read({**good, "measured": [ROW, {**ROW, field: value}]})
    assert words in str(error.value)


def test_a_sample_and_a_spread_contradict_each_other():
    compute = {"sample": [0.1, 0.2], "spread": 0.1}
    with pytest.raises(InputError, match=r"compute\.spread contradicts compute\.sample"):
        read({**GOOD, "compute": compute})


def test_missing_and_invalid_files(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        cluster_file.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("nodes = = 3")
    with pytest.raises(InputError, match="is not TOML"):
        cluster_file.read(tmp_path / "bad.toml")
    (tmp_path / "bad.json").write_text("[1, 2]")
    with pytest.raises(InputError, match="is not a table"):
        cluster_file.read(tmp_path / "bad.json")


def test_a_table_is_linear_between_its_sizes_and_beyond():
    table = TimingTable(kind="mean", shape=GroupShape(2, 1), sizes_bytes=(1000, 2000, 4000), seconds=(1.0, 2.0, 6.0))
    assert [table.seconds_at(size) for size in (1, 1000, 1500, 3000, 4000, 5000)] == [1.0, 1.0, 1.5, 4.0, 6.0, 8.0]
