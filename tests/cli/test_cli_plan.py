"""``gossamer plan`` as a person meets it."""

import re

import pytest

FILE = """
[cluster]
nodes = 2
workers_per_node = 2
[compute]
step = "60ms"
[links]
inside = "100gbit/10us"
between = "100mbit/50us"
"""
KEYS = {"method", "topology", "period", "step_s", "interval_s", "speedup", "bound_by", "bytes_per_step", "contraction"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def test_a_table_a_verdict_and_a_command(gossamer, file):
    done = gossamer("plan", "--cluster", file, "--task", "digits", "--parameters", "1e7")
    assert done.code == 0
    assert "digits, 10 M parameters, 2 nodes of 2 workers" in done.out
    assert "allreduce" in done.out
    assert "inter-node bandwidth" in done.out
    assert "Take " in done.out
    assert "gossamer train --task digits" in done.out


def test_json_has_what_was_promised(gossamer, file):
    document = gossamer("plan", "--cluster", file, "--task", "digits", "--json").document
    assert {"ranking", "verdict", "command"} <= document.keys()
    assert all(row.keys() >= KEYS for row in document["ranking"])
    baseline = next(row for row in document["ranking"] if row["method"] == "allreduce")
    assert baseline["speedup"] == 1.0
    assert document["parameters"] == 5018


def test_only_what_was_asked_for(gossamer, file):
    document = gossamer(
        "plan", "--cluster", file, "--parameters", "1000", "--method", "gossip,overlap", "--topology", "ring",
        "--workers", "4,8", "--json",
    ).document  # fmt: skip
    found = {(row["method"], row["topology"], row["workers"]) for row in document["ranking"]}
    assert found == {(method, "ring", count) for method in ("gossip", "overlap") for count in (4, 8)}


def test_what_if_says_before_and_after(gossamer, file):
    done = gossamer("plan", "--cluster", file, "--task", "digits", "--what-if", "bandwidth=1000x")
    assert "Now: " in done.out
    assert "With bandwidth=1000x: Stay on all-reduce" in done.out
    document = gossamer("plan", "--cluster", file, "--task", "digits", "--what-if", "workers=8", "--json").document
    assert document["what_if"] == "workers=8"
    assert {"verdict", "command"} <= document["before"].keys()
    assert all(row["workers"] == 8 for row in document["ranking"])


def test_a_picture_and_where_plans_are_faster(gossamer, file, tmp_path):
    done = gossamer("plan", "--cluster", file, "--parameters", "3e4", "--plot", "plan.png", "--json")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    workers, bandwidth = done.document["crossings"]
    assert workers.startswith("over workers: faster than all-reduce ")
    assert bandwidth.startswith("over bandwidth between nodes, Gbit/s: faster than all-reduce up to ")
    # DDP hides a part of what all-reduce does not.
    up_to = [float(value) for value in re.findall(r"up to ([\d.]+) Gbit/s", bandwidth)]
    assert len(up_to) == 2
    assert up_to[1] < up_to[0]


def test_bad_input_is_one_line(gossamer, file, tmp_path):
    gossamer("plan").refused("--cluster is missing", "gossamer probe")
    gossamer("plan", "--cluster", "none.toml").refused("none.toml", "cannot be read")
    gossamer("plan", "--cluster", file).refused("--task is missing", "--parameters")
    gossamer("plan", "--cluster", file, "--task", "digit").refused("digits")
    gossamer("plan", "--cluster", file, "--task", "digits", "--workers", "0").refused("--workers", "1 or more")
    gossamer("plan", "--cluster", file, "--task", "digits", "--mixing", "2").refused("--mixing", "from 0 to 1")
    gossamer("plan", "--cluster", file, "--task", "digits", "--method", "gosip").refused("Did you mean 'gossip'")
    gossamer("plan", "--cluster", file, "--task", "digits", "--topology", "rng").refused("Did you mean 'ring'")
    gossamer("plan", "--cluster", file, "--task", "digits", "--plot", "plan.doc").refused(".png, .svg, .pdf")
    gossamer("plan", "--cluster", file, "--task", "digits", "--what-if", "warp=9").refused("bandwidth")
    bad = tmp_path / "bad.toml"
    bad.write_text(FILE.replace("nodes = 2", "nodes = -2"))
    gossamer("plan", "--cluster", bad, "--task", "digits").refused("cluster.nodes", "-2", "1 or more")


def test_a_probe_says_what_is_wrong_before_anything_is_started(gossamer):
    gossamer("probe", "--seconds", "0").refused("--seconds", "from 1 to 3600")
    gossamer("probe", "--out", "no/such/folder.toml").refused("--out", "folder")
    gossamer("probe", "--task", "digit").refused("Did you mean 'digits'")
    gossamer("probe", "--link", "1mbit").refused("--link is for simulated workers")


def test_verifying_needs_the_nodes_and_a_task(gossamer, file):
    gossamer("plan", "--cluster", file, "--parameters", "10", "--verify").refused("--verify", "--task")
    gossamer("plan", "--cluster", file, "--task", "digits", "--verify").refused("2 nodes", "torchrun")


def test_auto_chooses_the_topology_too(gossamer):
    gossamer("train", "--method", "auto", "--topology", "ring").refused("--topology")


def test_until_ranks_by_the_time_to_the_target(gossamer, file):
    arguments = (
        "plan",
        "--cluster",
        file,
        "--task",
        "digits",
        "--method",
        "allreduce,lasgd",
        "--until",
        "accuracy=0.8",
    )
    done = gossamer(*arguments, "--budget", "30s")
    assert done.code == 0
    assert "until accuracy 0.8, after" in done.out
    assert "price" in done.out
    assert "until accuracy 0.8: allreduce over complete" in done.err
    document = gossamer(*arguments, "--budget", "30s", "--json").document
    ranking = document["quality"]["ranking"]
    assert {row["method"] for row in ranking} == {"allreduce", "lasgd"}
    assert all(row["time_s"] is None or row["time_s"] > 0 for row in ranking)
    baseline = next(row for row in ranking if row["method"] == "allreduce")
    assert baseline["price"] in (None, 1.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--task", "digits", "--until", "acuracy=0.9"], ["--until", "accuracy=0.9"]),
        (["--task", "digits", "--until", "accuracy=0.9", "--budget", "soon"], ["--budget", "5min"]),
        (["--task", "digits", "--budget", "5min"], ["--budget is for --until"]),
        (["--parameters", "1000", "--until", "accuracy=0.9"], ["--until needs a task"]),
        (["--task", "digits", "--until", "accuracy=0.9", "--workers", "4,8"], ["one number of workers"]),
        (["--task", "digits", "--until", "accuracy=0.9", "--lr", "fast"], ["--lr", "fast"]),
    ],
)
def test_mistakes_with_until_are_one_line(gossamer, file, arguments, words):
    gossamer("plan", "--cluster", file, "--method", "allreduce", *arguments).refused(*words)


def test_train_chooses_by_a_target_only_with_auto(gossamer):
    gossamer("train", "--task", "digits", "--method", "gossip", "--until", "accuracy=0.9").refused("--method auto")
    gossamer("train", "--task", "digits", "--method", "auto", "--budget", "5min").refused("--until, which is missing")
