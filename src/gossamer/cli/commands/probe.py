"""Measure this cluster with real workers, and write what was found into a cluster file."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gossamer.cli.options import given, parse_number
from gossamer.cli.output import print_json, print_note, print_table
from gossamer.errors import InputError
from gossamer.hardware import Link
from gossamer.plan import cluster_file
from gossamer.plan.cluster_spec import ClusterSpec
from gossamer.plan.probe.findings import Findings
from gossamer.plan.probe.prober import probe
from gossamer.plan.probe.session import ProbeSession, WorkerLost
from gossamer.plan.recommend import BASELINE, milliseconds
from gossamer.process.store.rank_info import RankInfo, started_rank_info
from gossamer.report.formats import counted, size
from gossamer.train.job_spec import JobSpec, real_settings
from gossamer.train.launcher import LocalStore, LocalWorkers, warm_up
from gossamer.train.worker_task import WorkerTask

LOST = 1
"""The exit code of a probe that lost a worker."""

AFTER_LOSS_S = 30.0
"""How long the others may go on when one worker has failed: they notice by themselves and report it."""


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    out = Path(parsed.out)
    if not parsed.out or not out.parent.is_dir():
        raise InputError(f"--out is {parsed.out!r}: expected a file in a folder that is there")
    seconds = parse_number(parsed.seconds, "--seconds", float, 1, 3600)
    values = {"method": BASELINE, **given(parsed)}
    rank_info = started_rank_info()
    if rank_info is not None:
        values = of_replicas(values, rank_info.workers)
    settings, *_ = real_settings(values, None if rank_info is None or "replica_size" in values else rank_info.workers)
    if rank_info is None:
        warm_up()
        return probe_locally(JobSpec(settings), out, seconds, parsed.json)
    return measure(JobSpec(settings).to_json(), str(out), seconds, parsed.json, rank_info)


def probe_locally(job_spec: JobSpec, out: Path, seconds: float, as_json: bool, logs: Path | None = None) -> int:
    """Probe with workers started on this machine; return the exit code. ``logs``: where their output goes."""
    target = partial(measure, job_spec.to_json(), str(out), seconds, as_json)
    store = LocalStore()
    ranks = int(job_spec.values["workers"]) * int(job_spec.values["replica_size"])
    with LocalWorkers(target, store.rank_infos(ranks, "probe"), logs) as workers:
        return workers.wait(AFTER_LOSS_S)


def of_replicas(values: dict[str, Any], num_started: int) -> dict[str, Any]:
    """Return the settings with the number of replicas that a launcher has started; as they are without replicas."""
    if "replica_size" not in values:
        return values
    size = parse_number(str(values["replica_size"]), "--replica-size", int, 1)
    if num_started % size:
        raise InputError(f"--replica-size is {size}, but {num_started} processes were started: expected a divisor")
    workers = num_started // size
    if str(values.get("workers", workers)) != str(workers):
        raise InputError(
            f"--workers is {values['workers']}, but {num_started} processes were started, {workers} replicas of "
            f"{size}: leave it out"
        )
    return {**values, "workers": workers}


def measure(job: str, out: str, seconds: float, as_json: bool, rank_info: RankInfo) -> int:
    """Measure as one of the workers, or as a rank of a replica; ``job``: a job spec as JSON.

    The first process alive at the end writes the file.
    """
    began = time.monotonic()
    job_spec = JobSpec.from_json(job)
    run = job_spec.run()
    size = run.config.replica_size
    pace = job_spec.pace(run, rank_info.rank // size, threading.Event(), rank_info.rank % size)
    # Alone, a rank computes what it does in a replica, without the others.
    task = WorkerTask(run, rank_info.rank // size)
    try:
        session = ProbeSession(rank_info)
    except WorkerLost as lost:
        print(f"gossamer: {lost} did not start: nothing was measured", file=sys.stderr)
        return LOST

    def progress(what: str) -> None:
        if rank_info.rank == 0 and not as_json:
            print(f"probe: {time.monotonic() - began:.0f} s  {what}", file=sys.stderr, flush=True)

    inside = None
    try:
        if size > 1:
            # It loads much of torch.distributed.
            from gossamer.plan.probe.replica_steps import ReplicaSteps, check_replicas

            check_replicas(session, size)
            inside = ReplicaSteps(session, job_spec, rank_info)
    except WorkerLost as lost:
        print(f"gossamer: {lost} did not start: nothing was measured", file=sys.stderr)
        return LOST
    findings = probe(session, task, pace.delay, seconds, progress, inside)
    reports = rank_info.rank == session.alive[0]
    code = _report(findings, Path(out), as_json, time.monotonic() - began) if reports else LOST * bool(findings.lost)
    # The host of the store stays until the others have disconnected.
    if not findings.lost:
        session.share("done", True)
        if inside is not None:
            inside.close()
    session.close()
    return code


def _report(findings: Findings, out: Path, as_json: bool, took_s: float) -> int:
    if findings.lost:
        kept = "nothing had been measured"
        if findings.compute is not None:
            partial = out.with_suffix(f".partial{out.suffix}")
            cluster_file.write(findings.cluster_spec(), partial)
            kept = f"{findings.summary} are in {partial}"
        print(f"gossamer: {findings.lost}: {kept}", file=sys.stderr)
        return LOST
    spec = findings.cluster_spec()
    cluster_file.write(spec, out)
    if as_json:
        print_json({**cluster_file.document(spec), "out": str(out), "seconds": took_s})
        return 0
    _show(spec)
    print(f"\nwritten to {out} after {took_s:.0f} s; next: gossamer plan --cluster {out} --task …")
    return 0


def _show(spec: ClusterSpec) -> None:
    compute, costs = spec.compute, spec.costs
    sample = sorted(compute.sample_s)
    low, high = sample[len(sample) // 20], sample[-1 - len(sample) // 20]
    who = "worker" if spec.replica is None else "rank"
    slow = [f"{who} {rank}: {factor:.2g}×" for rank, factor in enumerate(compute.factors) if factor > 1.05]
    rows = [
        ["step alone", milliseconds(compute.mean_s), f"nine in ten from {milliseconds(low)} to {milliseconds(high)}"],
        ["backward", milliseconds(compute.backward_s), "of it"],
        ["slow workers", ", ".join(slow) or "none", "against the typical one"],
        ["slow together", f"{compute.correlation:.2f}", "0: each at its own time, 1: all at once"],
    ]
    for name, link in (("inside a node", spec.inside), ("between nodes", spec.between)):
        if link.latency_s:
            rows.append([name, _speed(link), f"a pair alone, {1e3 * link.latency_s:.3g} ms for 4 kB"])
    replica = spec.replica
    if replica is not None:
        what = "all-gathers and reduce-scatters" if replica.inside == "fsdp" else "all-reduces"
        rows += [
            ["inside replicas", _speed(replica.link), f"{what}, {1e3 * replica.link.latency_s:.3g} ms for 4 kB"],
            ["wait inside", milliseconds(replica.measured_s or 0.0), "of a step, beyond compute"],
        ]
    rows += [
        [f"mean of {table.shape.members}", milliseconds(table.seconds[-1]),
         f"{size(table.sizes_bytes[-1])}, {counted(table.shape.at_once, 'group')} at once on a node"]
        for table in spec.tables if table.kind == "mean"
    ]  # fmt: skip
    rows.append(["slow-down", f"{costs.slowdown:.2f}×", "of compute while messages are under way"])
    each = counted(spec.per_node, "worker" if replica is None else "replica")
    inside = "" if replica is None else f" of {counted(replica.ranks, 'rank')} with {replica.inside.upper()}"
    title = f"{counted(spec.nodes, 'node')} of {each}{inside}, {spec.parameters} parameters"
    print_table(title, ["", "measured", "meaning"], rows)
    if spec.memory_bytes:
        whose = "worker" if replica is None else "rank"
        print_note(f"{size(spec.memory_bytes)} of memory are left for each {whose}.")


def _speed(link: Link) -> str:
    return f"{8 * link.bytes_per_s / 1e6:.4g} Mbit/s"
