"""An experiment of a paper, from its file: the settings of its runs, and the figures that the paper reports.

A file is TOML::

    title = "…"                        # what is compared
    paper = "…"                        # who published it, and where
    claim = "…"                        # what the paper says, in one line
    note = "…"                         # how ours differs, in one line
    measures = ["accuracy"]            # columns of the table (``measures``)
    seeds = 3

    [settings]                         # of all runs, as in a configuration file
    task = "cifar10"

    [full]                             # of the full size only; [reduced] likewise
    epochs = 300

    [[axes]]                           # the runs are the product of all axes
    name = "workers"
    values = [4, 16, 64]               # of the setting of this name
    reduced = [4, 16]                  # at the reduced size, if not the same

    [[axes]]
    name = "method"
    values = ["gossip", { label = "gossip, rate 2", method = "gossip", rate = 2 }]

    [[leave_out]]                      # combinations that are not run
    method = "allreduce"
    topology = ["ring", "exponential"]

    [[published]]                      # the paper's figures: labels on axes, and measures
    workers = 64
    method = "gossip"
    accuracy = 91.9

    [picture]                          # x: an axis or "time"; y: a measure
    x = "workers"
    y = "accuracy"

With a table ``[clusters]`` nothing is trained: the planner predicts the step time of each combination. The axis
``cluster`` names one of the clusters, each with the content of a cluster file.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from gossamer.errors import InputError, unknown
from gossamer.reproduce.measures import MEASURES

FULL, REDUCED = "full", "reduced"
SIZES = (FULL, REDUCED)

FIELDS = ("title", "paper", "claim", "note", "measures", "seeds", "settings", "full", "reduced", "axes")
OPTIONAL_FIELDS = ("leave_out", "published", "picture", "clusters")


@dataclass(frozen=True)
class Value:
    """One value on an axis."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Axis:
    name: str
    values: Mapping[str, tuple[Value, ...]]
    """By size."""


@dataclass(frozen=True)
class Cell:
    """One combination: a row of the table."""

    labels: tuple[str, ...]
    """On each axis."""
    settings: Mapping[str, Any]
    published: Mapping[str, float]
    """What the paper reports, by measure."""

    @property
    def name(self) -> str:
        """The start of the names of its run folders."""
        text = "-".join(self.labels)
        return "".join(character if character.isalnum() or character in ".-" else "_" for character in text)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    name: str
    title: str
    paper: str
    claim: str
    note: str
    measures: tuple[str, ...]
    seeds: int
    settings: Mapping[str, Any]
    sizes: Mapping[str, Mapping[str, Any]]
    """Further settings, by size."""
    axes: tuple[Axis, ...]
    leave_out: tuple[Mapping[str, Any], ...] = ()
    published: tuple[Mapping[str, Any], ...] = ()
    picture: Mapping[str, str] = field(default_factory=dict)
    clusters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """Whether the planner predicts it, instead of training."""
        return bool(self.clusters)

    def size_name(self, size: str) -> str:
        """Return how titles call a size; predictions have none."""
        return "predicted" if self.is_planned else f"{size} size"

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def cells(self, size: str, only: Mapping[str, Sequence[str]] | None = None) -> list[Cell]:
        """Return all combinations of a size; ``only``: those with these labels, by axis."""
        wanted = only or {}
        for name, chosen in wanted.items():
            self._check_labels(size, name, chosen)
        cells = []
        for values in itertools.product(*(axis.values[size] for axis in self.axes)):
            labels = dict(zip(self.axis_names, (value.label for value in values), strict=True))
            if any(_fits(labels, entry) for entry in self.leave_out):
                continue
            if any(labels[name] not in wanted[name] for name in wanted):
                continue
            settings = {**self.settings, **self.sizes[size]}
            for value in values:
                settings |= value.settings
            cells.append(Cell(tuple(labels.values()), settings, self._published(labels)))
        return cells

    def _check_labels(self, size: str, name: str, labels: Sequence[str]) -> None:
        if name not in self.axis_names:
            raise unknown("axis", name, self.axis_names)
        known = [value.label for value in self.axes[self.axis_names.index(name)].values[size]]
        for label in labels:
            if label not in known:
                raise unknown(f"value of {name}", label, known)

    def _published(self, labels: Mapping[str, str]) -> dict[str, float]:
        found: dict[str, float] = {}
        for entry in self.published:
            if _fits(labels, {name: value for name, value in entry.items() if name not in MEASURES}):
                found |= {name: float(value) for name, value in entry.items() if name in MEASURES}
        return found


def _fits(labels: Mapping[str, str], entry: Mapping[str, Any]) -> bool:
    """Return whether a combination has the labels of an entry, each one label or a list of them."""
    return all(
        labels[name] in [str(each) for each in (wanted if isinstance(wanted, list) else [wanted])]
        for name, wanted in entry.items()
    )


def names() -> list[str]:
    """Return the names of all experiments."""
    folder = resources.files("gossamer.reproduce") / "experiments"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def find(name: str) -> Experiment:
    """Return the experiment of this name, or that of the file at this path."""
    if name.endswith(".toml"):
        try:
            return parse(Path(name).stem, tomllib.loads(Path(name).read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"experiment {name} cannot be read: {error.strerror}; give the path of a file") from None
        except ValueError as error:
            raise InputError(f"experiment {name} is not TOML: {error}") from None
    if name not in names():
        raise unknown("experiment", name, (*names(), "path/to/your_experiment.toml"))
    path = resources.files("gossamer.reproduce") / "experiments" / f"{name}.toml"
    return parse(name, tomllib.loads(path.read_text(encoding="utf-8")))


def parse(name: str, document: Mapping[str, Any]) -> Experiment:
    """Return the experiment of a file; ``InputError`` if the file is wrong."""

    def check(is_right: bool, problem: str) -> None:
        if not is_right:
            raise InputError(f"experiment {name}: {problem}")

    def is_table(value: Any, *required: str) -> bool:
        return isinstance(value, dict) and all(key in value for key in required)

    for key in document:
        check(key in FIELDS + OPTIONAL_FIELDS, f"{key} is no field: expected {', '.join(FIELDS + OPTIONAL_FIELDS)}")
    for key in FIELDS:
        check(key in document, f"{key} is missing")
    for key in ("title", "paper", "claim", "note"):
        check(isinstance(document[key], str), f"{key} is not text")
    check(isinstance(document["seeds"], int) and document["seeds"] > 0, "seeds: expected a whole number above 0")
    for key in ("settings", *SIZES):
        check(is_table(document[key]), f"{key} is not a table: write [{key}] above its settings")
    for key in ("axes", "leave_out", "published"):
        entries = document.get(key, [])
        check(isinstance(entries, list) and all(map(is_table, entries)), f"{key}: write [[{key}]] above each")
    for entry in document["axes"]:
        check(is_table(entry, "name", "values"), "an axis needs a name and values")
        for given in (entry["values"], entry.get("reduced", [])):
            is_right = isinstance(given, list) and all(not isinstance(v, dict) or "label" in v for v in given)
            check(is_right, f"axis {entry['name']}: expected a list of values; tables need a label")
    axes = tuple(_axis(entry) for entry in document["axes"])
    axis_names = [axis.name for axis in axes]
    measures = tuple(document["measures"])
    for measure in measures:
        check(measure in MEASURES, f"{measure} is no measure: expected {', '.join(MEASURES)}")
    for entry in document.get("leave_out", ()):
        check(set(entry) <= set(axis_names), f"leave_out has {', '.join(entry)}: expected some of the axes")
    for entry in document.get("published", ()):
        known = {*axis_names, *measures}
        check(set(entry) <= known, f"published has {', '.join(entry)}: expected axes and measures")
    picture = document.get("picture", {})
    if picture:
        check(picture.get("x") in (*axis_names, "time"), "picture.x: expected an axis or time")
        check(picture.get("y") in measures, "picture.y: expected a measure")
    clusters = document.get("clusters", {})
    check(not clusters or "cluster" in axis_names, "has clusters, but no axis cluster")
    return Experiment(
        name=name,
        **{key: document[key] for key in ("title", "paper", "claim", "note", "seeds", "settings")},
        measures=measures,
        sizes={size: document[size] for size in SIZES},
        axes=axes,
        leave_out=tuple(document.get("leave_out", ())),
        published=tuple(document.get("published", ())),
        picture=picture,
        clusters=clusters,
    )


def _axis(entry: Mapping[str, Any]) -> Axis:
    name, values = entry["name"], entry["values"]
    by_size = {FULL: values, REDUCED: entry.get("reduced", values)}
    return Axis(name, {size: tuple(_value(name, value) for value in given) for size, given in by_size.items()})


def _value(axis: str, value: Any) -> Value:
    if isinstance(value, dict):
        return Value(str(value["label"]), {name: each for name, each in value.items() if name != "label"})
    return Value(str(value), {axis: value})
