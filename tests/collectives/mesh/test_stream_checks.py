"""Pipelines over NCCL whose messages could wait for each other are refused, on every rank."""

from types import SimpleNamespace

import pytest
import torch

from echelon.collectives.mesh import mesh as stream_checks
from echelon.errors import UserError
from echelon.plan import Plan
from echelon.program import build
from tests.nccl_like import NcclMesh, NcclWorld


def errors_of_ranks(text: str) -> list[str]:
    """What each rank is told when the edges of a plan are made over a group like NCCL; "" if nothing."""
    plan = Plan.parse(text)
    pairs = build(plan.schedule, plan.replicas, plan.microbatches).pairs
    world = NcclWorld(plan.ranks)

    def told(rank: int) -> str:
        mesh = NcclMesh(world, plan, rank)
        try:
            mesh.edges(pairs)
        except UserError as error:
            return str(error)
        return ""

    return world.run(told)


def bind(monkeypatch: pytest.MonkeyPatch, device: torch.device | None) -> None:
    """As if torch.distributed were initialised, for `device` or without one."""
    world = SimpleNamespace(bound_device_id=device)
    monkeypatch.setattr(stream_checks, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))


# Streams.


@pytest.mark.parametrize("plan", ["pipeline=3-1 microbatches=3", "pipeline=15-1 microbatches=15"])
def test_as_many_communicators_as_there_are_streams(plan: str) -> None:
    """The last rank of the second plan has 30 edges, and a group of all ranks."""
    assert set(errors_of_ranks(plan)) == {""}


def test_more_communicators_than_streams_are_refused() -> None:
    errors = errors_of_ranks("pipeline=16-1 microbatches=16")
    assert len(errors) == 17
    assert len(set(errors)) == 1
    assert "torch has 32: one rank needs 33, for messages to and from 16 ranks" in errors[0]
    assert "data= to replicate the whole pipeline" in errors[0]


def test_groups_that_are_not_bound_to_a_device_take_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch, torch.device("cuda", 0))
    assert set(errors_of_ranks("pipeline=8-1 microbatches=8")) == {""}
    bind(monkeypatch, None)
    assert set(errors_of_ranks("pipeline=6-1 microbatches=6")) == {""}
    (error,) = set(errors_of_ranks("pipeline=8-1 microbatches=8"))
    assert "one rank needs 35, for messages to and from 8 ranks" in error
    assert "pass device_id to init_process_group" in error


# Hardware queues.


@pytest.mark.parametrize("queues", ["1", "7"])
def test_few_hardware_queues_are_refused(monkeypatch: pytest.MonkeyPatch, queues: str) -> None:
    """Megatron wants one of them; a message that waits would hold up what its sender waits for."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    first, second = errors_of_ranks("pipeline=2")
    assert first == second
    assert f"CUDA_DEVICE_MAX_CONNECTIONS must be at least 8, and a rank has {queues}" in first
    assert "set it to 32 before CUDA starts, or unset it" in first


@pytest.mark.parametrize("queues", ["", "8", "32", "all"])
def test_enough_hardware_queues(monkeypatch: pytest.MonkeyPatch, queues: str) -> None:
    """CUDA ignores what is no number, and has 8 then."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert errors_of_ranks("pipeline=2") == ["", ""]


def test_one_rank_with_few_queues_is_refused_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    queues = iter([32, 1, 32])
    monkeypatch.setattr(stream_checks, "_hardware_queues", lambda: next(queues))
    assert all("a rank has 1" in error for error in errors_of_ranks("pipeline=3"))
