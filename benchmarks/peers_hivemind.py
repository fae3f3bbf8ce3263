"""The loop with hivemind of ``benchmarks/peers_worker.py``.

What hivemind does is known from its log: an average is the line "Averaged gradients with 4 peers", or "parameters" with
local updates.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hivemind
import torch
from torch import nn

from worker_reports import report

AVERAGED = re.compile(r"Averaged (gradients|parameters) with (\d+) peers")
DISCARDED = "Peer is out of sync"
POLL_S = 0.05
ADDRESS_S = 120.0


class Log(logging.Handler):
    """Reports what the lines of hivemind's log mean."""

    def __init__(self, job_spec: dict[str, Any]) -> None:
        super().__init__()
        self.workers, self.averages_of = job_spec["workers"], job_spec["averages_of"]
        self.gradients = 0
        """That count: of this process, and not discarded."""
        self.discarded = 0
        self.ready = self.contributed = False

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.discarded += line.startswith(DISCARDED)
        found = AVERAGED.search(line)
        if found is None or found[1] != self.averages_of:
            return
        peers = int(found[2])
        if peers == self.workers and not self.ready:
            self.ready = True
            report("joint training")
        if peers > 1 and self.gradients > 0 and not self.contributed:
            self.contributed = True
            report("contribution")


def train(job_spec: dict[str, Any], model: nn.Module, backward: Callable[[], None]) -> None:
    addresses = Path(job_spec["folder"]) / "addresses.json"
    first = job_spec["rank"] == 0
    dht = hivemind.DHT(start=True, initial_peers=None if first else wait_for(addresses))
    if first:
        part = addresses.with_suffix(".part")
        part.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        os.replace(part, addresses)
    log = Log(job_spec)
    for module in ("hivemind.optim.optimizer", "hivemind.optim.state_averager"):
        logging.getLogger(module).addHandler(log)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=1,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
        verbose=True,
        **job_spec["settings"],
    )
    while True:
        backward()
        before = log.discarded
        optimizer.step()
        optimizer.zero_grad()
        if log.discarded == before:
            log.gradients += 1
            report("step")
        else:
            log.gradients = 0
            report("discarded")


def wait_for(addresses: Path) -> list[str]:
    until = time.monotonic() + ADDRESS_S
    while not addresses.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"rank 0 has no address after {ADDRESS_S:.0f} s")
        time.sleep(POLL_S)
    return list(json.loads(addresses.read_text()))
