"""Accuracy and loss of the methods over grids of settings, on virtual workers. Several runs at a time, resumable.

    python benchmarks/sweep.py by-class --task digits --out by_class_digits.jsonl
    python benchmarks/sweep.py by-class --task cifar10 --data DIR --device cuda --jobs 12 --out by_class_cifar10.jsonl
    python benchmarks/sweep.py outer --data input.txt --device cuda --jobs 6 --out outer.jsonl
    python benchmarks/sweep.py wire --task cifar10 --data DIR --device cuda --out wire.jsonl
    python benchmarks/sweep.py by-class --task digits --out by_class_digits.jsonl --table

Every run is one line of JSON in the file, written when it ends. Runs that are there already are skipped, so a sweep may
take several goes; ``--seconds`` ends it early. ``--table`` prints the markdown tables of what is there. Each of the
``--jobs`` processes reads the data once and does one run after the other.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tables import table

Settings = dict[str, Any]

PARTITIONS = ("by-class", "iid", "dirichlet:0.1")
ON_GRAPHS = ("gossip", "a2cid2", "overlap", "noloco")
"""Methods that communicate along the topology."""
AMONG_ALL = ("allreduce", "divisible", "localsgd", "lasgd", "diloco", "sgp")
QUASI_GLOBAL = ("gossip", "a2cid2", "overlap", "lasgd", "localsgd", "sgp")
PERIODS = (50, 20, 5)
SEEDS = (0, 1, 2)

CIFAR10 = {"task": "cifar10", "model": "conv", "batch": 32, "steps": 800, "lr": 0.05, "schedule": "cosine"}

NOT_A_SETTING = ("data", "device", "eval_every")
"""Settings that do not change what a run ends with."""


def by_class(options: argparse.Namespace) -> Iterator[Settings]:
    """Data that differs between workers: ring and exponential graph of 16, with and without quasi-global momentum.

    The most telling runs come first: the ring by class.
    """
    base: Settings = {"task": "digits"} if options.task == "digits" else {**CIFAR10, "weight_decay": 0.0}
    if options.lr:
        base["lr"] = options.lr
    on_ring = [*((method, "ring") for method in ON_GRAPHS), *((method, "") for method in AMONG_ALL)]
    on_exponential = [(method, "exponential") for method in ON_GRAPHS]
    for methods, partition, seed in itertools.product((on_ring, on_exponential), PARTITIONS, SEEDS):
        common = {**base, "workers": 16, "partition": partition, "seed": seed}
        for method, topology in methods:
            settings = {**_adam_lr(common, method), **({"topology": topology} if topology else {}), "method": method}
            yield settings
            if method in QUASI_GLOBAL:
                yield {**settings, "quasi_global": 0.9}


def _adam_lr(common: Settings, method: str) -> Settings:
    """``divisible`` is a form of Adam: it takes the task's learning rate for Adam."""
    return {key: value for key, value in common.items() if key != "lr"} if method == "divisible" else common


def outer(options: argparse.Namespace) -> Iterator[Settings]:
    """Outer optimizers: a transformer on characters, 8 workers, AdamW, with and without a straggler."""
    base = {"task": "shakespeare", "workers": 8, "optimizer": "adamw", "lr": 1e-3}
    for steps, seed, straggler in itertools.product((600, 2400, 9600), SEEDS, ("", "7:3")):
        if (steps > 600 and seed) or (straggler and (seed or steps > 600)):
            continue
        common = {**base, "steps": steps, "seed": seed, "schedule": "cosine"}
        if straggler:
            common["straggler"] = straggler
        for period in PERIODS:
            every = {**common, "period": period}
            yield {**every, "method": "localsgd"}
            for momentum in (0.9, 0.5):
                yield {**every, "method": "diloco", "outer_lr": 0.7, "outer_momentum": momentum}
            streaming = {"fragments": 4, "delay": min(5, period // 4)}
            yield {**every, "method": "diloco", "outer_lr": 0.7, "outer_momentum": 0.5, **streaming}
            yield {**every, "method": "noloco", "topology": "complete"}
        yield {**common, "method": "allreduce"}


def wire(options: argparse.Namespace) -> Iterator[Settings]:
    """Models rounded on the wire: ring of 16.

    On the ideal clock messages take no time, so rounding is all that differs. On the hardware clock shorter messages
    also arrive earlier.
    """
    base: Settings = {"task": "digits"} if options.task == "digits" else CIFAR10
    for method, clock, seed in itertools.product(("a2cid2", "lasgd"), ("ideal", ""), SEEDS):
        for codec in ("int8", "bfloat16", "float32"):
            settings = {**base, "workers": 16, "method": method, "wire": codec, "seed": seed}
            yield {**settings, **({"clock": clock} if clock else {})}


GRIDS: dict[str, Callable[[argparse.Namespace], Iterator[Settings]]] = {
    "by-class": by_class,
    "outer": outer,
    "wire": wire,
}


@cache
def task_with_data(name: str, model: str, data: str) -> Any:
    """Return a task that reads its data from files; it is the same for all seeds and numbers of workers."""
    from gossamer import tasks

    return tasks.build(name, workers=1, seed=0, config=tasks.TaskConfig(model=model, data=data))


def run(settings: Settings) -> Settings:
    """Simulate one run; return its settings and results, or why it failed."""
    import torch

    import gossamer

    torch.set_num_threads(1)
    began = time.perf_counter()
    kept = {key: value for key, value in settings.items() if key not in NOT_A_SETTING}
    given = dict(settings)
    try:
        if given.get("data"):
            given["task"] = task_with_data(given["task"], given.pop("model", ""), given.pop("data"))
        result = gossamer.simulate(**given)
    except Exception as error:  # of whatever kind: the other runs go on
        reason = str(error).partition("\n")[0]
        return {"settings": kept, "error": f"{type(error).__name__}: {reason}"}
    final = result.final
    outcome = {
        "settings": kept,
        "accuracy": final.accuracy,
        "worst": final.worker_accuracy.min,
        "loss": final.loss,
        "consensus": final.consensus,
        "bytes_sent": final.bytes_sent,
        "time": final.time,
        "diverged": result.diverged is not None,
        "wall_s": time.perf_counter() - began,
    }
    del result
    # A cluster refers to itself: without this, its memory on the GPU would be freed some runs later.
    gc.collect()
    return outcome


def sweep(todo: list[Settings], path: Path, jobs: int, seconds: float) -> None:
    began = time.monotonic()
    until = began + seconds
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(todo))) as pool, path.open("a") as file:
        results = pool.imap_unordered(run, todo)
        for number in range(1, len(todo) + 1):
            try:
                result = results.next(timeout=max(0.1, until - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"time is up: {number - 1} of {len(todo)} runs done; run again for the rest", flush=True)
                pool.terminate()
                return
            if "error" in result:
                print(f"failed: {result['error']} in {json.dumps(result['settings'])}", flush=True)
                continue
            file.write(json.dumps(result) + "\n")
            file.flush()
            if number <= jobs or number % 10 == 0 or number == len(todo):
                spent = time.monotonic() - began
                last = f"the last took {result['wall_s']:.1f} s"
                print(f"{number} of {len(todo)} runs in {spent:.0f} s, {last}", flush=True)


def key_of(settings: Settings) -> str:
    return json.dumps({name: settings[name] for name in sorted(settings) if name not in NOT_A_SETTING})


def read(path: Path) -> dict[str, Settings]:
    lines = path.read_text().splitlines() if path.exists() else []
    return {key_of(result["settings"]): result for result in map(json.loads, lines)}


def print_tables(grid: list[Settings], done: dict[str, Settings]) -> None:
    """Print one row per combination of settings, with the mean over seeds and the range."""
    rows: dict[str, list[Settings]] = {}
    for settings in grid:
        result = done.get(key_of(settings))
        if result is not None and "error" not in result:
            rows.setdefault(key_of({k: v for k, v in settings.items() if k != "seed"}), []).append(result)
    if not rows:
        print("no run is done")
        return
    names = sorted(_varied(grid))
    lines = []
    for key, results in rows.items():
        settings = json.loads(key)
        line = {name: str(settings.get(name, "")) for name in names}
        line["averaged model, %"] = _percent([result["accuracy"] for result in results])
        line["worst worker, %"] = _percent([result["worst"] for result in results])
        line |= {what: _number([result[what] for result in results]) for what in ("loss", "consensus")}
        line["sent, MB"] = f"{statistics.mean(result['bytes_sent'] for result in results) / 1e6:,.0f}"
        line["time"] = f"{statistics.mean(result['time'] for result in results):.4g}"
        lines.append({**line, "seeds": len(results)})
    print(table(lines))


def _varied(grid: list[Settings]) -> set[str]:
    names = {name for settings in grid for name in settings} - {"seed"}
    return {name for name in names if len({json.dumps(settings.get(name)) for settings in grid}) > 1}


def _percent(values: list[float | None]) -> str:
    return _range([100 * value for value in values if value is not None], ".1f")


def _number(values: list[float | None]) -> str:
    return _range([value for value in values if value is not None], ".3f")


def _range(values: list[float], form: str) -> str:
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ({format(min(values), form)}–{format(max(values), form)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grid", choices=GRIDS)
    parser.add_argument("--task", default="digits", choices=("digits", "cifar10"), help="for by-class and wire")
    parser.add_argument("--data", default="", help="the data of cifar10 or shakespeare")
    parser.add_argument("--lr", type=float, help="another learning rate than the grid's, for by-class")
    parser.add_argument("--steps", type=int, help="another number of steps than the grid's, to try it out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end after this time")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    parser.add_argument("--only", default="", help="only runs whose settings match this regular expression")
    parser.add_argument("--table", action="store_true", help="print the tables of the runs that are there")
    options = parser.parse_args()
    grid = [settings for settings in GRIDS[options.grid](options) if re.search(options.only, json.dumps(settings))]
    if options.steps:
        grid = [{**settings, "steps": options.steps} for settings in grid]
    if not grid:
        parser.error(f"no run's settings match --only {options.only}")
    done = read(options.out)
    if options.table:
        print_tables(grid, done)
        return
    # Evaluated at the start and at the end only: runs differ in nothing else, and take less time.
    extra = {"device": options.device, "eval_every": 10**6, **({"data": options.data} if options.data else {})}
    todo = [{**settings, **extra} for settings in grid if key_of(settings) not in done]
    print(f"{len(todo)} of {len(grid)} runs to do", flush=True)
    if not todo:
        return
    sweep(todo, options.out, options.jobs, options.seconds)


if __name__ == "__main__":
    main()
