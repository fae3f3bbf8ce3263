"""A few of the fault suite, which ``make faults`` runs whole: one of each kind, of the quick ones."""

from pathlib import Path

import faults
import partition_faults
import poison_faults
import pytest
import slow_faults
import stranger_faults
from fault_checks import victim_of
from partition_faults import hosts  # noqa: F401

from hosts import Hosts


@pytest.mark.parametrize("method", ["a2cid2", "lasgd"])
def test_killed_in_the_middle_of_an_exchange(method: str) -> None:
    faults.test_killed_in_the_middle_of_an_exchange(method, run=1)


def test_the_host_of_the_store_is_killed_in_the_middle_of_an_average() -> None:
    run = next(run for run in (1, 2) if victim_of("allreduce", run) == 0)
    faults.test_killed_in_the_middle_of_an_average("allreduce", run)


def test_killed_while_they_take_the_last_mean() -> None:
    faults.test_killed_while_they_take_the_last_mean("divisible", 0)


@pytest.mark.parametrize(("method", "victim"), [("gossip", 0), ("overlap", 2)])
def test_a_restarted_worker_is_back_in_the_exchange(method: str, victim: int, tmp_path: Path) -> None:
    faults.test_a_restarted_worker_is_back_in_the_exchange(method, victim, tmp_path)


@pytest.mark.parametrize("method", ["a2cid2", "overlap"])
def test_what_is_not_finite_does_not_spread(method: str, tmp_path: Path) -> None:
    poison_faults.test_what_is_not_finite_does_not_spread(method, tmp_path)


def test_what_is_absurdly_large_does_not_spread(tmp_path: Path) -> None:
    poison_faults.test_what_is_absurdly_large_does_not_spread("gossip", tmp_path)


def test_strangers_knock_at_every_port(tmp_path: Path) -> None:
    stranger_faults.test_strangers_knock_at_every_port("lasgd", tmp_path)


def test_who_connects_and_hangs_up_leaves_nothing_behind(tmp_path: Path) -> None:
    stranger_faults.test_who_connects_and_hangs_up_leaves_nothing_behind("a2cid2", tmp_path)


def test_both_sides_of_a_partition_are_averaged(hosts: Hosts, tmp_path: Path) -> None:  # noqa: F811
    partition_faults.test_both_sides_of_a_partition_are_averaged(hosts, tmp_path, "allreduce")


def test_the_end_in_a_partition_is_said(hosts: Hosts, tmp_path: Path) -> None:  # noqa: F811
    partition_faults.test_the_end_in_a_partition_is_said(hosts, tmp_path, "allreduce")


def test_ctrl_c() -> None:
    slow_faults.test_ctrl_c("overlap")
