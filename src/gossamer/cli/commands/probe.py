"""Measure this cluster with real workers, and write what was found into a cluster file."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.options import add_run_options, given
from gossamer.cli.output import counted, print_json, print_note, print_table, size
from gossamer.errors import InputError
from gossamer.plan import cluster_file, local
from gossamer.plan.machines import Machines
from gossamer.plan.probe.findings import Findings
from gossamer.plan.probe.prober import probe
from gossamer.plan.probe.session import LostWorker, ProbeSession
from gossamer.plan.recommend import milliseconds
from gossamer.process.store.rank_info import RankInfo, started_rank_info
from gossamer.seeds import stream
from gossamer.train.job_spec import DEFAULT_WORKERS, SIMULATED, JobSpec, real_settings
from gossamer.train.pace import Pace
from gossamer.train.worker_task import WorkerTask

SECONDS = 60.0
OUT = "cluster.toml"

LOST = 1
"""The exit code of a probe that came only half-way."""

DIFFERING = {
    "workers": ("how many workers; under torchrun as many as it started", str(DEFAULT_WORKERS)),
    "compute": ("least time of one gradient, as for gossamer train", "what it takes"),
}
UNUSED = ("method", "topology", "steps", "epochs", "schedule", "lr_warmup", "eval_every", "nodes")


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser, hardware="hardware", hidden=(*SIMULATED, *UNUSED), differing=DIFFERING)
    parser.add_argument("--out", metavar="FILE", default=OUT, help=f"the cluster file to write (default: {OUT})")
    parser.add_argument(
        "--seconds", metavar="X", default=str(SECONDS), help=f"how long it may take, about (default: {SECONDS:g})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    out = Path(parsed.out)
    if not parsed.out or not out.parent.is_dir():
        raise InputError(f"--out is {parsed.out!r}: expected a file in a folder that is there")
    seconds = _seconds(parsed.seconds)
    values = {"method": "allreduce", **given(parsed)}
    rank_info = started_rank_info()
    (settings,) = real_settings(values, None if rank_info is None else rank_info.workers)
    job_spec = JobSpec(settings)
    if rank_info is None:
        # What is wrong with the settings has been said before any process is started.
        return local.launch(["probe", *arguments[1:]], int(settings["workers"]))
    return measure(job_spec, rank_info, out, seconds, parsed.json)


def measure(job_spec: JobSpec, rank_info: RankInfo, out: Path, seconds: float, as_json: bool) -> int:
    """This worker's part; the first worker that is still there at the end writes the file and says so."""
    began = time.monotonic()
    run = job_spec.run()
    job = WorkerTask(run, rank_info.rank)
    rng = stream(run.config.seed, "compute", rank_info.rank)
    pace = Pace(job_spec.compute(rank_info.workers), job_spec.waits, rank_info.rank, rng, threading.Event())
    try:
        session = ProbeSession(rank_info)
    except LostWorker as lost:
        print(f"gossamer: {lost} did not come: nothing was measured", file=sys.stderr)
        return LOST

    def say(what: str) -> None:
        if rank_info.rank == 0 and not as_json:
            print(f"probe: {time.monotonic() - began:.0f} s  {what}", file=sys.stderr, flush=True)

    findings = probe(session, job, pace.keep, seconds, say)
    reports = rank_info.rank == session.here[0]
    code = _report(findings, out, as_json, time.monotonic() - began) if reports else LOST * bool(findings.lost)
    # Whoever hosts the store stays until the others have let go of it.
    if not findings.lost:
        session.tell("done", True)
    session.close()
    return code


def _report(findings: Findings, out: Path, as_json: bool, took_s: float) -> int:
    if findings.lost:
        partial = out.with_suffix(f".partial{out.suffix}")
        if findings.compute is not None:
            cluster_file.write(findings.machines(), partial)
        kept = f"{findings.words} {'is' if findings.compute is None else 'are'} in {partial}"
        kept = kept if findings.compute is not None else "nothing had been measured"
        print(f"gossamer: {findings.lost}: {kept}", file=sys.stderr)
        return LOST
    machines = findings.machines()
    cluster_file.write(machines, out)
    if as_json:
        print_json({**cluster_file.document(machines), "out": str(out), "seconds": took_s})
        return 0
    _show(machines)
    print(f"\nwritten to {out} after {took_s:.0f} s; next: gossamer plan --cluster {out} --task …")
    return 0


def _show(machines: Machines) -> None:
    compute, costs = machines.compute, machines.costs
    sample = sorted(compute.sample_s)
    low, high = sample[len(sample) // 20], sample[-1 - len(sample) // 20]
    slow = [f"worker {rank}: {factor:.2g}×" for rank, factor in enumerate(compute.factors) if factor > 1.05]
    rows = [
        ["step alone", milliseconds(compute.mean_s), f"nine in ten from {milliseconds(low)} to {milliseconds(high)}"],
        ["backward", milliseconds(compute.backward_s), "of it"],
        ["slow workers", ", ".join(slow) or "none", "against the typical one"],
        ["slow together", f"{compute.correlation:.2f}", "0: each at its own time, 1: all at once"],
    ]
    for name, link in (("inside a node", machines.inside), ("between nodes", machines.between)):
        if link.latency_s:
            speed = f"{8 * link.bytes_per_s / 1e6:.4g} Mbit/s"
            rows.append([name, speed, f"a pair alone, {1e3 * link.latency_s:.3g} ms for 4 kB"])
    rows += [
        [f"mean of {table.shape.members}", milliseconds(table.seconds[-1]),
         f"{size(table.sizes_bytes[-1])}, {counted(table.shape.at_once, 'group')} at once on a node"]
        for table in machines.tables if table.kind == "mean"
    ]  # fmt: skip
    rows.append(["slow-down", f"{costs.slowdown:.2f}×", "of compute while messages are under way"])
    title = (
        f"{counted(machines.nodes, 'node')} of {counted(machines.per_node, 'worker')}, {machines.parameters} parameters"
    )
    print_table(title, ["", "measured", "meaning"], rows)
    if machines.memory_bytes:
        print_note(f"{size(machines.memory_bytes)} of memory are left for each worker.")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 1 <= seconds <= 3600:
        raise InputError(f"--seconds is {text!r}: expected a number from 1 to 3600")
    return seconds
