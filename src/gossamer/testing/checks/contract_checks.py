"""Checks of the contract (``gossamer.effects``), which no method may give up."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from gossamer.errors import InputError
from gossamer.methods import Method
from gossamer.methods.loading.method_contract import PARTS, check_declaration
from gossamer.testing.checks.context import Context
from gossamer.testing.violations import Broken
from gossamer.testing.worlds.virtual_runs import UNEVEN, make_cluster, models
from gossamer.topology import Topology


def declaration(context: Context) -> None:
    """The method declares its name, its summary, what its generators yield, and what it gives up."""
    from gossamer.testing.checks.table import INVARIANTS

    try:
        context.subject.check_class()
        method = context.method
        check_declaration(method)
    except InputError as error:
        raise Broken("declaration", str(error)) from error
    if not method.summary.strip() or "\n" in method.summary:
        raise Broken("declaration", f"its summary is {method.summary!r}: expected one line")
    for name in method.gives_up:
        if name not in INVARIANTS:
            raise Broken("declaration", f"gives_up names {name!r}: expected some of {', '.join(INVARIANTS)}")
    if not isinstance(method.shared, tuple) or not all(isinstance(name, str) for name in method.shared):
        raise Broken("declaration", f"shared is {method.shared!r}: expected a tuple of names")
    if all(getattr(method, part) is None for part in PARTS):
        raise Broken("declaration", "it has neither step nor background nor finish: workers never communicate")


def effects(context: Context) -> None:
    """Each generator yields effects that it declares, and Update at most once per step."""
    _find("effects", context)


def collectives(context: Context) -> None:
    """Workers agree on kind, topic, round and group of their collectives, rounds ascend, and nobody waits endlessly."""
    _find("collectives", context)


def in_flight(context: Context) -> None:
    """A vector that is sent does not change until the answer has come; a mean is not written to, nor used too late."""
    _find("in_flight", context)


def _find(rule: str, context: Context) -> None:
    if rule in context.broken_in_any_order:
        raise Broken(rule, context.broken_in_any_order[rule])


def state(context: Context) -> None:
    """All state is in the workers: the method's own attributes do not change, and runs do not disturb each other."""
    for seed in context.seeds[:3]:
        world, where = context.world(seed)
        before = describe_state(world.method)
        world.run()
        world.finish()
        for name, value in describe_state(world.method).items():
            if name not in before:
                raise Broken("state", f"a run set the method's attribute {name} ({where}); {KEEP_IT}")
            if before[name] != value:
                raise Broken("state", f"a run changed the method's attribute {name} ({where}); {KEEP_IT}")
    if not context.repeatable:
        return  # ``seed`` says so
    expected = [_run(context, seed, context.subject.build(*context.ring)) for seed in (1, 2)]
    method = context.subject.build(*context.ring)
    runs = [_Interleaved(context, seed, method) for seed in (1, 2)]
    for time in range(1, context.steps + 1):
        for run in runs:
            run.advance(time)
    for run, alone in zip(runs, expected, strict=True):
        if not torch.equal(run.end(), alone):
            raise Broken("state", f"a run is another one beside a second run with the same method; {KEEP_IT}")


KEEP_IT = "keep what belongs to a worker in worker.vector(name), worker.scalars and worker.tickets"


class _Interleaved:
    def __init__(self, context: Context, seed: int, method: Method) -> None:
        self.cluster = make_cluster(context.subject, *context.ring, method=method, seed=seed, **UNEVEN)

    def advance(self, time: float) -> None:
        self.cluster.run_until(float(time))

    def end(self) -> torch.Tensor:
        self.cluster.finish()
        return models(self.cluster)


def _run(context: Context, seed: int, method: Method) -> torch.Tensor:
    run = _Interleaved(context, seed, method)
    for time in range(1, context.steps + 1):
        run.advance(time)
    return run.end()


def seed(context: Context) -> None:
    """The same seed gives the same run: random choices come from worker.rng, or from worker.seed if all share them."""
    if not context.repeatable:
        raise Broken(
            "seed", "two runs with one seed differ: draw from worker.rng or worker.seed; keep no state elsewhere"
        )


# What a method holds


def describe_state(method: Method) -> dict[str, Any]:
    """Return the attributes of a method and of its classes, in a form that can be compared later."""
    found = {name: _frozen(value) for name, value in vars(method).items()}
    for owner in type(method).__mro__:
        if issubclass(owner, Method) and owner is not Method:
            found |= {
                f"{owner.__name__}.{name}": _frozen(value)
                for name, value in vars(owner).items()
                if not name.startswith("__")
            }
    return found


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return a copy of a value; of what cannot be copied sensibly, its identity."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, np.ndarray):
        return ("array", value.tolist())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, dict):
        return {repr(key): _frozen(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_frozen(item, depth + 1) for item in value]
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, Topology) or callable(value) or depth > 4:
        return id(value)
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return {name: _frozen(item, depth + 1) for name, item in vars(value).items()}
    return id(value)
