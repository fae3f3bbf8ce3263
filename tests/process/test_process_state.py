"""What a worker is can be kept and gone on from; parameters of several dtypes."""

import copy
from typing import Any

import merge_script
import pytest
import resume_script
import torch
from real_workers import RealWorkers
from torch import nn

import gossamer
from gossamer.effects import Effect
from gossamer.errors import InputError
from gossamer.process.lifecycle import StepRetry


@pytest.mark.parametrize(
    ("method", "settings", "in_flight"),
    [
        ("allreduce", {}, []),
        ("localsgd", {"period": 3}, []),
        ("overlap", {}, ["mix"]),
        ("divisible", {"period": 4, "warmup": 2, "ratio": 4.0}, ["background"]),
        ("divisible", {"period": 4, "warmup": 2, "ratio": 4.0, "compressor": "int8"}, ["background"]),
    ],
)
def test_methods_that_wait_go_on_as_if_nothing_had_happened(
    method: str, settings: dict[str, object], in_flight: list[str]
) -> None:
    order = {"method": method, "settings": settings, "half": 7, "whole": 16}
    with RealWorkers(2, script=resume_script.train, **order) as workers:
        for end in workers.finished():
            assert end["events"] == []
            assert end["in_flight"] == in_flight
            assert end["resumed"] == end["in_one_go"]


@pytest.mark.parametrize("stumbles", [0, 1])
def test_what_is_under_way_at_the_end_is_not_lost_with_a_connection(stumbles: int) -> None:
    settings = {"period": 4, "warmup": 2, "ratio": 4.0}
    order = {"method": "divisible", "settings": settings, "half": 7, "whole": 16, "stumbles": stumbles}
    with RealWorkers(2, script=resume_script.train, **order) as workers:
        for end in workers.finished():
            assert end["resumed"] == end["in_one_go"]


def test_what_was_merged_stays_as_it_is_while_the_next_mean_arrives() -> None:
    """The answer to a mean is valid until the next mean of its topic begins, and with a delay of one period that begins
    between the merge and the step that applies it."""
    with RealWorkers(2, script=merge_script.train, width=1024, steps=8) as workers:
        workers.finished()
        reports = [[report for report in worker.reports if report["at"] == "merged"] for worker in workers]
    assert len(reports[0]) >= 3
    for merged in zip(*reports, strict=True):
        assert merged[0] == merged[1]
        assert merged[0]["applied"] == merged[0]["merged"]


@pytest.mark.parametrize("method", ["gossip", "a2cid2", "lasgd"])
def test_methods_that_do_not_wait_go_on_from_the_same_place(method: str) -> None:
    model, optimizer = resume_script.model_and_optimizer(method)
    swarm = gossamer.join(model, optimizer, method=method)
    resume_script.advance(0, model, optimizer, range(5))
    state, moments = swarm.state_dict(), copy.deepcopy(optimizer.state_dict())
    resume_script.advance(0, model, optimizer, range(5, 9))
    swarm.finish()
    again, its_optimizer = resume_script.model_and_optimizer(method)
    with gossamer.join(again, its_optimizer, method=method) as swarm:
        its_optimizer.load_state_dict(moments)
        swarm.load_state_dict(state)
        resume_script.advance(0, again, its_optimizer, range(5, 9))
    assert resume_script.weights(again) == resume_script.weights(model)


def test_workers_whose_checkpoints_are_of_different_averages_go_on_together() -> None:
    """One of them had merged an average, the other had not yet, when their states were taken."""
    with RealWorkers(2, script=resume_script.average_apart) as workers:
        for end in workers.finished():
            assert end["exchanges"] >= 2
            assert end["events"] == []


def test_a_state_of_another_run_is_refused() -> None:
    model, optimizer = resume_script.model_and_optimizer("gossip")
    with gossamer.join(model, optimizer, method="gossip") as swarm:
        state = swarm.state_dict()
        with pytest.raises(InputError, match="method 'a2cid2', not 'gossip'"):
            swarm.load_state_dict({**state, "method": "a2cid2"})
        with pytest.raises(InputError, match="workers 3, not 1"):
            swarm.load_state_dict({**state, "workers": 3})
        with pytest.raises(InputError, match="trainable parameters"):
            swarm.load_state_dict({**state, "x": torch.zeros(3)})
        resume_script.advance(0, model, optimizer, range(1))
        with pytest.raises(InputError, match="before the first step"):
            swarm.load_state_dict(state)


@pytest.mark.parametrize("method", ["allreduce", "gossip", "overlap", "a2cid2"])
def test_one_worker_with_parameters_of_several_dtypes_trains_as_without_us(method: str) -> None:
    def trained(join: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4).to(torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        swarm = gossamer.join(model, optimizer, method=method) if join else None
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            inputs = torch.randn(8, 6, generator=generator)
            optimizer.zero_grad()
            hidden = model[1](model[0](inputs))
            (model[2](hidden.to(torch.bfloat16)).float() - inputs[:, :4]).square().mean().backward()
            optimizer.step()
        if swarm is not None:
            swarm.finish()
        return model

    plain, ours = trained(join=False), trained(join=True)
    for (name, expected), got in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert got.dtype == expected.dtype, name
        assert torch.equal(got, expected), name


def test_a_transport_that_cannot_be_is_refused() -> None:
    model, optimizer = resume_script.model_and_optimizer("gossip")
    with pytest.raises(InputError, match='transport "nccl" needs a model on CUDA'):
        gossamer.join(model, optimizer, transport="nccl")
    with pytest.raises(InputError, match="transport"):
        gossamer.join(model, optimizer, transport="nvlink")


@pytest.mark.parametrize(
    ("method", "made_by_the_others", "expected"),
    [
        # It waits for the average of its weights: nobody has its gradient yet.
        ("overlap", True, {"applied": True, "repeated": 1}),
        # The others had its gradient, and have made the step with it.
        ("allreduce", True, {"applied": False, "repeated": 0}),
        # As after a partition: nobody has made the step.
        ("allreduce", False, {"applied": True, "repeated": 1}),
    ],
)
def test_no_gradient_is_lost_when_other_weights_are_taken_over_in_a_step(
    method: str, made_by_the_others: bool, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    swarm = gossamer.join(model, optimizer, method=method)
    state, effects = swarm._runtime.state, swarm._runtime.effects
    model.weight.grad = torch.ones(1, 3)
    optimizer.step()
    answer = effects.answer

    def take_over_first(effect: Effect, *arguments: Any) -> Any:
        monkeypatch.setattr(effects, "answer", answer)
        tensors, rest = state.export_state()
        state.import_state({"x": torch.full_like(tensors["x"], 7.0)}, {**rest, "step": rest["step"] + 1})
        if made_by_the_others:
            state.count_step(effects.groups.train.view, 2)
        state.on_membership_change()
        raise StepRetry

    monkeypatch.setattr(effects, "answer", take_over_first)
    model.weight.grad = torch.ones(1, 3)
    optimizer.step()
    after, metrics = 7.0 - 0.5 * bool(expected["applied"]), swarm.metrics()
    swarm.finish()
    assert model.weight.tolist() == [[after] * 3]
    assert (metrics.repeated, metrics.dropped) == (expected["repeated"], 0)
