"""Mistakes in the arguments of join, with two processes: both are told the cause and the remedy."""

from __future__ import annotations

from pathlib import Path

import join_mistakes_script
import pytest
import torch.distributed as dist
from real_workers import RealWorkers

from gossamer.process.store.rank_info import free_port

WITHIN_S = 60.0
BOTH = (0, 1)
TURNS = [
    ("other parameters", BOTH, "SGD has none of the model's parameters: create it from model.parameters()"),
    ("other parameters", (0,), "SGD has none of the model's parameters: create it from model.parameters()"),
    ("other parameters", (1,), "SGD has none of the model's parameters: create it from model.parameters()"),
    ("meta device", BOTH, "0.weight is on the meta device and has no values: create the model on a device"),
    ("meta device", (0,), "0.weight is on the meta device and has no values: create the model on a device"),
    ("meta device", (1,), "0.weight is on the meta device and has no values: create the model on a device"),
    ("ddp", BOTH, "wrapped in DistributedDataParallel, and it would average the gradients too: drop the wrapper"),
    ("data parallel", (0,), "wrapped in DataParallel, and it uses several devices, and a worker has one: drop the"),
    ("data parallel", (1,), "wrapped in DataParallel, and it uses several devices, and a worker has one: drop the"),
    ("twice", BOTH, "this model is joined already: join it once, or call finish() or close() on its swarm first"),
    ("none", (), ""),
]


def test_both_workers_are_told_whoever_makes_the_mistake(tmp_path: Path) -> None:
    turns = [(mistake, ranks) for mistake, ranks, _ in TURNS]
    # Torchrun's store outlives the joins that fail.
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    environment = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    order = {"turns": turns, "file": tmp_path / "group"}
    with RealWorkers(2, script=join_mistakes_script.run, environment=environment, **order) as workers:
        said = [[worker.at("turn", WITHIN_S) for _ in turns] for worker in workers]
    for (mistake, ranks, line), *reports in zip(TURNS, *said, strict=True):
        for rank, report in enumerate(reports):
            assert line in report["why"], (mistake, rank)
            assert bool(report["why"]) == bool(line), (mistake, rank, report["why"])
            assert report["after_s"] < WITHIN_S, (mistake, rank)
            if line and rank not in ranks:
                (wrong,) = ranks
                assert report["why"] == f"worker {wrong} cannot join: {reports[wrong]['why']}"


@pytest.mark.parametrize("method", ["gossip", "allreduce"])
def test_the_others_are_told_why_a_worker_that_joins_twice_has_left(method: str) -> None:
    script = join_mistakes_script.train_and_join_again
    with RealWorkers(2, script=script, method=method) as workers:
        refused, end = workers[1].at("refused", WITHIN_S), workers[0].at("finished", WITHIN_S)
    assert refused["why"].startswith("this model is joined already: join it once, or call finish() or close()")
    failed = [(rank, text) for kind, rank, text in end["events"] if kind == "failed"]
    assert failed == [(1, f"worker 1 left, since an exception ended its program: {refused['why']}")]
