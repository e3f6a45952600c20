"""What a step keeps in memory: the activations of microbatches on their way, and versions of the weights."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.program import Instruction, Op
from tests.cases import vectors
from tests.engine.step.runtime.watched_engine import engine_for, watch

Warm = Callable[[int], Ranks]


# Memory of activations.


class Wide(nn.Module):
    """A layer whose activations weigh far more than what comes with the batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 4096), nn.Linear(4096, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(x))))


def wide() -> nn.Module:
    return nn.Sequential(Wide(6, 8), Wide(8, 8), Wide(8, 8), Wide(8, 5))


def peak_of_activations(plans: list[str]) -> list[int]:
    peaks = []
    for plan in plans:
        engine = engine_for(plan, wide())
        for step in range(2):
            engine.step(vectors(step, samples=32))
        memory = engine.memory()
        assert memory.now["activations"] == 0
        peaks.append(memory.peak["activations"])
    return peaks


def test_activations_of_as_many_microbatches_as_the_schedule_says(warm_ranks: Warm) -> None:
    """With d stages and m microbatches, stage i holds d−i of them under 1f1b, m under gpipe, 1 if naive."""
    depth, number = 4, 8
    schedules = ["gpipe", "1f1b", "naive", "zero-bubble"]
    plans = [f"pipeline={depth} microbatches={number} schedule={name}" for name in schedules]
    for stage, peaks in enumerate(warm_ranks(depth).run(peak_of_activations, plans)):
        all_of_them, one_forward_one_backward, naive, zero_bubble = peaks
        one = all_of_them / number
        assert one_forward_one_backward == pytest.approx((depth - stage) * one, rel=0.03)
        assert naive == pytest.approx(one, rel=0.03)
        assert zero_bubble <= (depth + 1) * one


class Seen(nn.Module):
    """A layer that notes down the memory of what it was given and of what it returned."""

    notes: dict[str, list[StorageWeakRef]]

    def __init__(self, outputs: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(6, outputs)
        self.notes = {"in": [], "out": []}

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(x)
        self.notes["in"].append(StorageWeakRef(x.untyped_storage()))
        self.notes["out"].append(StorageWeakRef(output.untyped_storage()))
        return output


def alive_after_each(plan: str, rank_of_interest: int) -> list[tuple[str, list[bool], list[bool]]]:
    """After each computation and send of a step: which microbatches' inputs and outputs are in memory."""
    model = nn.Sequential(Seen(), Seen(), Seen(5))
    engine = engine_for(plan, model, audit="off")
    batch = vectors(0)
    engine.step(batch)
    layer = model[engine.mesh.group("pipeline").rank]
    layer.notes["in"].clear()
    layer.notes["out"].clear()
    log: list[tuple[str, list[bool], list[bool]]] = []

    def note(instruction: Instruction) -> None:
        if instruction.op in (Op.FORWARD, Op.BACKWARD, Op.SEND_ACTIVATION):
            inputs, outputs = ([not ref.expired() for ref in layer.notes[key]] for key in ("in", "out"))
            log.append((f"{instruction.op.value}{instruction.microbatch}", inputs, outputs))

    watch(engine, note)
    engine.step(batch)
    return log if engine.mesh.rank == rank_of_interest else []


def packed_when(log: list[tuple[str, list[bool], list[bool]]]) -> dict[str, tuple[list[int], list[int]]]:
    """By instruction: the microbatches whose inputs and whose outputs are in memory after it."""
    return {
        name: (
            [k for k, alive in enumerate(instruction) if alive],
            [k for k, alive in enumerate(outs) if alive],
        )
        for name, instruction, outs in log
    }


def test_an_output_is_freed_when_it_is_sent_and_an_input_after_its_backward(warm_ranks: Warm) -> None:
    log = warm_ranks(3).run(alive_after_each, "pipeline=3 microbatches=4 schedule=gpipe", 1)[1]
    assert packed_when(log) == {
        "F0": ([0], [0]),
        "SA0": ([0], []),
        "F1": ([0, 1], [1]),
        "SA1": ([0, 1], []),
        "F2": ([0, 1, 2], [2]),
        "SA2": ([0, 1, 2], []),
        "F3": ([0, 1, 2, 3], [3]),
        "SA3": ([0, 1, 2, 3], []),
        "B0": ([1, 2, 3], []),
        "B1": ([2, 3], []),
        "B2": ([3], []),
        "B3": ([], []),
    }


def test_the_last_stage_keeps_one_microbatch(warm_ranks: Warm) -> None:
    log = warm_ranks(3).run(alive_after_each, "pipeline=3 microbatches=3 schedule=1f1b", 2)[2]
    after_backward = [(instruction, outs) for name, instruction, outs in log if name.startswith("B")]
    assert len(after_backward) == 3
    assert not any(alive for instruction, outs in after_backward for alive in (*instruction, *outs))


# Versions.


def versions_alive(plan: str, steps: int) -> tuple[int, int, int, dict[str, int]]:
    """The most memories of a weight at once, and after a drain; the bytes of one; the bytes reported."""
    engine = engine_for(plan, wide())
    parameter = next(p for p in engine.module.parameters() if p is not None)
    memories: dict[int, StorageWeakRef] = {}
    most = 0

    def note(_: Instruction) -> None:
        nonlocal most
        storage = parameter.untyped_storage()
        memories[storage._cdata] = StorageWeakRef(storage)
        for key in [key for key, instruction in memories.items() if instruction.expired()]:
            del memories[key]
        most = max(most, len(memories))

    watch(engine, note)
    for step in range(steps):
        engine.step(engine.local(vectors(step)))
    reported = engine.memory().peak
    engine.synchronize()
    drained = sum(not instruction.expired() for instruction in memories.values())
    with engine._watch.own_work():
        whole = sum(p.nbytes for p in engine.module.parameters())
    return most, drained, whole, reported


@pytest.mark.parametrize("replicas", ["data=1", "data=2 zero=1"])
def test_stage_i_of_d_keeps_d_minus_i_versions(warm_ranks: Warm, replicas: str) -> None:
    plan = Plan.parse(f"pipeline=2 schedule=pipedream microbatches=2 {replicas}")
    found = warm_ranks(plan.ranks).run(versions_alive, str(plan), 5)
    stages = [0, 1] if plan.data == 1 else [0, 0, 1, 1]
    assert [most for most, _, _, _ in found] == [2 - stage for stage in stages]
    assert {drained for _, drained, _, _ in found} == {1}


def test_the_deeper_the_more_versions(warm_ranks: Warm) -> None:
    found = warm_ranks(4).run(versions_alive, "pipeline=4 schedule=pipedream microbatches=1", 9)
    assert [most for most, _, _, _ in found] == [4, 3, 2, 1]
    vertical = warm_ranks(4).run(versions_alive, "pipeline=4 schedule=pipedream-vertical microbatches=1", 9)
    assert [most for most, _, _, _ in vertical] == [4, 4, 4, 4]


@pytest.mark.slow_cases("6")
@pytest.mark.parametrize("number", [4, 6])
def test_two_buffers_are_two(warm_ranks: Warm, number: int) -> None:
    plan = f"pipeline=4 schedule=pipedream-2bw microbatches={number}"
    assert [most for most, _, _, _ in warm_ranks(4).run(versions_alive, plan, 4)] == [2, 2, 2, 2]


def test_the_memory_of_versions_is_reported_as_that_of_parameters(warm_ranks: Warm) -> None:
    plan = "pipeline=4 schedule=pipedream-vertical microbatches=3"
    for _, _, whole, reported in warm_ranks(4).run(versions_alive, plan, 3):
        assert reported["parameters"] == 4 * whole
