"""Bugs in who is alive, put in one by one: the histories have to find each of them."""

from gossamer.process.liveness.liveness import Liveness
from gossamer.process.liveness.peer import NEVER
from gossamer.process.liveness.records import Kind
from gossamer.testing.histories.process import Parts


class OnlyWhatOneHearsItselfCounts(Liveness):
    """Nobody passes on what it has heard: two workers that cannot reach each other take each other for dead."""

    def _send(self, ranks, kind, *about, **more):
        if ranks:
            super()._send(ranks, kind, *about, **more)
            last = self.actions[-1]
            self.actions[-1] = last._replace(message=last.message._replace(records=(self.own,)))


class ItsOwnPauseCounts(Liveness):
    """A process that was stopped takes all others for silent, since it heard nothing."""

    def _forgive(self, late_s, now):
        pass


class AnyRecordIsNew(Liveness):
    """An old record that somebody passes on counts as a heartbeat: the dead live on in what is said of them."""

    def _learn(self, record, sender, now):
        if record.rank != self.own.rank and self.peers[record.rank].record is not None:
            self.peers[record.rank].moved_at = now
        return super()._learn(record, sender, now)


class TheDeadAreNotLookedFor(Liveness):
    """Both sides of a partition forget each other."""

    def _send(self, ranks, kind, *about, **more):
        super()._send([rank for rank in ranks if kind != Kind.PING or not self.peers[rank].dead], kind, *about, **more)


class TheSilentAreNotAsked(Liveness):
    """Whoever answers late is dead: a busy process, whose counter stands still for a while."""

    def _is_dead(self, peer, now):
        return super()._is_dead(peer, now) or (peer.record is not None and now - peer.moved_at > self.timing.suspect_s)


class WhoAnswersLives(Liveness):
    """A process that hangs and still answers is waited for without an end."""

    def _is_dead(self, peer, now):
        return super()._is_dead(peer, now) and now - peer.answered_at > self.timing.dead_s


class HalfAMinuteOfPatience(Liveness):
    """Silence is death only after half a minute."""

    def _is_dead(self, peer, now):
        return super()._is_dead(peer, now) and (peer.refused_at > peer.moved_at or now - peer.moved_at > 30.0)


class NumbersAreNotRaised(Liveness):
    """A process whose clock is behind that of the one before it stays unheard."""

    def _learn(self, record, sender, now):
        return record.rank != self.own.rank and super()._learn(record, sender, now)


class WhatWasOnItsWayRevives(Liveness):
    """Words of a dead process that come late make it alive, if little was known of it when it died."""

    def _judge(self, rank, now):
        super()._judge(rank, now)
        peer = self.peers[rank]
        if peer.dead and peer.last_heartbeats is None:
            peer.died_at, peer.last_heartbeats = NEVER, peer.heartbeats


BUGS = {bug.__name__: Parts(liveness=bug) for bug in Liveness.__subclasses__()}
