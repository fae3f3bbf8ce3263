"""One worker of several that train with Hugging Face's Trainer, started by torchrun; what it saw goes to a file."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainingArguments

import hf_tiny_language_model as example
from gossamer.errors import InputError
from gossamer.integrations import hf


def flat(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


class Line(nn.Module):
    """A line through points, who remembers what it has seen."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.trained_on = []

    def forward(self, x, labels):
        if self.training:
            self.trained_on += x.flatten().tolist()
        return {"loss": nn.functional.mse_loss(self.net(x / 40), labels)}


def points(size=40):
    return [{"x": torch.tensor([float(x)]), "labels": torch.tensor([3 * x / 40 + 1])} for x in range(size)]


class BeforeTheEnd(TrainerCallback):
    def on_step_end(self, args, state, control, *, model, **_):
        self.weights = flat(model)


def arguments(out, **more):
    return TrainingArguments(
        output_dir=out, use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=4,
        num_train_epochs=2, learning_rate=0.1, logging_strategy="no", save_strategy="epoch", **more,
    )  # fmt: skip


def train(out, method):
    torch.manual_seed(0)
    if os.environ["RANK"] == "0":
        # Looking at one's share is not joining: workers may do it as often as they like.
        assert len(hf.shard(points())) == 20
    model, before = Line(), BeforeTheEnd()
    with hf.alone():
        args = arguments(out)
    callback = hf.GossamerCallback(method=method)
    trainer = Trainer(model, args, train_dataset=hf.shard(points()), callbacks=[before, callback])
    trainer.train()
    return {
        "rank": args.process_index,
        "wrapped": isinstance(trainer.model_wrapped, DistributedDataParallel),
        "saves": args.should_save,
        "trained_on": model.trained_on,
        "before_the_end": before.weights,
        "weights": flat(model),
        "steps": callback.swarm.metrics().steps,
        "exchanges": callback.swarm.metrics().exchanges,
    }


def refused(make_arguments):
    try:
        Trainer(Line(), make_arguments(), train_dataset=points(), callbacks=[hf.GossamerCallback()]).train()
    except InputError as error:
        return str(error)
    return None


def typo():
    try:
        hf.GossamerCallback(method="a2cid2", topolgy="ring")
    except InputError as error:
        return str(error)
    return None


def best_at_end(out):
    with hf.alone():
        return arguments(out, load_best_model_at_end=True, eval_strategy="epoch")


def main(out):
    sys.argv[1:] = ["--steps", "40", "--out", str(Path(out, "saved"))]
    example.main()
    report = {
        "allreduce": train(str(Path(out, "checkpoints")), "allreduce"),
        "gossip": train(str(Path(out, "checkpoints")), "gossip"),
        "typo": typo(),
        # Last, as it makes Accelerate's own process group.
        "not alone": refused(lambda: arguments(str(Path(out, "none")))),
    }
    torch.distributed.destroy_process_group()
    rank = report["gossip"]["rank"]
    Path(out, f"{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
