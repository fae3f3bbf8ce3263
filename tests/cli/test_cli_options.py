"""The options are the typed settings, and every value that cannot be used is one clear line."""

import dataclasses

import pytest

from gossamer import __version__
from gossamer.config import SECTIONS
from gossamer.methods import METHODS
from gossamer.topology import names as topologies


def test_every_setting_is_an_option_with_its_help(gossamer):
    shown = gossamer("simulate", "--help")
    assert shown.code == 0
    assert shown.err == ""
    words = " ".join(shown.out.split())
    classes = [*SECTIONS, *(method.Config for method in METHODS.values())]
    for field in (field for settings in classes for field in dataclasses.fields(settings)):
        assert f"--{field.name.replace('_', '-')} " in words
    # One of each section, to the letter.
    assert "--workers N number of workers (default: 16)" in words
    assert "--dim N length of the parameter vector (consensus, quadratic) (default: 64)" in words
    assert "--nodes N number of machines, each with one network card; 0: one machine per worker (default: 0)" in words
    assert "--rate X exchanges per worker and gradient (default: a2cid2 1.0, gossip 1.0)" in words


def test_simulate_alone_has_a_default_for_everything():
    for settings in SECTIONS:
        settings()
    for method in METHODS.values():
        method.Config()


def test_gossamer_without_arguments_lists_the_commands(gossamer):
    alone = gossamer()
    assert alone.code == 2
    assert alone.out == ""
    for command in ("simulate", "topology", "methods"):
        assert command in alone.err


def test_version(gossamer):
    shown = gossamer("--version")
    assert (shown.code, shown.out, shown.err) == (0, f"gossamer {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("simulat",), ("unknown command 'simulat'", "'simulate'")),
        (("simulate", "--methdo", "gossip"), ("unknown option --methdo", "--method?")),
        (("simulate", "--steps=3", "--qqq=3"), ("unknown option --qqq=3", "--help")),
        (("simulate", "stray"), ("unknown option stray",)),
        (("simulate", "--workers"), ("--workers", "expected a value")),
        (("topology", "ring", "--wrokers", "3"), ("unknown option --wrokers", "--workers?")),
        (("topology", "rign"), ("unknown topology 'rign'", "'ring'")),
        (("topology", "ring", "--workers", "0"), ("--workers is 0",)),
        (("topology", "ring", "--workers", "1.5"), ("--workers is '1.5'", "whole number")),
        (("topology", "ring", "--rate", "nan"), ("--rate is nan",)),
        (("topology", "ring", "--rate", "inf"), ("--rate is inf",)),
        (("topology", "ring", "--seed", "-1"), ("--seed is -1",)),
        (("topology", "ring", "--plot", "picture.doc"), ("picture.doc", ".png")),
        (("topology", "ring", "--plot", "no/such/folder.png"), ("no/such/folder.png",)),
        (("topology", "ring", "--plot", ""), ("cannot draw to",)),
        (("topology", "nosuch.edges"), ("no file nosuch.edges",)),
        (("topology", ""), ("unknown topology ''",)),
        (("methods", "gosip"), ("unknown method 'gosip'", "'gossip'")),
        (("methods", ""), ("unknown method ''",)),
    ],
)
def test_a_bad_command_line_is_one_line(gossamer, arguments, words):
    gossamer(*arguments).refused(*words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("method", "gosip", ("unknown method 'gosip'", "'gossip'")),
        ("method", "", ("unknown method ''", "a2cid2")),
        ("method", "gossip,", ("unknown method ''",)),
        ("method", "gossip,gossip", ("each method once",)),
        ("topology", "rng", ("unknown topology 'rng'", "'ring'")),
        ("topology", "", ("unknown topology ''", "ring")),
        ("topology", "ring:3", ("ring takes no option",)),
        ("topology", "torus:3x3", ("9 workers, not 4",)),
        ("topology", "torus:a", ("torus:a", "torus:4x4")),
        ("topology", "random-regular:0", ("random-regular:0",)),
        ("topology", "nosuch.txt", ("no file nosuch.txt",)),
        ("task", "", ("unknown task ''", "digits")),
        ("task", "nosuch.py", ("nosuch.py does not exist",)),
        ("workers", "0", ("--workers is 0", "1 or more")),
        ("workers", "-3", ("--workers is -3",)),
        ("workers", "1.5", ("--workers is '1.5'", "whole number")),
        ("workers", "", ("--workers is ''", "whole number")),
        ("steps", "0", ("--steps is 0",)),
        ("steps", "-1", ("--steps is -1",)),
        ("batch", "0", ("--batch is 0",)),
        ("epochs", "-1", ("--epochs is -1",)),
        ("lr", "nan", ("--lr is not a number",)),
        ("lr", "inf", ("inf",)),
        ("lr", "-0.1", ("--lr is -0.1",)),
        ("momentum", "2", ("--momentum is 2", "1 or less")),
        ("optimizer", "sdg", ("unknown optimizer 'sdg'", "'sgd'")),
        ("schedule", "cosin", ("--schedule", "'cosine'")),
        ("clock", "real", ("--clock", "ideal")),
        ("device", "tpu", ("--device is 'tpu'",)),
        ("gradient-backend", "fast", ("--gradient-backend", "batched")),
        ("seed", "-1", ("--seed is -1",)),
        ("dim", "0", ("--dim is 0",)),
        ("data", "x", ("does not use data",)),
        ("rate", "0", ("--rate is 0",)),
        ("period", "3", ("--period does not apply to a2cid2", "localsgd")),
        ("compute", "fast", ("--compute", "lognormal:MEAN,SIGMA")),
        ("compute", "constant:0", ("constant:0", "above 0")),
        ("compute", "sample:nosuch.txt", ("nosuch.txt",)),
        ("straggler", "9:2", ("worker 9", "0 to 3")),
        ("straggler", "3", ("--straggler has '3'", "3:5")),
        ("straggler", "3:0", ("--straggler", "above 0")),
        ("link", "5", ("--link is '5'", "200mbit/5ms")),
        ("link", "0mbit", ("--link", "above 0")),
        ("slow-link", "0-9:1mbit", ("--slow-link", "0 to 3")),
        ("slow-link", "0-1", ("--slow-link", "0-1:10mbit/20ms")),
        ("nodes", "3", ("--nodes is 3", "divisor")),
        ("fail", "1@soon", ("--fail has '1@soon'",)),
        ("fail", "1@-1", ("--fail", "0 or more")),
        ("join", "7@1", ("--join names worker 7",)),
        ("config", "nosuch.toml", ("nosuch.toml cannot be read",)),
        ("config", "", ("--config is empty",)),
        ("out", "", ("--out is empty",)),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_value_that_cannot_be_used_is_one_line(gossamer, quick, option, value, words, form, tmp_path):
    outcome = gossamer(*quick, f"--{option}={value}", *(("--json",) if form == "json" else ()))
    outcome.refused(*words)
    assert list(tmp_path.iterdir()) == []


def test_too_few_samples_for_so_many_workers(gossamer):
    gossamer("simulate", "--workers", "2000", "--steps", "1").refused("1437", "2000 workers")


def test_a_partition_that_does_not_exist(gossamer):
    gossamer("simulate", "--partition", "by-clas", "--steps", "1").refused("unknown partition 'by-clas'", "by-class")


def test_a_missing_data_file(gossamer):
    gossamer("simulate", "--task", "shakespeare", "--data", "nosuch.txt").refused("nosuch.txt", "No such file")


def test_a_graph_in_parts_names_the_parts(gossamer, tmp_path):
    (tmp_path / "parts.txt").write_text("0 1\n1 2\n3 4\n")
    for arguments in (("topology", "parts.txt"), ("simulate", "--task", "quadratic", "--topology", "parts.txt")):
        gossamer(*arguments).refused("2 parts", "{0, 1, 2}", "{3, 4}")


def test_the_users_own_graph_determines_the_number_of_workers(gossamer, tmp_path):
    (tmp_path / "five.txt").write_text("0 1\n1 2\n2 3\n3 4\n4 0\n")
    ran = gossamer("simulate", "--task", "quadratic", "--topology", "five.txt", "--steps", "2", "--json")
    assert ran.document["results"][0]["workers"] == 5
    gossamer("simulate", "--task", "quadratic", "--topology", "five.txt", "--workers", "4").refused("5 workers")


def test_too_little_memory_is_one_line(gossamer, monkeypatch):
    def build(*arguments, **named):
        raise MemoryError("Unable to allocate 7 GiB")

    monkeypatch.setattr("gossamer.cli.commands.topology.build", build)
    gossamer("topology", "ring", "--workers", "1000000000").refused("out of memory", "7 GiB", "fewer --workers")


def test_an_error_of_ours_is_not_hidden(gossamer, monkeypatch):
    def build(*arguments, **named):
        raise RuntimeError("a bug")

    monkeypatch.setattr("gossamer.cli.commands.topology.build", build)
    with pytest.raises(RuntimeError, match="a bug"):
        gossamer("topology", "ring")


def test_every_method_is_in_the_list(gossamer):
    listed = gossamer("methods")
    for name in METHODS:
        assert f"\n{name} " in listed.out
    rows = gossamer("methods", "--json").document["methods"]
    assert [row["method"] for row in rows] == list(METHODS)
    assert {"method", "summary", "waits", "options"} <= set(rows[0])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_described_by_its_own_docstring(gossamer, name):
    outcome = gossamer("methods", name)
    assert outcome.code == 0
    assert "What travels" in outcome.out
    for field in dataclasses.fields(METHODS[name].Config):
        assert f"--{field.name.replace('_', '-')}: " in outcome.out


def test_every_topology_is_in_the_list(gossamer):
    listed = gossamer("topology")
    for name in topologies():
        assert f"\n{name} " in listed.out
    assert [row["topology"] for row in gossamer("topology", "--json").document["topologies"]] == list(topologies())


def test_launch_says_what_is_wrong_before_it_starts_a_worker(gossamer, tmp_path, monkeypatch):
    gossamer("launch", "train.py").refused("there is no file train.py: expected a Python script")
    (tmp_path / "train.py").touch()
    gossamer("launch", "--workers", "0", "train.py").refused("--workers", "0")
    gossamer("launch", "--restarts", "many", "train.py").refused("--restarts", "many")
    gossamer("launch", "--wokers", "2", "train.py").refused("unknown option --wokers: did you mean --workers?")
    gossamer("launch").refused("SCRIPT")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    gossamer("launch", "train.py").refused("another launcher has started this process")


def test_the_address_of_the_launchers_store_is_checked(monkeypatch):
    monkeypatch.setenv("GOSSAMER_STORE", "somewhere")
