"""A recorder without a device: its replays run the passes again, and write into the same memory."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import echelon
from echelon.engine import Engine
from echelon.engine.step.graphs.assembly import make_graphs
from echelon.engine.step.graphs.cuda_recorder import NumbersOf, Recorded, Recording, Timing
from echelon.engine.step.graphs.graphed_passes import GraphedPasses
from echelon.engine.step.step import FlushedRunner
from echelon.update.numbers import Tally

T = TypeVar("T")


class FakeTiming:
    def __init__(self, host: float, device: float | None) -> None:
        self.host_seconds, self._device = host, device

    def device_seconds(self) -> float | None:
        return self._device


class FakeRecording:
    def __init__(
        self, run: Callable[[], Tally], parameters: Sequence[nn.Parameter], numbers_of: NumbersOf
    ) -> None:
        self._run, self._parameters, self._numbers_of = run, parameters, numbers_of
        self.num_replays = 0
        self.error = 0.0  # that a replay makes
        self.outputs = self._compute()

    def replay(self) -> None:
        self.num_replays += 1
        for parameter in self._parameters:
            parameter.grad = None
        new = self._compute()
        for static, value in zip(_tensors(self.outputs), _tensors(new), strict=True):
            static.copy_(value)
        for gradient in self.outputs.gradients:
            if gradient is not None:
                gradient.mul_(1 + self.error)

    def _compute(self) -> Recorded:
        row, counted = self._run()
        tally = Tally(row.clone(), counted)
        gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        return Recorded(tally, gradients, self._numbers_of(tally))


def _tensors(recorded: Recorded) -> list[Tensor]:
    """All that a replay writes."""
    return [leaf for leaf in tree_leaves(tuple(recorded)) if isinstance(leaf, Tensor)]


class FakeRecorder:
    """`host`, `device`: seconds of passes as they are; `replay`: of the device in a replay; `update`: of the
    host for what else there is in a step."""

    def __init__(
        self, host: float = 2e-3, device: float | None = 1e-3, replay: float = 5e-4, update: float = 0.0
    ) -> None:
        self.host, self.device, self.replay, self.update = host, device, replay, update
        self._clock = 0.0
        self.recordings: list[FakeRecording] = []
        self.does_wait, self.is_roomy = False, True
        self.error: Exception | None = None  # of what is recorded

    def record(
        self, run: Callable[[], Tally], parameters: Sequence[nn.Parameter], numbers_of: NumbersOf
    ) -> Recording:
        buffers = self.buffers()
        if self.error is not None:
            raise self.error
        self.recordings.append(FakeRecording(run, parameters, numbers_of))
        for buffer, before in buffers:
            buffer.copy_(before)
        return self.recordings[-1]

    def has_room(self) -> bool:
        return self.is_roomy

    def timed(self, run: Callable[[], T]) -> tuple[T, Timing]:
        before = self.num_replays
        result = run()
        is_replay = self.num_replays > before
        self._clock += self.host
        return result, FakeTiming(1e-5 if is_replay else self.host, self.replay if is_replay else self.device)

    def waits(self, run: Callable[[], T]) -> tuple[T, bool]:
        return run(), self.does_wait

    def now(self) -> float:
        self._clock += self.update
        return self._clock

    @property
    def num_replays(self) -> int:
        return sum(recording.num_replays for recording in self.recordings)

    model: nn.Module

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.clone()) for buffer in self.model.buffers()]


def recorded(engine: Engine, recorder: FakeRecorder | None = None) -> tuple[GraphedPasses, FakeRecorder]:
    """Let an engine on the CPU record its passes."""
    runner = engine._runner
    assert isinstance(runner, FlushedRunner)
    recorder = recorder or FakeRecorder()
    recorder.model = engine.module
    runner.graphs = make_graphs(engine._setup, runner, recorder)
    assert runner.graphs is not None
    return runner.graphs, recorder


def train(engine: Engine, steps: int, samples: int = 8) -> list[float]:
    return [engine.step(batch(step, samples)).loss for step in range(steps)]


def engine_of(model: nn.Module, plan: str = "graphs=true precision=fp64", **options: object) -> Engine:
    settings = {"optimizer": adamw, "loss": nn.functional.cross_entropy, "audit": "off", **options}
    return echelon.parallelize(model, plan, **settings)  # type: ignore[arg-type]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def network(*, normalises: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if normalises else nn.LayerNorm(8)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.Tanh(), nn.Linear(8, 3))


def batch(step: int, samples: int = 8) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(samples, 6, generator=numbers), torch.randint(3, (samples,), generator=numbers)


# Steps: the first, whose count of losses is not known yet, warm ones, one that looks at the model, and two
# comparisons.
RECORDED_AFTER = 1 + 4 + 1 + 2
