"""A user's script of which a torchrun for each replica starts the ranks: trains until a file is there.

Each rank says how far it is in a file of the working folder that is named after its replica and its rank in it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer

torch.manual_seed(0)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
model = fully_shard(nn.Linear(8, 4), mesh=mesh["shard"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
between = gossamer.Replica(int(os.environ["REPLICA"]), int(os.environ["REPLICAS"]), os.environ["REPLICAS_AT"])
swarm = gossamer.join(model, optimizer, mesh=mesh, between=between, method="a2cid2", rate=0.5)
own = Path(f"{between.index}-{dist.get_rank()}.json")
going = torch.ones(())
while going:
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = swarm.metrics()
    written = own.with_suffix(".new")
    written.write_text(json.dumps({"pid": os.getpid(), "steps": counts.steps, "exchanges": counts.exchanges}))
    written.replace(own)
    time.sleep(0.02)
    # All ranks of a replica make the same number of steps.
    going.fill_(not Path("last").exists())
    dist.all_reduce(going, dist.ReduceOp.MIN)
swarm.finish()
Path(f"{between.index}-{dist.get_rank()}.done").touch()
dist.destroy_process_group()
