"""What ``gossamer`` exports, and nothing else."""

import ast
from importlib import resources
from pathlib import Path

import pytest

import gossamer

PUBLIC = {
    "AccumAdam",
    "AccumAdamW",
    "Compressor",
    "Event",
    "EventKind",
    "InputError",
    "Method",
    "MethodConfig",
    "Point",
    "Replica",
    "SimulationResult",
    "Spread",
    "Swarm",
    "Task",
    "TlsFiles",
    "Topology",
    "Worker",
    "WorkerPoint",
    "__version__",
    "compress",
    "effects",
    "join",
    "load_mean",
    "simulate",
    "testing",
}


def test_the_public_names():
    assert set(gossamer.__all__) == set(dir(gossamer)) == PUBLIC
    for name in PUBLIC:
        assert getattr(gossamer, name) is not None, name


def test_other_names_do_not_exist():
    with pytest.raises(AttributeError, match="module 'gossamer' has no attribute 'jion'"):
        gossamer.jion  # noqa: B018


def test_type_checkers_see_every_public_name():
    tree = ast.parse(Path(gossamer.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    imported = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported | {"__version__"} == PUBLIC
    assert (resources.files(gossamer) / "py.typed").is_file()
