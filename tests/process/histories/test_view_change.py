"""Situations of the view change that histories reach once in tens of thousands, step by step."""

from gossamer.process.state.lineage import ViewId
from gossamer.process.views.messages import Member, View, ViewKind, ViewMessage
from gossamer.process.views.view_change import SendTo, Tell, ViewChange


def sent(machine, kind):
    """Take the machine's actions; return the messages of a kind, with whom they go to."""
    actions, machine.actions = machine.actions, []
    return [
        (action.ranks, action.message)
        for action in actions
        if isinstance(action, SendTo) and action.message.kind == kind
    ]


def test_a_proposal_whose_member_dies_is_given_up_also_if_another_worker_has_become_the_coordinator():
    gone = {0}
    machine = ViewChange(0, 1, 5, range(4), gone.__contains__)
    machine.enter()
    for rank in (2, 3):
        machine.receive(rank, ViewMessage(ViewKind.PRESENT, 0, 10 + rank, 0))
    ((ranks, proposal),) = sent(machine, ViewKind.PROPOSE)
    assert (ranks, proposal.members) == ((2, 3), (Member(1, 5), Member(2, 12), Member(3, 13)))
    # Worker 2 accepts, and waits for worker 1 from now on.
    machine.receive(2, ViewMessage(ViewKind.ACCEPT, 0, 12, 0, proposal.id))
    gone.discard(0)
    machine.update()
    assert not any(isinstance(action, Tell) for action in machine.actions)
    gone.add(3)
    machine.update()
    assert Tell(proposal.id.number + 1) in machine.actions


def test_a_worker_that_is_started_again_says_that_the_process_before_it_will_not_come():
    machine = ViewChange(0, 2, 8, range(3), lambda rank: False)
    machine.enter()
    machine.actions.clear()
    view = View(ViewId(4, 0, 1), (Member(0, 1), Member(1, 1), Member(2, 7)))
    machine.receive(0, ViewMessage(ViewKind.PROPOSE, 0, 1, 4, *view))
    assert [ranks for ranks, _ in sent(machine, ViewKind.ABSENT)] == [(0,)]
    machine.receive(0, ViewMessage(ViewKind.PROPOSE, 0, 1, 4, view.id, (Member(0, 1), Member(1, 1), Member(2, 8))))
    assert [ranks for ranks, _ in sent(machine, ViewKind.ACCEPT)] == [(0,)]
