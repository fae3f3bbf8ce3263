"""The wheel contains the whole package, and works in an environment where only it is installed."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from gossamer import __version__

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "gossamer"


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the source distribution and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=200)
    return folder


@pytest.fixture(scope="module")
def wheel(dist):
    return dist / f"gossamer-{__version__}-py3-none-any.whl"


def test_the_wheel_contains_every_file_of_the_package(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"gossamer/py.typed", "gossamer/tasks/data/digits.npz", "gossamer/report/assets/page.html"} <= sources
    assert sources <= packed
    metadata = f"gossamer-{__version__}.dist-info/"
    assert all(name in sources or name.startswith(metadata) for name in packed)
    assert metadata + "licenses/LICENSE" in packed


def test_the_source_distribution_contains_the_tests_and_the_changelog(dist):
    with tarfile.open(dist / f"gossamer-{__version__}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "tests/test_packaging.py"} <= names


def test_the_wheel_works_in_an_empty_environment(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    # The dependencies come from the environment of this test. Its .pth files, and so its gossamer, have no effect.
    site_packages = next((environment / "lib").glob("python*/site-packages"))
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(*command):
        alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, cwd=tmp_path, env=alone, check=True, capture_output=True, text=True, timeout=200)
        assert done.stderr == ""
        return done.stdout

    imported = run(python, "-c", "import gossamer; print(gossamer.__file__)").strip()
    assert Path(imported) == site_packages / "gossamer" / "__init__.py"
    assert run(environment / "bin" / "gossamer", "--version") == f"gossamer {__version__}\n"
    assert "a2cid2" in run(environment / "bin" / "gossamer", "methods")
    simulated = run(environment / "bin" / "gossamer", "simulate", "--workers", "2", "--steps", "2", "--json")
    assert '"accuracy"' in simulated


def test_the_workflow_covers_what_the_package_claims():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["test"]["strategy"]["matrix"]
    prefix = "Programming Language :: Python :: 3."
    versions = [name.removeprefix(prefix) for name in project["classifiers"] if name.startswith(prefix)]
    assert matrix["python"] == [f"3.{minor}" for minor in versions]
    (minimum,) = (name.removeprefix("torch>=") for name in project["dependencies"] if name.startswith("torch>="))
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert matrix["torch"] == [f"{minimum}.0", pinned]


def test_the_changelog_has_this_version():
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
