"""Means of vectors that a codec encodes on the wire (``gossamer.wire``): a reduce-scatter, then an all-gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gossamer.effects import MAX_SCALARS
from gossamer.process.collectives.call import Call
from gossamer.process.collectives.groups import Groups, MeanResult, differing_rounds
from gossamer.process.collectives.membership import Communication, Membership
from gossamer.process.lifecycle import CommAborted
from gossamer.process.runtime.staging import Staging
from gossamer.wire import MeanLink

MAX_TRIES = 3
"""A mean that some member cannot decode is repeated with messages that everybody can."""

HEADER = 3 + MAX_SCALARS
"""Numbers in front of every message to the owner of a chunk: round, weight, number of scalars, scalars."""


class EncodedMeans:
    """The encoded means of one worker, one ``MeanLink`` for each topic."""

    def __init__(self, groups: Groups, staging: Staging, make_link: Callable[[], MeanLink]) -> None:
        self.groups, self.staging, self._make_link = groups, staging, make_link
        self._links: dict[str, MeanLink] = {}

    def mean(
        self,
        of: Membership,
        channel: str,
        vector: Tensor,
        call: Call,
        *,
        weight: float,
        scalars: tuple[float, ...],
        same: bool,
        started_in: int | None,
    ) -> tuple[MeanResult, int]:
        """Return the mean of ``vector``, on its device, and the bytes that this worker has sent for it."""
        if call.topic not in self._links:
            self._links[call.topic] = self._make_link()
        link = self._links[call.topic]
        out, sent_bytes = torch.empty_like(vector), 0
        header = torch.zeros(HEADER, dtype=torch.float64)
        header[1 : 3 + len(scalars)] = torch.tensor([weight, len(scalars), *scalars], dtype=torch.float64)
        received, generation, num_tries = torch.empty(0), 0, 0

        def exchange_chunks(group: Any, named: Call) -> Communication:
            """Send every member its chunk. Only here the members, and their name for the round, are known."""
            nonlocal received, generation
            generation = of.generation if started_in is None else started_in
            header[0] = named.round
            with self.staging.on_training_stream():
                messages = link.scatter(vector, group.size(), group.rank(), out, same)
            headers = header.view(torch.uint8).expand(group.size(), -1)
            sent = torch.cat((headers, self.staging.to_host(messages, f"{channel} chunks")), dim=1)
            received = torch.empty_like(sent)
            return [group.alltoall_base(received, sent, [], [])]

        while num_tries < MAX_TRIES:
            members, named = of.run(channel, exchange_chunks, call, started_in)
            if len(members) == 1:
                return MeanResult(vector.clone(), scalars, 1, weight), 0
            headers = received[:, : header.nbytes].contiguous().view(torch.float64)
            self._check(named, members, headers, len(scalars))
            weights = headers[:, 1].tolist()
            with self.staging.on_training_stream():
                chunks = self.staging.to_device(received[:, header.nbytes :].contiguous())
                message = link.reduce(chunks, weights)
            means = Call(call.kind, f"means of {call.topic}", call.round, call.group)
            sent = (self.staging.to_host(message, f"{channel} mean"),)
            try:
                gathered = self.groups.gather(of, channel, sent, means, generation)
            except CommAborted:
                if channel != of.owner:
                    raise
                # The members are others now, and so are the chunks.
                continue
            num_tries += 1
            sent_bytes += (len(members) - 1) * (received.shape[1] + message.nbytes)
            with self.staging.on_training_stream():
                decoded = link.gather([self.staging.to_device(each) for (each,) in gathered])
            if decoded:
                total = sum(weights)
                sums = (headers[:, 1:2] * headers[:, 3 : 3 + len(scalars)]).sum(0).tolist()
                averages = tuple(each / total if total else 0.0 for each in sums)
                return MeanResult(out, averages, len(members), total), sent_bytes
        raise RuntimeError(f"{call} could not be decoded {MAX_TRIES} times in a row")

    def _check(self, call: Call, members: list[int], headers: Tensor, num_scalars: int) -> None:
        for rank, (round, _, theirs) in zip(members, headers[:, :3].tolist(), strict=True):
            if int(round) != call.round or int(theirs) != num_scalars:
                raise differing_rounds(call, self.groups.rank, num_scalars, rank, int(round), int(theirs))
