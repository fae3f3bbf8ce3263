"""Trains with the methods given, one after the other, on several hosts; prints a line of JSON per method and worker."""

import json
import os
import sys
import time

import torch
from torch import nn

import gossamer

STEPS = 60
MAX_STEPS = 5000


def main() -> None:
    torch.set_num_threads(1)
    for method in sys.argv[1:]:
        torch.manual_seed(0)
        centres = torch.randn(4, 16) * 2
        model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
        adam = method == "divisible"
        optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.003 if adam else 0.05)
        with gossamer.join(model, optimizer, method=method, topology="ring") as swarm:
            generator = torch.Generator().manual_seed(swarm._runtime.rank)
            steps = 0
            # On a busy machine a worker's steps may be over before its first exchange.
            while steps < STEPS or not (swarm.metrics().exchanges or steps > MAX_STEPS):
                steps += 1
                labels = torch.randint(0, 4, (16,), generator=generator)
                inputs = centres[labels] + torch.randn(16, 16, generator=generator)
                nn.functional.cross_entropy(model(inputs), labels).backward()
                time.sleep(0.005)  # steps of no time would be over before the first exchange
                optimizer.step()
                optimizer.zero_grad()
            metrics = swarm.metrics()
        labels = torch.arange(4).repeat(100)
        inputs = centres[labels] + torch.randn(400, 16, generator=torch.Generator().manual_seed(99))
        report = {
            "method": method,
            "host": int(os.environ["GROUP_RANK"]),
            "rank": swarm._runtime.rank,
            "exchanges": metrics.exchanges,
            "lost": metrics.lost,
            "events": [str(event) for event in swarm.events],
            "accuracy": float((model(inputs).argmax(1) == labels).float().mean()),
            "weights": float(sum(parameter.detach().double().sum() for parameter in model.parameters())),
        }
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
