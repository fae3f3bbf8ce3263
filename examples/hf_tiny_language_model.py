"""A tiny language model with Hugging Face's Trainer, trained by several workers that do not wait for each other.

    torchrun --nproc-per-node 2 examples/hf_tiny_language_model.py

It learns to count: sequences of consecutive numbers modulo 32, from random initial weights, without any download.
Three things belong to Gossamer: ``alone``, ``shard`` and the callback.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gossamer.integrations import hf

VOCABULARY = 32


class Counting(torch.utils.data.Dataset):
    """Runs of 12 consecutive numbers."""

    def __init__(self, size: int) -> None:
        self.starts = torch.randint(0, VOCABULARY, (size,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (self.starts[index] + torch.arange(12)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", default="a2cid2")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/hf")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    with hf.alone():
        arguments = TrainingArguments(
            output_dir=options.out,
            max_steps=options.steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=2,
            learning_rate=3e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
    data = Counting(2048)
    callback = hf.GossamerCallback(method=options.method, topology="ring")
    trainer = Trainer(model, arguments, train_dataset=hf.shard(data), eval_dataset=Counting(64), callbacks=[callback])
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model(options.out)

    metrics = callback.swarm.metrics()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    print(
        f"worker {arguments.process_index}: {metrics.steps} steps, {metrics.exchanges} exchanges, "
        f"loss {loss:.3f}, weights {weights.double().sum().item():.12f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
