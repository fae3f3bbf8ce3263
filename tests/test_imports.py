"""Imports go in one direction, and methods use no threads, time, sockets or torch.distributed."""

import ast
from pathlib import Path

import pytest

import gossamer

ROOT = Path(gossamer.__file__).parent

FORBIDDEN = {
    "_thread", "asyncio", "concurrent", "datetime", "ftplib", "http", "mmap", "multiprocessing", "queue", "sched",
    "select", "selectors", "signal", "socket", "socketserver", "ssl", "subprocess", "threading", "time",
    "torch.distributed", "torch.multiprocessing", "urllib", "xmlrpc",
}  # fmt: skip

# Who may import whom: only from the same layer or one below.
LAYERS = (
    {"errors", "settings", "seeds", "vectors", "effects", "worker", "hardware", "replica_time", "results"}
    | {"topology", "compress", "optim", "recording", "schedules", "user_file", "wire"},
    {"methods", "tasks"},
    {"virtual", "process", "config"},
    {"launch", "plan", "report", "reproduce", "runs", "train", "api", "integrations", "testing"},
    {"cli", "__main__", ""},
)
LAYER = {name: depth for depth, names in enumerate(LAYERS) for name in names}


def modules():
    """Every module of the package by its dotted name."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name):
    """The dotted names that a module imports or reaches through ``torch``, wherever in the file."""
    found = set()
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and str(node.value).startswith("gossamer."):
            # A table of modules, or of names in modules, that are loaded when they are needed.
            found |= {str(node.value), str(node.value).rpartition(".")[0]}
    return found


def reached_from(start):
    """The modules of ours that are imported from ``start``, directly or through others of ours."""
    reached, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name in reached or name == "gossamer":
            continue
        reached.add(name)
        todo += [found for found in imports(name) if found in MODULES]
    return reached


def forbidden_in(name):
    return {
        found
        for found in imports(name)
        if any(found == banned or found.startswith(banned + ".") for banned in FORBIDDEN)
    }


METHODS = sorted(name for name in MODULES if name.startswith("gossamer.methods"))


@pytest.mark.parametrize("name", METHODS)
def test_methods_know_nothing_of_threads_time_sockets_and_torch_distributed(name):
    reached = reached_from(name)
    guilty = {module: forbidden_in(module) for module in reached if forbidden_in(module)}
    assert not guilty


def test_the_rule_sees_through_indirect_imports():
    assert len(METHODS) >= 9
    reached = reached_from("gossamer.methods.divisible")
    assert {"gossamer.compress.topk", "gossamer.effects", "gossamer.topology.spectra"} <= reached
    # The rule finds such an import where it is allowed.
    assert "time" in forbidden_in("gossamer.virtual.simulation")


def test_topologies_do_without_torch():
    for name in MODULES:
        if name.startswith("gossamer.topology"):
            assert not {found for found in imports(name) if found.split(".")[0] == "torch"}, name


def package_of(name):
    """``methods`` of ``gossamer.methods.gossip``; empty for the package itself."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_one_way(name):
    own = package_of(name)
    assert own in LAYER, f"add {own} to a layer"
    if own == "":
        return
    for found in imports(name):
        if found.split(".")[0] == "gossamer" and found in MODULES and package_of(found):
            assert LAYER[package_of(found)] <= LAYER[own], f"{name} imports {found}"


def test_methods_and_tasks_and_worlds_do_not_know_each_other():
    for name in MODULES:
        others = {package_of(found) for found in imports(name) if found in MODULES}
        own = package_of(name)
        if own == "methods":
            assert "tasks" not in others, name
        if own == "tasks":
            assert "methods" not in others, name
        if own == "process":
            assert "virtual" not in others, name
        if own == "virtual":
            assert "process" not in others, name
