"""Alignment: the members of a new generation come to the same step and, in lockstep, to the same model.

They also agree on who belongs to the run. Members that are behind take over the state of one that is not
(``state_transfer``). Those that were trained separately, on two sides of a partition, are averaged (``merging``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.process.collectives.peer_group import PeerGroup, Pending
from gossamer.process.roster.roster import read_roster
from gossamer.process.state import merging
from gossamer.process.state.lineage import ROOT, Head, ViewId
from gossamer.process.state.merging import gather_texts
from gossamer.process.state.state_transfer import TransferableState, transfer_state


def align(
    group: PeerGroup,
    wait: Callable[[Pending], None],
    state: TransferableState,
    step: int,
    view: ViewId,
    members: Sequence[int],
) -> None:
    """Align the ``members`` of a generation, which all call this.

    Args:
        group: The members, connected.
        wait: Waits for communication in the group; RuntimeError if it fails.
        state: The state of this worker.
        step: The step of this worker; -1 if it has no state yet.
        view: The name of the generation.
        members: The ranks of its members.
    """

    def broadcast(tensor: Tensor, index: int | None = None) -> Tensor:
        tensor = tensor.contiguous()
        wait(group.broadcast([tensor], sources[0] if index is None else index))
        return tensor

    def gather(tensor: Tensor) -> list[Tensor]:
        gathered = [torch.zeros_like(tensor) for _ in members]
        wait(group.allgather([gathered], [tensor]))
        return gathered

    known = state.roster.value
    rows = gather(torch.tensor([step, known.checksum]))
    steps = [int(row[0]) for row in rows]
    if len({int(row[1]) for row in rows}) > 1:
        # All follow the same one, whatever reaches one of them meanwhile.
        for text in gather_texts(gather, known.to_text().encode()):
            known = known.merged(read_roster(text) or known)
        state.roster.learn(known)
    newest = max(steps)
    own, ranks = group.rank(), range(len(steps))
    # At the start of a run nobody has a state: all take that of the first member.
    sources = [index for index in ranks if steps[index] == newest] if newest >= 0 else [0]
    heads: tuple[Head, ...] = ()
    discarded: dict[int, int] = {}
    if state.lockstep:
        lineage = None if step < 0 else state.lineage or ROOT
        standings = merging.exchange_standings(gather, merging.Standing(lineage, state.checksum()))
        heads = merging.heads_of(standings)
        sources = list(heads[0].ranks) if heads else [0]
        discarded = merging.discarded_of(standings, heads)
    if view.number > 0:
        state.on_membership_change(known)
    if len(heads) > 1:
        merging.merge_states(broadcast, state, merging.parts_of(heads, standings), own)
        state.lineage = merging.merged_lineage(heads, view, len(members))
        state.on_merge(merging.describe(heads, members))
        _say_discarded(state, discarded, own, members)
        return
    behind = [index for index in ranks if index not in sources]
    if len(behind) <= len(sources):
        # Few are behind, such as a worker that came back: the others need not wait for it.
        partners = {**dict(zip(sources, behind, strict=False)), **dict(zip(behind, sources, strict=False))}
        if own in partners:
            _transfer_between_two(group, wait, state, partners[own], sends=own in sources)
    else:
        transfer_state(broadcast, state, sends=own == sources[0], takes=own in behind)
    if state.lockstep:
        state.lineage = merging.merged_lineage(heads, view, len(members))
    _say_discarded(state, discarded, own, members)


def _say_discarded(state: TransferableState, discarded: dict[int, int], own: int, members: Sequence[int]) -> None:
    if discarded:
        state.on_discard(discarded.get(own, 0), merging.describe_discarded(discarded, members))


def _transfer_between_two(
    group: PeerGroup, wait: Callable[[Pending], None], state: TransferableState, partner: int, *, sends: bool
) -> None:
    """Give the state to a partner that is behind, or take over that of a partner that is not."""

    def move(tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        sent, received = (tensor, None) if sends else (None, tensor)
        wait(group.exchange(sent, received, to=partner, source=partner))
        return tensor

    transfer_state(move, state, sends=sends, takes=not sends)
