"""AsyncUpdate trainings that the tests run in ranks."""

import random
import time
from typing import Any

import torch
from torch import Tensor

import echelon
from echelon.async_training import AsyncUpdate
from echelon.runtime import Push
from echelon.verify import Case, reference

Trained = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]], list[Push]]


def engine_for(case: Case, plan: str, **options: Any) -> echelon.Engine:
    given = {"optimizer": case.make_optimizer, "loss": case.loss, "clip": case.clip} | options
    return echelon.parallelize(case.build(), f"{plan} sync=async precision=fp64", **given)


def asynchronous(engine: echelon.Engine) -> AsyncUpdate:
    assert isinstance(engine._update, AsyncUpdate)
    return engine._update


def train(case: Case, plan: str, longest_pause: float, **options: Any) -> Trained:
    """Every step of the case, after pauses that differ from rank to rank; weights, state and log."""
    engine = engine_for(case, plan, **options)
    pauses = random.Random(engine.replica)
    for batch in case.batches():
        time.sleep(pauses.uniform(0, longest_pause))
        engine.step(engine.local(batch))
    return engine.full_state_dict(), engine.full_optimizer_state(), asynchronous(engine).log()


def largest_gap(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max((float((mine[name] - theirs[name]).abs().max()) for name in mine), default=0.0)


def assert_replays(trained: Trained, replayed: reference.TrainingResult) -> None:
    weights, state, _ = trained
    assert largest_gap(weights, replayed.weights) <= 1e-9
    assert state.keys() == replayed.optimizer.keys()
    assert all(largest_gap(state[name], replayed.optimizer[name]) <= 1e-9 for name in state)


def leads(log: list[Push], workers: int) -> list[int]:
    """For each push, how many steps its worker was ahead of the slowest other when it pulled."""
    found = []
    for entry in log:
        before = [its.worker for its in log if its.pushed <= entry.pulled]
        others = [before.count(other) for other in range(workers) if other != entry.worker]
        found.append(entry.step - min(others))
    return found


def same(first: Trained, second: Trained) -> bool:
    return (
        first[2] == second[2]
        and all(torch.equal(value, second[0][name]) for name, value in first[0].items())
        and all(torch.equal(v, second[1][n][k]) for n, state in first[1].items() for k, v in state.items())
    )
