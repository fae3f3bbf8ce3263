"""What two processes do that test how vectors are traded."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from gossamer.process.collectives import gloo

LARGE = 8_000_000
"""More numbers than fit into what the kernel buffers: 32 MB."""


def communicate(rank: int, environment: dict[str, str], order: dict[str, Any], out: Any) -> None:
    store = dist.TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), None, rank == 0, wait_for_workers=False)
    group = gloo.connect(store, "two", rank, 2, timeout_s=5.0)
    if order.get("dies") and rank == 1:
        threading.Timer(order["dies"], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    began = time.monotonic()
    failed = False
    try:
        result = {"exchange": exchange, "broadcast": broadcast, "late": late}[order["does"]](group)
    except RuntimeError:
        result, failed = [], True
    out.send({"at": "finished", "result": result, "failed": failed, "seconds": time.monotonic() - began})
    # The store is the other's too.
    store.set(f"over/{rank}", "1")
    if not order.get("dies"):
        store.get(f"over/{1 - rank}")


def exchange(group: Any) -> list[float]:
    sent, received = torch.full((LARGE,), float(group.rank())), torch.empty(LARGE)
    gloo.Exchange(group, sent, received).wait(timeout_s=50.0)
    return received.unique().tolist()


def broadcast(group: Any) -> list[float]:
    """From 1 to 0, which disconnects after a while."""
    disconnected = threading.Event()
    threading.Timer(0.5, lambda: (disconnected.set(), gloo.disconnect(group))).start()
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 1, 0
    tensor = torch.ones(LARGE)
    gloo.wait(group, group.broadcast([tensor], options), 50.0, disconnected.is_set)
    return tensor.unique().tolist()


def late(group: Any) -> list[float]:
    """One comes later than it would have been allowed to while the group was built."""
    time.sleep(6.0 * group.rank())
    mean = torch.ones(10)
    gloo.wait(group, group.allreduce([mean], dist.AllreduceOptions()), 50.0, lambda: False)
    return mean.unique().tolist()
