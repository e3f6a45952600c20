"""What a stage does around passes: which sets hear of it, in which order, and what runs once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from echelon.collectives import RecordingGroup
from echelon.parallel import stage as stage_module
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.data.sharing import Problem
from echelon.parallel.stage import Stage
from tests.parallel.test_stage import Recorded, take, two_stages


class Reducer:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def follow(self, other: "Reducer") -> None:
        self._log.append(f"{self.name} follows {other.name}")

    def start_backward(self, *, reducing: bool) -> None:
        self._log.append(f"{self.name} reducing={reducing}")


def reducing_stage() -> tuple[Stage, list[str]]:
    """Three sets, of which the second has no reducer."""
    log: list[str] = []
    sharings: list[Any] = [Recorded(name, log) for name in "123"]
    for sharing in (sharings[0], sharings[2]):
        sharing.reducer = Reducer(log, sharing.name)
    for sharing in sharings:
        sharing.start_reductions = lambda s=sharing: s.note("start_reductions")
        sharing.abandon_pass = lambda s=sharing: s.note("abandon_pass")
    module = nn.Linear(1, 1)
    return Stage(0, module, sharings, Buffers(module, RecordingGroup("data"))), log


def test_reducers_follow_each_other_and_early_gradients_only_add_up() -> None:
    stage, log = reducing_stage()
    assert take(log) == ["3 follows 1"]
    stage.start_early_backward()
    assert take(log) == ["1 reducing=False", "3 reducing=False"]
    stage.reduce()
    assert take(log) == [f"{n} {call}" for call in ("start_reductions", "reduce") for n in "123"]
    stage.abandon_pass()
    assert take(log) == ["1 abandon_pass", "2 abandon_pass", "3 abandon_pass"]


def test_a_replica_makes_up_for_passes_where_others_talk() -> None:
    stage, log = reducing_stage()
    stage.sharings[1].lockstep = True
    for last in (False, True):
        log.clear()
        stage.make_up_round(last=last)
        assert log == [f"2 start_backward last={last}", "2 finish_backward"]


def test_a_second_run_is_inside_all_sets() -> None:
    stage, log = reducing_stage()
    log.clear()

    @contextmanager
    def around(name: str, layer: nn.Module) -> Iterator[None]:
        assert layer is stage.module
        log.append(f"{name} in")
        yield
        log.append(f"{name} out")

    for sharing in stage.sharings:
        sharing.second_run = lambda layer, n=sharing.name: around(n, layer)  # type: ignore[attr-defined, method-assign]
    with stage.second_run(stage.module):
        log.append("run")
    assert log == ["1 in", "2 in", "3 in", "run", "3 out", "2 out", "1 out"]


def test_only_the_first_forward_of_a_step_iterates(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = reducing_stage()
    held: list[tuple[int, list[nn.Module]]] = []  # which forward of the step, and what does not iterate

    @contextmanager
    def no_iteration(modules: list[nn.Module]) -> Iterator[None]:
        held.append((stage._num_forwards, list(modules)))
        yield

    monkeypatch.setattr(stage_module, "no_iteration", no_iteration)
    stage._iterated = [stage.module]
    asked: list[bool] = []
    stage._buffers.differing = lambda *, has_run: bool(asked.append(has_run)) or ["b"]  # type: ignore[method-assign]
    stage.start_step()
    assert stage.differing_buffers() == ["b"]
    for _ in range(3):
        stage.forward(torch.ones(1, 1))
    stage.differing_buffers()
    stage.start_step()
    stage.forward(torch.ones(1, 1))
    assert held == [(2, [stage.module]), (3, [stage.module])]
    assert asked == [False, True]


def test_problems_of_all_sets_are_counted() -> None:
    local, _ = two_stages()
    first, second, _ = local.sharings
    first.problems = second.problems = lambda: {Problem.LOST_CHANGE: torch.tensor(True)}  # type: ignore[method-assign]
    flags = local.problem_flags(torch.device("cpu"))
    assert (flags.dtype, flags.sum().item()) == (torch.float64, 2.0)
    assert flags[list(Problem).index(Problem.LOST_CHANGE)] == 2


def test_buffers_of_all_stages_are_shared() -> None:
    local, _ = two_stages()
    shared: list[int] = []
    for index, stage in local.stages.items():
        stage._buffers.share = lambda i=index: shared.append(i)  # type: ignore[method-assign]
    local.share_buffers()
    local.publish()
    assert shared == [0, 3, 0, 3]
