"""The contenders of ``benchmarks/peers.py`` and their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from environments import HIVEMIND, TORCHFT, Environment
from torchft_coordinator import DEFAULT, TUNED, TUNED_SYNCHRONOUS, TorchftSettings

WAIT_S = 0.1
"""How long a gradient takes."""


@dataclass(frozen=True)
class Contender:
    """A way to train."""

    name: str
    kind: str = "gossamer"
    """Which loop a worker runs: ``none``, ``ddp``, ``gossamer``, ``torchft``, ``hivemind``."""
    label: str = ""
    optimizer: str = "sgd"
    settings: dict[str, Any] = field(default_factory=dict)
    """Of a method of ours or of ``hivemind.Optimizer``."""
    in_background: bool = False
    """Whether exchanges take place beside the steps, so that one that ends after a gradient may not contain it."""
    straggler_steps: int = 16
    """Steps of the slow worker that are measured: a multiple of what recurs."""
    round_s: float = WAIT_S
    """From one average to the next: over the turns a worker is killed at different moments of it."""
    watch_s: float = 5.0
    """How long survivors are watched, at least; several averages."""
    environment: Environment | None = None
    torchft: TorchftSettings | None = None
    averages_of: str = ""
    """What hivemind averages: ``gradients`` or ``parameters``."""


def torchft(name: str, label: str, settings: TorchftSettings) -> Contender:
    return Contender(name, "torchft", label, environment=TORCHFT, torchft=settings)


def hivemind(name: str, label: str, averages_of: str, **settings: Any) -> Contender:
    # The times are those that its documentation recommends for small local runs, and a request time-out below the
    # matchmaking time, for which its log asks. All workers together make up to 40 samples per second, so averages are
    # 7 to 10 s apart.
    times = {"matchmaking_time": 3.0, "averaging_timeout": 10.0, "averager_opts": {"request_timeout": 1.0}}
    return Contender(
        name,
        "hivemind",
        label,
        settings={"target_batch_size": 256, **times, **settings},
        straggler_steps=32,
        round_s=8.0,
        watch_s=25.0,
        environment=HIVEMIND,
        averages_of=averages_of,
    )


CONTENDERS = (
    Contender("none", "none", "no communication"),
    Contender("none-adam", "none", "no communication", optimizer="adam"),
    Contender("ddp", "ddp", "torch DDP"),
    torchft("torchft", "torchft, default time-outs", DEFAULT),
    torchft("torchft-tuned", "torchft, tuned time-outs", TUNED),
    torchft("torchft-tuned-sync", "torchft, tuned, synchronous quorum", TUNED_SYNCHRONOUS),
    hivemind("hivemind", "hivemind, gradients averaged", "gradients"),
    hivemind("hivemind-local", "hivemind, local updates", "parameters", use_local_updates=True),
    Contender("a2cid2", in_background=True),
    Contender("gossip", in_background=True),
    Contender("lasgd", in_background=True),
    Contender("noloco", in_background=True, round_s=4 * WAIT_S),
    Contender("allreduce"),
    Contender("overlap"),
    Contender("divisible", optimizer="adam", settings={"warmup": 2}),
    Contender("localsgd", round_s=8 * WAIT_S),
    Contender("diloco", straggler_steps=20, round_s=10 * WAIT_S),
    Contender("sgp"),
)
