"""Real workers see their own data, whoever dies, and their learning rates end where they should."""

import re
from pathlib import Path

import pytest
from data_script import SIZE, run_page, train_on_numbers
from real_workers import RealWorkers

README = Path(__file__).parents[2] / "README.md"

EVERYTHING = [float(number) for number in range(SIZE)]


def seen(worker, epoch=0):
    return [
        number
        for report in worker.reports
        if report["at"] == "step" and report["epoch"] == epoch
        for number in report["seen"]
    ]


@pytest.mark.parametrize("method", ["a2cid2", "allreduce"])
def test_two_workers_see_disjoint_data_and_all_of_it(method):
    with RealWorkers(2, script=train_on_numbers, method=method, epochs=2, pause_s=[0.0, 0.01]) as workers:
        workers.finished()
        for epoch in range(2):
            assert sorted(seen(workers[0], epoch) + seen(workers[1], epoch)) == EVERYTHING
        assert seen(workers[0], 0) != seen(workers[0], 1)
        for worker in workers:
            (end,) = [report for report in worker.reports if report["at"] == "trained"]
            assert end["progress"] == 1.0
            assert end["lr"] == pytest.approx(1e-7)


def test_the_data_of_a_dead_worker_goes_to_the_other_and_back_when_it_returns(tmp_path):
    wait, file = {(0, 0): "alone", (0, 1): "file"}, tmp_path / "go-on"
    order = {"method": "gossip", "epochs": 3, "pause_s": [0.0, 0.05], "wait": wait, "file": file}
    with RealWorkers(2, script=train_on_numbers, **order) as workers:
        workers[1].at("step")
        workers.kill(1)
        workers[0].until(lambda report: report["at"] == "epoch" and report["epoch"] == 1)
        assert len(seen(workers[0], 0)) == SIZE / 2
        assert sorted(seen(workers[0], 1)) == EVERYTHING
        # Worker 0 waits at the end of its second epoch. The other comes back, and begins the third.
        returned = workers.restart(1)
        returned.at("step")
        file.touch()
        workers.finished()
        assert {report["epoch"] for report in returned.reports if report["at"] == "step"} == {2}
        assert sorted(seen(workers[0], 2) + seen(returned, 2)) == EVERYTHING
        assert min(report["progress"] for report in returned.reports if report["at"] == "step") > 2 / 3
        (end,) = [report for report in workers[0].reports if report["at"] == "trained"]
        assert end["events"].count("dealt") == 2


def test_workers_in_lockstep_go_on_together_after_a_return():
    wait = {(0, 1): "alone", (0, 2): "company"}
    order = {"method": "allreduce", "epochs": 6, "pause_s": [0.03, 0.03], "averaged": True, "wait": wait}
    with RealWorkers(2, script=train_on_numbers, **order) as workers:
        workers[1].until(lambda report: report["at"] == "step" and report["epoch"] == 1)
        workers.kill(1)
        # Worker 0 waits at the end of its third epoch until the other is there again.
        workers[0].until(lambda report: report["at"] == "epoch" and report["epoch"] == 2)
        returned = workers.restart(1)
        workers.finished()
        positions = [[r["progress"] for r in worker.reports if r["at"] == "step"] for worker in (workers[0], returned)]
        assert positions[1] == positions[0][-len(positions[1]) :]
        assert sorted(seen(workers[0], 5) + seen(returned, 5)) == EVERYTHING


def test_learning_rates_of_a_common_pool_never_rise_and_end_at_the_minimum():
    order = {"method": "gossip", "total_steps": 60, "pause_s": [0.005, 0.05]}
    with RealWorkers(2, script=train_on_numbers, **order) as workers:
        workers.finished()
        steps = [[report for report in worker.reports if report["at"] == "step"] for worker in workers]
        fast, slow = map(len, steps)
        assert fast + slow == 60
        assert fast > slow
        # Three epochs of twenty batches.
        assert sorted(number for worker in workers for number in seen(worker)) == sorted(EVERYTHING * 3)
        for worker, mine in zip(workers, steps, strict=True):
            progress = [report["progress"] for report in mine]
            rates = [report["lr"] for report in mine if report["progress"] >= 0.1]
            assert progress == sorted(progress)
            assert rates == sorted(rates, reverse=True)
            (end,) = [report for report in worker.reports if report["at"] == "trained"]
            assert end["progress"] == 1.0
            assert end["lr"] == pytest.approx(1e-7)


def test_the_loop_of_the_readme_gives_workers_their_own_data():
    code = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
    assert "gossamer.join" in code
    with RealWorkers(2, script=run_page, code=code) as workers:
        first, second = workers.finished()
    assert len(first["seen"]) == len(second["seen"]) == 2048
    assert sorted(first["seen"] + second["seen"]) == sorted(first["inputs"])
    assert first["weights"] == second["weights"]
