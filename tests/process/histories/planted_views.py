"""Bugs of the agreement on views, and of what workers do with it: the histories have to find each of them."""

from gossamer.process.state.lineage import ViewId
from gossamer.process.views.grouping import Grouping
from gossamer.process.views.messages import Member, View, ViewKind
from gossamer.process.views.view_change import ViewChange
from gossamer.testing.histories.process import Parts
from gossamer.testing.histories.trainer import Model, Trainer


class TheDeadStayMembers(ViewChange):
    """Whoever has said that it is present counts, also if it has died since."""

    def _coordinator(self):
        return min([self.own.rank, *self._present])

    def _propose(self):
        gone, self._gone = self._gone, lambda rank: False
        super()._propose()
        self._gone = gone


class ANumberIsAName(ViewChange):
    """Views are named by their number alone: two coordinators of one number name two lists alike."""

    def _name(self, number):
        return ViewId(number, 0, 1)

    def _on_accept(self, sender, id):
        super()._on_accept(sender, id)
        if self.installed is not None and id == self.installed.id:
            self._send([sender.rank], ViewKind.INSTALL, self.installed)


class ARankIsAMember(ViewChange):
    """A worker that is started again takes the place of its predecessor in a view that began without it."""

    def _on_install(self, sender, view):
        known = [Member(*self.own) if member.rank == self.own.rank else member for member in view.members]
        super()._on_install(sender, View(view.id, tuple(known)))


class SidesIgnoreEachOther(ViewChange):
    """After a partition both sides go on as they are."""

    def _compare(self, now):
        pass


class NothingIsRepeated(ViewChange):
    """A message that is lost stays lost."""

    def _repeat(self):
        pass


class LateAcceptancesAreIgnored(ViewChange):
    """Who has not heard that a view was installed is not told again."""

    def _on_accept(self, sender, id):
        if self._proposal is not None:
            super()._on_accept(sender, id)

    def _on_present(self, sender, message):
        if self.waits:
            super()._on_present(sender, message)


class TheDeadAreWaitedFor(ViewChange):
    """A proposal is not given up if a member dies before it accepts."""

    def _left_out(self, member):
        return False


class TheCoordinatorIsForEver(ViewChange):
    """Who has accepted a proposal waits for it, also if the coordinator has died."""

    def update(self):
        if self._accepted is None:
            super().update()


class CutLinksDoNotCount(Grouping):
    """Two members that cannot reach each other stay in one view, and all wait as long as the link is cut."""

    def hear(self, rank, unreachable):
        pass


class OnlyTheOwnLinksCount(Grouping):
    """Who reaches both ends of a cut link waits for both."""

    def hear(self, rank, unreachable):
        if rank == self._rank:
            super().hear(rank, unreachable)


class CutLinksStayCut(Grouping):
    """The groups stay apart once the link is whole."""

    def hear(self, rank, unreachable):
        if unreachable:
            super().hear(rank, unreachable)


class WhoIsDoneIsWaitedFor(Trainer):
    """A worker that has ended its training stays in its groups, and the others wait for it there."""

    def leave_groups(self):
        pass

    def _is_lost(self, collective, waited_s):
        return super()._is_lost(collective, 0.0)


class EqualStepsAreEqualModels(Trainer):
    """Sides of a partition that meet at the same step keep their models: only who is behind takes over."""

    def heads(self, models):
        steps = {rank: model.lineage.step for rank, model in models.items() if model.lineage is not None}
        if not steps:
            return ()
        newest = [rank for rank, step in steps.items() if step == max(steps.values())]
        source = self.rank if self.rank in newest else min(newest)
        return super().heads({source: models[source]})


class MoreStepsWin(Trainer):
    """The side with more steps replaces the other's model, without a word."""

    def heads(self, models):
        known = {rank: model for rank, model in models.items() if model.lineage is not None}
        most = max(known, key=lambda rank: (known[rank].lineage.step, -rank), default=None)
        return super().heads({} if most is None else {most: models[most]})


class TheBrokenStepCounts(Trainer):
    """A step whose average was lost is made with the own gradient alone."""

    def broken(self, collective):
        if collective.what == "step" and self.model.lineage is not None:
            lineage = self.model.lineage.after_step(collective.view.id, len(collective.view.members))
            self._set_model(Model(lineage, hash((self.model.weights, self.rank))))
        super().broken(collective)


BUGS = {
    **{bug.__name__: Parts(view_change=bug) for bug in ViewChange.__subclasses__()},
    **{bug.__name__: Parts(grouping=bug) for bug in Grouping.__subclasses__()},
    **{bug.__name__: Parts(trainer=bug) for bug in Trainer.__subclasses__()},
}
