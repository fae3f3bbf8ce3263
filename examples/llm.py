"""A decoder-only transformer on a text file: FSDP2 inside each replica, DiLoCo or another method between replicas.

    torchrun --nproc-per-node 4 examples/llm.py TEXT --replicas 2                    # 2 replicas of 2 ranks, CPU or GPU
    torchrun --nproc-per-node 4 examples/llm.py TEXT --replicas 2 --method a2cid2    # no replica waits for another
    torchrun --nproc-per-node 4 examples/llm.py TEXT --replicas 2 --layers 12 --width 768 --heads 12 --compile

The first takes about a minute on 2 CPU cores: 47 s with tinyshakespeare (1.1 MB), loss 2.41 on held-out text after 200
steps (2026-11-19, a busy machine; a2cid2 2.39, noloco 2.45).

A token is a byte of the text. Each rank draws its own pieces of it. The ranks of a replica share one model, sharded
over them. Replicas average their models every --period steps, or in pairs, while the training goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gossamer

TOKENS = 256


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(TOKENS, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            # Activations inside a block are computed again in the backward pass instead of kept.
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x))


def draw(text: Tensor, batch: int, context: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return ``batch`` random pieces of the text, one token longer than the context."""
    starts = torch.randint(len(text) - context, (batch,), generator=generator)
    return torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long().to(device)


def loss_of(model: nn.Module, pieces: Tensor) -> Tensor:
    logits = model(pieces[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), pieces[:, 1:].flatten())


def write(path: Path, text: str) -> None:
    """Write a file that is whole whenever the process dies."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="any text file")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--method", default="diloco", help="diloco, localsgd, noloco, a2cid2, …")
    parser.add_argument(
        "--period", type=int, default=20, help="steps between two averagings of diloco, localsgd, noloco"
    )
    parser.add_argument("--rate", type=float, default=0.25, help="exchanges per step of a2cid2 and gossip")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8, help="per rank")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="folder: resume from it if it exists, also with other replicas and ranks; write to it in the end",
    )
    parser.add_argument(
        "--progress",
        type=Path,
        help="file of this replica, a torchrun of its own: started again, it goes on from the step that is there",
    )
    args = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    if "REPLICA" in os.environ:
        # This replica is a torchrun of its own (kubernetes-replicas.yaml): its ranks start again without the others.
        if args.checkpoint is not None:
            parser.error("--checkpoint needs all replicas in one torchrun")
        mesh = init_device_mesh(kind, (ranks,), mesh_dim_names=("shard",))
        between = gossamer.Replica(int(os.environ["REPLICA"]), int(os.environ["REPLICAS"]), os.environ["REPLICAS_AT"])
        rank += between.index * ranks
    else:
        if args.progress is not None:
            parser.error("--progress is for replicas that are a torchrun each (REPLICA): take --checkpoint")
        mesh = init_device_mesh(kind, (args.replicas, ranks // args.replicas), mesh_dim_names=("replica", "shard"))
        between = "replica"
    inside = mesh["shard"].get_group()

    text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8)
    cut = len(text) * 9 // 10
    torch.manual_seed(0)
    model = Decoder(args.layers, args.width, args.heads, args.context).to(device)
    # Parameters, gradients and optimizer state are float32 and sharded; passes compute in bfloat16.
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if args.compile:
            block.compile()
        fully_shard(block, mesh=mesh["shard"], mp_policy=precision)
    fully_shard(model, mesh=mesh["shard"], mp_policy=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    saved, own, done = [], {}, 0
    if args.checkpoint is not None:
        name = f"replica-{mesh.get_local_rank('replica')}"
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = sorted(args.checkpoint.glob("replica-*"))
        own = torch.load(args.checkpoint / "rank-0.pt", weights_only=True)
        done = own["steps"]
    if args.progress is not None and args.progress.exists():
        # The weights come from another replica, which need not wait in the end until all steps are made again.
        done = int(args.progress.read_text())
        if dist.get_rank() == 0:
            print(f"replica {between.index} goes on after step {done}", flush=True)
    same = own.get("layout") == list(mesh.shape)
    if saved:
        # Creates the state of the optimizer, by a step without effect. Before join: it is no step of the training.
        weights, moments = get_state_dict(model, optimizer)
    if saved and not same:
        # Other numbers of replicas or shards: all start from the mean of the replicas. diloco and others begin anew.
        gossamer.load_mean({"model": weights, "optimizer": moments}, saved, inside)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    # diloco sends an average in the background for a quarter of the period, so nobody waits for a slow network.
    period, rate = {"period": args.period}, {"rate": args.rate}
    known = {"localsgd": period, "noloco": period, "a2cid2": rate, "gossip": rate}
    settings = {**known, "diloco": {**period, "delay": args.period // 4}}.get(args.method, {})
    swarm = gossamer.join(model, optimizer, mesh=mesh, between=between, method=args.method, **settings)
    # Each rank draws other pieces, and other ones than before if it cannot go on where it was.
    generator = torch.Generator().manual_seed(rank + ranks * done)
    if same:
        # After join, which starts all replicas from the first one; the swarm's state last.
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=args.checkpoint / name, process_group=inside)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        own = torch.load(args.checkpoint / f"rank-{rank}.pt", weights_only=True)
        swarm.load_state_dict(own["swarm"])
        generator.set_state(own["generator"])

    for step in range(done, args.steps):
        done = step + 1
        loss = loss_of(model, draw(text[:cut], args.batch, args.context, generator, device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.progress is not None and dist.get_rank() == 0 and done % 50 == 0:
            write(args.progress, str(done))
        # Of this rank's mini-batch: for the mean of all, replicas would wait for each other.
        if dist.get_rank() == 0 and done % 50 == 0:
            print(f"step {done}: loss {loss.item():.3f}", flush=True)

    if args.checkpoint is not None:
        weights, moments = get_state_dict(model, optimizer)
        own = {"swarm": swarm.state_dict(), "generator": generator.get_state(), "steps": done}
        # The earlier checkpoint stays until this one is complete.
        part = args.checkpoint.with_name(args.checkpoint.name + ".part")
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        dist.barrier()
        # Each replica has a model of its own until the end, so each writes a checkpoint of its own.
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=part / name, process_group=inside)
        torch.save({**own, "layout": list(mesh.shape)}, part / f"rank-{rank}.pt")
        dist.barrier()
        if rank == 0:
            shutil.rmtree(args.checkpoint, ignore_errors=True)
            part.rename(args.checkpoint)

    swarm.finish()  # now all replicas hold the same, averaged model
    if args.progress is not None and dist.get_rank() == 0:
        args.progress.unlink(missing_ok=True)
    model.eval()
    with torch.no_grad():
        held_out = loss_of(model, draw(text[cut:], 64, args.context, torch.Generator().manual_seed(0), device))
    print(f"rank {rank}: loss on held-out text {held_out.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
