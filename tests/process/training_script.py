"""A small training job for the tests: one worker, told what to do, reporting as it goes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from step_watch import StepWatch
from torch import nn

from gossamer.api import join
from gossamer.errors import InputError
from gossamer.methods import find
from gossamer.process.events import EventKind
from gossamer.process.net import flows
from gossamer.process.net.flows import Flow
from gossamer.process.runtime import early_gradient

TOLD_WEIGHTS = 40
"""After so many steps from the end of a partition on a worker tells its weights. They fit into a pipe."""

VECTOR_BYTES = 4096
"""What is as long as this is no word of the protocol."""


def train(rank: int, environment: dict[str, str], order: dict[str, Any], out: Connection) -> None:
    os.environ.update(environment, RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device(order.get("device", "cpu"))
    centres = torch.randn(4, 16) * 2
    width = order.get("width", 32)
    model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    model.to(device)
    if order.get("other_start") and rank:
        for parameter in model.parameters():
            nn.init.ones_(parameter)
    kind = torch.optim.Adam if find(order["method"]).preferred_optimizer == "adam" else torch.optim.SGD
    rate = order.get("lr", 0.01 if kind is torch.optim.Adam else 0.05)
    momentum = {} if kind is torch.optim.Adam else {"momentum": order.get("momentum", 0.0)}
    optimizer = kind(model.parameters(), lr=rate, **momentum)
    dying = _Dying(order, rank)
    # The model is small, and so are the buckets in which gradients travel.
    early_gradient.BUCKET_BYTES = 256
    out.send({"at": "start"})
    try:
        topology, wire = order.get("topology", "ring"), order.get("wire", "float32")
        settings = order.get("settings", {})
        swarm = join(model, optimizer, method=order["method"], topology=topology, wire=wire, **settings)
    except InputError as error:
        out.send({"at": "refused", "why": str(error)})
        return
    address = "{}:{}".format(*swarm._runtime.store.listener.address)
    out.send(
        {
            "at": "joined",
            "rank": swarm.rank,
            "address": address,
            "step": 0,
            "events": [str(event) for event in swarm.events],
        }
    )
    if "spare_descriptors" in order:
        limit = max(map(int, os.listdir("/proc/self/fd"))) + 1 + order["spare_descriptors"]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    generator = torch.Generator().manual_seed(rank)
    steps = order["steps"] if isinstance(order["steps"], int) else order["steps"][rank]
    pause_s = order.get("compute_s", 0.01)
    pause_s = pause_s if isinstance(pause_s, float) else pause_s[rank]
    longest, watch = 0.0, StepWatch()
    if order.get("watch"):
        # What a busy machine adds to a step is not counted.
        watch.start()
    hold, hold_until = order.get("hold", (-1, None))
    was_merged, num_told = False, 0
    for step in range(steps):
        dying.step = step
        if "until" in order and order["until"].exists():
            break
        if "leave" in order and (order["leave"] / f"leave {rank}").exists():
            swarm.leave()
            out.send({"at": "left", "longest": longest, "threads": our_threads()})
            return
        if "give_up" in order:
            for path in order["give_up"].glob(f"give up {rank} *"):
                # Not before it is dead for this worker too.
                with contextlib.suppress(InputError):
                    swarm.give_up(int(path.name.split()[-1]))
                    path.unlink()
        labels = torch.randint(0, 4, (16,), generator=generator)
        inputs = centres[labels] + torch.randn(16, 16, generator=generator)
        nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
        time.sleep(pause_s)
        if order.get("poison", (None,))[:2] == (rank, step):
            next(model.parameters()).grad.fill_(order["poison"][2])
        optimizer.step()
        optimizer.zero_grad()
        step_s, starved_s = watch.stepped()
        longest = max(longest, step_s - starved_s)
        if hold_until is not None:
            was_merged = was_merged or any(event.kind == EventKind.MERGED for event in swarm.events)
            if step + 1 == hold or (was_merged and num_told < TOLD_WEIGHTS):
                num_told += was_merged
                weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
                out.send({"at": "weights", "step": step + 1, "weights": weights.tolist()})
            while step + 1 == hold and not hold_until.exists():
                time.sleep(0.1)
                out.send({"at": "held", "events": [str(event) for event in swarm.events]})
        if step % 10 == 9:
            metrics = swarm.metrics()
            report = {"step": step + 1, "exchanges": metrics.exchanges, "longest": longest, "refused": metrics.refused}
            report |= {"repeated": metrics.repeated, "dropped": metrics.dropped}
            out.send({"at": "step", **report, "events": [str(event) for event in swarm.events]})
            longest = 0.0 if order.get("recent") else longest
    if order.get("averaged"):
        with swarm.averaged():
            mean = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
            out.send({"at": "averaged", "weights": mean.tolist()})
    metrics = swarm.metrics()
    counts = {"refused": metrics.refused, "exchanges": metrics.exchanges, "bytes_sent": metrics.bytes_sent}
    out.send({"at": "trained", "steps": metrics.steps, "longest": longest, **counts})
    dying.step = steps
    swarm.finish()
    labels = torch.arange(4).repeat(100)
    inputs = centres[labels] + torch.randn(400, 16, generator=torch.Generator().manual_seed(99))
    with torch.no_grad():
        accuracy = float((model(inputs.to(device)).argmax(1).cpu() == labels).float().mean())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    outcome = {
        "missing": swarm.missing,
        "repeated": swarm.metrics().repeated,
        "dropped": swarm.metrics().dropped,
        "accuracy": accuracy,
        "weights": weights.tolist(),
        "events": [str(event) for event in swarm.events],
        "threads": our_threads(),
    }
    out.send({"at": "finished", **outcome})


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gossamer")]


class _Dying:
    """A worker that kills itself in an exchange or a collective, when it has sent half of a vector."""

    def __init__(self, order: dict[str, Any], rank: int) -> None:
        self.step = 0
        victim, self._at = order.get("dies", (None, 0))
        if victim == rank and "revived" not in os.environ:
            # Long vectors are sent by a thread of their own.
            Flow.send = self._death_amid(Flow.send)  # type: ignore[method-assign]
            flows._Sender._send = self._death_amid(flows._Sender._send)  # type: ignore[method-assign]

    def _death_amid(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def send_and_die(*arguments: Any) -> Any:
            flow = arguments[-1]
            queued = list(flow.outgoing)
            if self.step < self._at or not any(view.nbytes >= VECTOR_BYTES for view in queued):
                return send(*arguments)
            for view in queued:
                is_vector = view.nbytes >= VECTOR_BYTES
                flow.connection.send_bulk(view[: view.nbytes // 2] if is_vector else view)
                if is_vector:
                    os.kill(os.getpid(), signal.SIGKILL)
            return None

        return send_and_die
