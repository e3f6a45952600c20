"""Asynchronous trainings that the tests run in ranks."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import echelon
from echelon.update.async_training.update import AsyncUpdate
from echelon.update.update import Push
from echelon.verify import Case, reference

Trained = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[Push]]


def engine_for(case: Case, plan: str, **options: Any) -> echelon.Engine:
    given = {"optimizer": case.make_optimizer, "loss": case.loss, "clip": case.clip} | options
    return echelon.parallelize(case.build(), f"{plan} sync=async precision=fp64", **given)


def asynchronous(engine: echelon.Engine) -> AsyncUpdate:
    assert isinstance(engine._update, AsyncUpdate)
    return engine._update


def train(case: Case, plan: str, **options: Any) -> Trained:
    """Every step of the case; weights, state and log. In each step all workers pull before any pushes, so
    that gradients are stale wherever the plan allows it."""
    # The audit of a worker, who asks for himself, would meet nobody.
    engine = engine_for(case, plan, loss=partial(_meet_first, case.loss), audit="off", **options)
    for batch in case.batches():
        engine.step(engine.local(batch))
    return engine.full_state_dict(), engine.full_optimizer_state(), asynchronous(engine).log()


def _meet_first(loss: Callable[[Any, Any], Any], output: Any, targets: Any) -> Any:
    dist.barrier()
    return loss(output, targets)


def train_with_a_straggler(case: Case, plan: str, ahead: int) -> Trained:
    """As `train`, but the last worker begins each step when the others have made `ahead` steps more."""
    engine = engine_for(case, plan)
    others = range(engine.replicas - 1)
    for step, batch in enumerate(case.batches()):
        if engine.replica not in others:
            _wait_for_others(engine, others, min(step + ahead, case.steps))
        engine.step(engine.local(batch))
    return engine.full_state_dict(), engine.full_optimizer_state(), asynchronous(engine).log()


def _wait_for_others(engine: echelon.Engine, others: range, steps: int) -> None:
    """Return when each of the others has pushed so many steps, by the server's log."""
    made = [0]
    while min(made) < steps:
        log = asynchronous(engine)._port.log(10**9)
        made = [sum(entry.worker == other for entry in log) for other in others]
        time.sleep(0.001)


def largest_gap(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((float((first[name] - second[name]).abs().max()) for name in first), default=0.0)


def assert_replays(trained: Trained, replayed: reference.TrainingResult) -> None:
    weights, state, _ = trained
    assert largest_gap(weights, replayed.weights) <= 1e-9
    assert state.keys() == replayed.optimizer.keys()
    assert all(largest_gap(state[name], replayed.optimizer[name]) <= 1e-9 for name in state)


def leads(log: list[Push], workers: int) -> list[int]:
    """For each push, how many steps its worker was ahead of the slowest other when it pulled."""
    found = []
    for entry in log:
        before = [earlier.worker for earlier in log if earlier.pushed <= entry.pulled]
        others = [before.count(other) for other in range(workers) if other != entry.worker]
        found.append(entry.step - min(others))
    return found


def same(first: Trained, second: Trained) -> bool:
    return (
        first[2] == second[2]
        and all(torch.equal(value, second[0][name]) for name, value in first[0].items())
        and all(torch.equal(v, second[1][n][k]) for n, state in first[1].items() for k, v in state.items())
    )
