"""A rank whose weights are all one number, so that an exchange which only some ranks of its replica merged shows.

Every gradient is one number too, another one in each replica and step. Arithmetic element by element keeps all weights
of a replica equal to the bit, on all its ranks, as long as each exchange is merged on all of them at the same step.
"""

from __future__ import annotations

import math
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from replica_script import BATCH, make_model, prepare
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import gossamer
from gossamer.process.averages.final_average import FinalAverage
from gossamer.process.runtime import swarm as swarm_module

LR = 0.1


def gradient(replica: int, step: int) -> float:
    return (replica + 1) * (1.0 + step % 3)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def ends(vector: Tensor) -> list[float]:
    return [float(vector.min()), float(vector.max())]


def die_in_exchange(runtime: Any, after: int) -> None:
    """Die in an exchange before sending anything: that of the other shard takes place."""
    move = runtime.exchanges.move

    def dying(*arguments: Any) -> Any:
        if runtime.metrics.exchanges >= after:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return move(*arguments)

    runtime.exchanges.move = dying


def compare_consensus(runtime: Any, num_weights: int) -> list[tuple[float, float]]:
    """Collect, after each exchange, the consensus distance in the metrics beside the true one."""
    exchanges, move, judge = runtime.exchanges, runtime.exchanges.move, runtime.exchanges.judge
    last: list[float] = []
    seen: list[tuple[float, float]] = []

    def noted_move(effect: Any, decision: Any) -> Any:
        own, moved = float(effect.vector[0]), move(effect, decision)
        last[:] = [abs(own - float(moved.answer[0]))] if moved.answer is not None else []
        return moved

    def noted_judge(*arguments: Any) -> Any:
        merges = judge(*arguments)
        if merges and last:
            seen.append((runtime.metrics.consensus, last[0] * (num_weights / 2) ** 0.5))
        return merges

    exchanges.move, exchanges.judge = noted_move, noted_judge
    return seen


def train_constant(
    rank: int, replica: int, own: dict[str, Any], mesh: DeviceMesh, between: Any, out: Connection
) -> dict[str, Any]:
    model = make_model(own.get("width", 8))
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    parallel = prepare(own["kind"], mesh, model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LR, **({"foreach": False} if "tp" in own["kind"] else {}))
    swarm = gossamer.join(
        parallel, optimizer, mesh=mesh, between=between, method=own["method"], timeout=60, **own.get("settings", {})
    )
    runtime = swarm._runtime
    state, worker, inner = runtime.state, runtime.worker, runtime.state.replica.inner
    out.send({"at": "joined", "step": worker.step})
    if own.get("dies_in_exchange") == rank:
        die_in_exchange(runtime, own["after"])
    num_weights = sum(p.numel() for p in model.parameters())
    consensus = compare_consensus(runtime, num_weights)
    torn, longest, last_at, steps, done = [], 0.0, time.monotonic(), 0, [0.0]
    last = own.get("last")
    while True:
        inputs = torch.randn(BATCH, 6)
        try:
            nn.functional.mse_loss(parallel(inputs), inputs[:, :4]).backward()
        except RuntimeError:
            # As with NCCL: its collectives do not fail when a rank has died.
            time.sleep(own.get("hangs_s", 0.0))
            raise
        for parameter in parallel.parameters():
            local(parameter.grad).fill_(gradient(replica, steps))
        optimizer.step()
        optimizer.zero_grad()
        done.append(done[-1] - LR * gradient(replica, steps))
        steps += 1
        now = time.monotonic()
        longest, last_at = max(longest, now - last_at), now
        # All weights of the replica, its momentum and its time: the same on all ranks.
        seen = [*ends(state.flat_model.x), *ends(worker.vectors.get("z", torch.zeros(1))), worker.time]
        own_view = torch.tensor([*seen, float(last is None or last.exists())]).double()
        views = inner.gather(own_view)
        finite = all(math.isfinite(view[0]) for view in views)
        if finite and (
            seen[0] != seen[1] or seen[2] != seen[3] or len({tuple(view.tolist()[:-1]) for view in views}) > 1
        ):
            torn.append((steps, [view.tolist() for view in views]))
        if steps == own.get("spoilt_at") and rank == 3:
            state.flat_model.x[0] = float("nan")
        report = {"at": "step", "step": steps, "exchanges": swarm.metrics().exchanges, "longest": longest, "now": now}
        if not own.get("quiet") or steps % 10 == 0:
            out.send(report)
        if steps >= own.get("steps", 8) and all(view[-1] for view in views):
            break
        time.sleep(own.get("compute_s", 0.0) * (own.get("slow", 1.0) if replica == 0 else 1.0))
    conserved: list[Tensor] = []
    before: list[float] = []

    class Recorded(FinalAverage):
        def run(self) -> None:
            conserved.append(state.method.conserved(worker).clone())
            before.append(float(state.flat_model.x[0]))
            super().run()

    swarm_module.FinalAverage = Recorded  # type: ignore[misc]
    longest_step = longest
    swarm.finish()
    moved = abs(float(state.flat_model.x[0]) - before[0]) if state.flat_model.x.numel() else 0.0
    return {
        "consensus": [*consensus, (swarm.metrics().consensus, moved * num_weights**0.5)],
        "torn": torn,
        "steps": steps,
        "added": done[-1],
        "conserved": ends(conserved[0]),
        "weights": [ends(local(p.detach())) for p in model.parameters()],
        "exchanges": swarm.metrics().exchanges,
        "bytes": swarm.metrics().bytes_sent,
        "longest": longest_step,
        "revived": "revived" in os.environ,
        "events": [str(event) for event in swarm.events],
    }
