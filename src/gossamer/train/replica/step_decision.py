"""What the ranks of a replica do next, as its first rank says before each step, and how the others hear of it."""

from __future__ import annotations

import json
import queue
from dataclasses import astuple, dataclass, replace

import torch

from gossamer.errors import InputError
from gossamer.process.replica.agreement import Agreement

POLL_S = 0.1


@dataclass(frozen=True)
class StepDecision:
    """What the ranks of a replica do next."""

    go: bool
    """Make one more step."""
    evaluate: bool = False
    checkpoint: int = 0
    """The newest checkpoint that was requested, by its number of steps."""
    stopping: bool = False
    """A rank was asked to stop."""


class StepDecisions:
    """Those of one rank in lockstep, whose steps consist of collectives: one more tells all of them."""

    def __init__(self, replica: Agreement) -> None:
        self.replica = replica

    def agree(self, own: StepDecision) -> StepDecision:
        """Return what the first rank decided; whether to stop is what any rank says."""
        numbers = torch.tensor([own.go, own.evaluate, own.checkpoint, own.stopping], dtype=torch.int64)
        gathered = self.replica.inner.gather(numbers)
        go, evaluate, checkpoint, _ = gathered[0].tolist()
        return StepDecision(bool(go), bool(evaluate), checkpoint, any(int(each[3]) for each in gathered))


class SentDecisions(StepDecisions):
    """Those of one rank with a method that does not wait: the first rank sends them and waits for nobody.

    Another rank that is asked to stop tells the first one, which says so in one of its next decisions.
    """

    def __init__(self, replica: Agreement) -> None:
        """Before the replica's watch starts."""
        super().__init__(replica)
        self._watch = replica.watch
        self._sent: queue.SimpleQueue[StepDecision] = queue.SimpleQueue()
        self._stopping = False
        """On the first rank: another one was asked to stop. On the others: this one was, and the first one knows it."""
        self._watch.on_message |= {"step": self._hear_decision, "stop": self._hear_stop}

    def _hear_decision(self, text: str) -> None:
        self._sent.put(StepDecision(*json.loads(text)))

    def _hear_stop(self, text: str) -> None:
        self._stopping = True

    def agree(self, own: StepDecision) -> StepDecision:
        if self.replica.shard == 0:
            decision = replace(own, stopping=own.stopping or self._stopping)
            self._watch.send(f"step {json.dumps(astuple(decision))}")
            return decision
        if own.stopping and not self._stopping:
            self._stopping = True
            self._watch.send("stop")
        while True:
            try:
                return self._sent.get(timeout=POLL_S)
            except queue.Empty:
                if self._watch.gone:
                    raise InputError(self._watch.gone) from None
