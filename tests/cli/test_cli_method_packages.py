"""Methods of installed packages: found by entry points, loaded when they are used, harmless when they are broken."""

import subprocess
import sys

import pytest
from method_files import BLEND, HEAD, PAIRS, method_class


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install packages into a folder of their own: each a module and its entry points."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def install_package(package, source, **entry_points):
        (folder / f"{package}.py").write_text(source)
        about = folder / f"{package}-1.2.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {package}:{attribute}" for name, attribute in entry_points.items()]
        (about / "entry_points.txt").write_text("\n".join(["[gossamer.methods]", *lines, ""]))
        return folder

    yield install_package
    for module in [name for name in sys.modules if name.startswith("installed_")]:
        del sys.modules[module]


def test_a_method_of_a_package_is_listed_and_runs(gossamer, quick, install):
    install("installed_blend", BLEND.replace('"blend"', '"packed_blend"'), packed_blend="Blend")
    rows = {row["method"]: row for row in gossamer("methods", "--json").document["methods"]}
    assert rows["packed_blend"]["from"] == "installed_blend 1.2"
    assert rows["gossip"]["from"] == "gossamer"
    assert rows["packed_blend"]["options"] == {"strength": 1.0, "offset": 0}
    line = next(line for line in gossamer("methods").out.splitlines() if line.startswith("packed_blend"))
    assert " ".join(line.split()) == "packed_blend yes installed_blend 1.2 part of the way to the mean"
    assert "from installed_blend 1.2" in gossamer("methods", "packed_blend").out
    ran = gossamer(*quick, "--method", "packed_blend,gossip", "--strength", "0.5", "--out", "out", "--json")
    assert [run["method"] for run in ran.document["results"]] == ["packed_blend", "gossip"]
    assert gossamer("simulate", "--config", "out/packed_blend/config.toml", "--json").code == 0
    gossamer(*quick, "--method", "paked_blend").refused("unknown method 'paked_blend'", "'packed_blend'?")


@pytest.mark.parametrize(
    ("source", "entry_point", "words"),
    [
        ("import no_such_module\n", "Blend", ("ModuleNotFoundError: No module named 'no_such_module'", "uninstall")),
        ("raise SystemExit(3)\n", "Blend", ("cannot be loaded", "SystemExit")),
        (HEAD, "Blend", ("cannot be loaded", "AttributeError", "Blend")),
        (HEAD, "Mean", ("installed_broken:Mean of installed_broken 1.2 is the class Mean", "gossamer.Method")),
        (HEAD + method_class(body="    summary = ''\n"), "Mine", ("method Mine has no name",)),
        (BLEND, "Blend", ("offers a method as broken", "is called blend")),
    ],
)
def test_a_broken_package_is_one_line_and_leaves_the_rest_alone(gossamer, quick, install, source, entry_point, words):
    install("installed_broken", source, broken=entry_point)
    listed = gossamer("methods")
    assert (listed.code, listed.err) == (0, "")
    assert "\ngossip " in listed.out
    assert "note: " in listed.out
    problem = gossamer("methods", "--json").document["broken"]["broken"]
    for word in words:
        assert word in problem
    gossamer(*quick, "--method", "broken").refused(*words)
    assert gossamer(*quick, "--method", "gossip").code == 0
    assert gossamer("simulate", "--help").code == 0


def test_names_that_are_taken_are_refused(gossamer, quick, install):
    install("installed_gossip", PAIRS.replace('"pairs"', '"gossip"'), gossip="Pairs", twice="Pairs")
    install("installed_twin", PAIRS.replace('"pairs"', '"twice"'), twice="Pairs")
    listed = gossamer("methods", "--json").document
    assert [row["from"] for row in listed["methods"] if row["method"] == "gossip"] == ["gossamer"]
    assert listed["broken"]["gossip"] == (
        "method gossip of installed_gossip 1.2 has the name of a built-in method, which is used instead of it"
    )
    assert "the baseline that A²CiD² accelerates" in gossamer("methods", "gossip").out
    gossamer(*quick, "--method", "twice").refused("offered by installed_gossip 1.2 and installed_twin 1.2")


def test_packages_are_loaded_only_when_they_are_used(install):
    folder = install("installed_loud", "print('loaded')\n" + BLEND.replace('"blend"', '"loud"'), loud="Blend")
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); from gossamer.cli import main; main(sys.argv[1:])"

    def printed(*arguments):
        done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout

    assert "loaded" not in printed("simulate", "--method", "gossip", "--help")
    assert "loaded" not in printed("methods", "gossip")
    assert "loaded" in printed("simulate", "--method", "loud", "--help")
