"""``check_method`` finds methods that break a rule, and names the rule."""

import faulty_methods as faulty
import pytest

from gossamer.testing import MethodCheckError, check_method

FOUND = [
    (faulty.SaysNothing, "declaration", "does not say which effects it yields"),
    (faulty.GivesUpTheUnknown, "declaration", "gives_up names 'men': expected some of"),
    (faulty.YieldsMoreThanItSays, "effects", "yielded Gather, which it does not declare"),
    (faulty.UpdatesTwice, "effects", "yielded Update twice"),
    (faulty.RaisesAnError, "effects", "no_such_thing"),
    (faulty.RoundOfTheWorker, "collectives", "worker 0 waits in step for Mean 'model', round 0; worker 1 waits in"),
    (faulty.TopicOfTheWorker, "collectives", "Mean 'model of 0', round 0"),
    (faulty.GroupAtRandom, "collectives", "nobody can go on"),
    (faulty.FinishOfOne, "collectives", "worker 0 waits in finish for Mean 'last'"),
    (faulty.ChangesWhatItSent, "in_flight", "changed the vector of Mean 'model'"),
    (faulty.WritesToTheMean, "in_flight", "it is read-only"),
    (faulty.UsesAnEarlierMean, "in_flight", "is a mean used after the next one of its topic"),
    (faulty.CountsOnSelf, "state", "changed the method's attribute rounds"),
    (faulty.RemembersInAGlobal, "state", "a run is another one beside a second run"),
    (faulty.ThrowsDice, "seed", "two runs with one seed differ"),
    (faulty.NeverExchanges, "exchanges", "did not communicate"),
    (faulty.ChangesAlone, "alone", "away from plain training"),
    (faulty.Overwrites, "mean", "the sum of all models is"),
    (faulty.LosesTheLast, "end", "still has 'half' in flight"),
    (faulty.StaysApart, "consensus", "of their first distance apart"),
    (faulty.DoesNotShare, "shared", "vector 'momentum' is equal on all workers, but not after"),
]
"""The method, the rule that it breaks, and what is said about it."""


@pytest.mark.parametrize(("method", "rule", "said"), FOUND, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_found_and_its_rule_is_named(method, rule, said):
    with pytest.raises(MethodCheckError) as caught:
        check_method(method, real=False, only=rule)
    failed = {result.name: result for result in caught.value.report.failures}
    assert rule in failed
    assert said in failed[rule].detail
    text = " ".join(str(caught.value).split())
    assert f"{rule}: {failed[rule].rule}" in text
    assert " ".join(failed[rule].detail.split()) in text


@pytest.mark.parametrize(("method", "rule"), [(faulty.LooksAtTheClock, "twins"), (faulty.HidesItsState, "checkpoint")])
def test_some_faults_show_with_real_processes_only(method, rule):
    with pytest.raises(MethodCheckError) as caught:
        check_method(method, only=["processes", "twins", "checkpoint"])
    assert rule in [result.name for result in caught.value.report.failures]
    assert all(result.name in ("twins", "checkpoint") for result in caught.value.report.failures)
    check_method(method, real=False)


def test_a_sound_method_passes_every_check():
    report = check_method(faulty.Sound)
    assert {result.outcome for result in report.results} == {"passed", "skipped"}
    assert [result.name for result in report.results if result.outcome == "skipped"] == ["replicas"]
