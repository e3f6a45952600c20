"""The layers of a stage under a budget: each forward pass in the segments that were chosen for its shapes.

    new shapes        measured, in segments that take about as little memory as any: a segment goes on until
                      it would save more than half of the budget
    after the step    the choice is made, of all stages of the rank together, and used from then on

With n microbatches of L layers that each save s bytes and take an input of x, segments of k layers keep
n·(L/k)·x + k·s: least, 2·√(n·L·s·x), where both are equal. So a budget for which there is a choice at all is,
but for layers that are much larger than others, also enough for the measurement.

Ranks that communicate inside of layers run the same segments: `agree` returns the largest of their numbers.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.errors import UserError
from echelon.recompute.budget import choose, least_bytes
from echelon.recompute.budget_model import LayerCost, Segments, StageCosts
from echelon.recompute.measured_layers import LayerMeasurement, SavedBytes
from echelon.recompute.segment import RecomputedLayer, Run, SegmentSettings
from echelon.wrapping import Wrapping

Agree = Callable[[Sequence[float]], list[float]]
Shapes = tuple[tuple[tuple[int, ...], str], ...]  # of the tensors that a stage is called with


class BudgetSettings(NamedTuple):
    """What a plan says about a budget. `longest`: how many layers a segment may have; `parts`: in how many
    parts ranks keep inputs; `keeps_memory`: they keep them where they are."""

    num_bytes: int
    agree: Agree
    longest: int | None = None
    parts: int = 1
    keeps_memory: bool = True


class StagePass(NamedTuple):
    """What a measured forward pass has shown."""

    shapes: Shapes
    layers: list[LayerMeasurement]
    loss: SavedBytes
    segments: list[tuple[int, int]]


@final
class BudgetedStage:
    """Calls the layers of one stage, alone or in runs."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        names: Sequence[str],
        settings: SegmentSettings,
        budget: BudgetSettings,
        in_flight: tuple[int, int],
    ) -> None:
        """`in_flight`: microbatches before their backward pass, and between its halves."""
        self._settings, self._budget, self._in_flight = settings, budget, in_flight
        self.layers = [RecomputedLayer(layer, name, self) for layer, name in zip(layers, names, strict=True)]
        self.choices: dict[Shapes, Segments] = {}
        self.measured: dict[Shapes, StagePass] = {}  # in this step
        self._in_step: Shapes | None = None  # the largest so far
        self._segments: Segments = ()
        self._pass: StagePass | None = None  # that is measured
        self._open: weakref.ref[Run] | None = None  # what the next layer goes on with

    def wrap(self, wrapping: Wrapping) -> None:
        for layer in self.layers:
            wrapping.wrap(layer)

    def call(self, layer: RecomputedLayer, args: Any, kwargs: Any) -> Any:
        place = self.layers.index(layer)
        if place == 0:
            self._start_pass(_shapes((args, kwargs)))
        if self._pass is not None:
            return self._call_measured(self._pass, place, args, kwargs)
        segment = next((s for s in self._segments if s[0] <= place < s[1]), None)
        if segment is None:
            return layer.inner(*args, **kwargs)
        return self._call_in(self._run(place, follows=place > segment[0]), layer, args, kwargs)

    def _start_pass(self, shapes: Shapes) -> None:
        """A forward pass begins. A microbatch that is no larger than another one of the step takes the same
        segments: both may be in flight at once."""
        if self._in_step is None or not _is_no_larger(shapes, self._in_step):
            self._in_step = shapes
        shapes, self._pass, self._open = self._in_step, None, None
        if shapes in self.choices:
            self._segments = self.choices[shapes]
        elif shapes in self.measured:
            self._segments = tuple(self.measured[shapes].segments)
        else:
            self._pass = StagePass(shapes, [], SavedBytes(), [])

    def _run(self, place: int, *, follows: bool) -> Run:
        run = None if self._open is None else self._open()
        goes_on = run is not None and follows and run.last is self.layers[place - 1]
        return run if run is not None and goes_on else Run(self._settings)

    def _call_in(self, run: Run, layer: RecomputedLayer, args: Any, kwargs: Any) -> Any:
        self._open = None
        output = run.call_first(layer, args, kwargs)
        self._open = weakref.ref(run)
        return output

    # A pass that is measured.

    def _call_measured(self, measured: StagePass, place: int, args: Any, kwargs: Any) -> Any:
        layer = self.layers[place]
        run = self._run(place, follows=self._goes_on(measured, place))
        device = self._settings.device
        measurement = LayerMeasurement((args, kwargs), layer.history.weight_storages(), device)
        is_new, run.watch = run.last is None, measurement.saving
        with measurement.timed():
            output = self._call_in(run, layer, args, kwargs)
        run.watch = None
        measurement.returned(output)
        if place == len(measured.layers):  # and not out of turn
            measured.layers.append(measurement)
            begin = place if is_new else measured.segments.pop()[0]
            measured.segments.append((begin, place + 1))
        if len(measured.layers) == len(self.layers):
            self.measured[measured.shapes] = measured
        return output

    def _goes_on(self, measured: StagePass, place: int) -> bool:
        """Whether a layer belongs to the segment before it."""
        if not measured.segments or measured.segments[-1][1] != place:
            return False
        begin, _ = measured.segments[-1]
        if self._budget.longest is not None and place - begin >= self._budget.longest:
            return False
        inside = sum(each.saved_bytes for each in measured.layers[begin:place])
        expected = measured.layers[place - 1].saved_bytes  # layers are mostly alike
        (largest,) = self._budget.agree([float(inside + expected)])
        return largest <= self._budget.num_bytes / 2

    @contextmanager
    def during_loss(self) -> Iterator[None]:
        """Around the loss, which saves something too."""
        if self._pass is None:
            yield
            return
        with self._pass.loss.count():
            yield

    # The choice.

    def finish_step(self) -> None:
        self._in_step, self._pass, self._open = None, None, None

    def costs(self, measured: StagePass) -> StageCosts:
        """What ranks that run the same segments have measured, the largest of each."""
        layers = measured.layers
        previous = [None, *layers]
        costs = [
            layer.cost(before, self._budget.parts, keeps_memory=self._budget.keeps_memory)
            for layer, before in zip(layers, previous, strict=False)
        ]
        costs = _smoothed(costs, [type(layer.module) for layer in self.layers])
        elsewhere: dict[int, int] = {}
        for layer, before in zip(layers, previous, strict=False):
            elsewhere |= layer.elsewhere(before)
        numbers = [float(number) for cost in costs for number in cost[:3]]
        numbers += [-float(number) for cost in costs for number in cost[3:5]]  # what is not there again
        *numbers, outside = self._budget.agree(
            [*numbers, float(measured.loss.total + sum(elsewhere.values()))]
        )
        agreed = list(_agreed_costs(numbers))
        in_flight, waiting = self._in_flight
        last = LayerCost(round(outside), 0, 0.0, can_recompute=False)
        return StageCosts((*agreed, last), in_flight, waiting)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None, "_pass": None, "measured": {}}


def _smoothed(costs: Sequence[LayerCost], kinds: Sequence[type]) -> list[LayerCost]:
    """Layers that are alike take the same time: the least of them, since first calls take longer."""
    alike = [(kind, cost.saved, cost.input) for kind, cost in zip(kinds, costs, strict=True)]
    least: dict[object, float] = {}
    for key, cost in zip(alike, costs, strict=True):
        least[key] = min(cost.seconds, least.get(key, cost.seconds))
    return [cost._replace(seconds=least[key]) for key, cost in zip(alike, costs, strict=True)]


def _agreed_costs(numbers: Sequence[float]) -> Iterator[LayerCost]:
    count = len(numbers) // 5
    for index in range(count):
        saved, size, seconds = numbers[3 * index : 3 * index + 3]
        reused, shared = numbers[3 * count + 2 * index : 3 * count + 2 * index + 2]
        yield LayerCost(round(saved), round(size), seconds, round(-reused), round(-shared))


@final
class RankBudget:
    """The budget of a rank, and its stages."""

    def __init__(self, settings: BudgetSettings, stages: Sequence[BudgetedStage], plan: str) -> None:
        self._settings, self._stages, self._plan = settings, list(stages), plan
        self._costs: dict[BudgetedStage, StageCosts] = {}
        self._error: UserError | None = None
        self._is_first = True

    def finish_step(self) -> None:
        """The passes of a step are over: choose for the shapes that it has measured. Ranks that run the same
        segments call this together."""
        measured = [(stage, each) for stage in self._stages for each in stage.measured.values()]
        for stage, each in measured:
            self._costs[stage] = stage.costs(each)
        if measured and len(self._costs) == len(self._stages):
            segments = self._choose(list(self._costs.values()))
            chosen = dict(zip(self._costs, segments, strict=True))
            for stage, each in measured:
                stage.choices[each.shapes] = chosen[stage]
        for stage in self._stages:
            stage.measured.clear()
            stage.finish_step()
        self._is_first = False

    def _choose(self, costs: list[StageCosts]) -> Sequence[Segments]:
        longest, num_bytes = self._settings.longest, self._settings.num_bytes
        choice = choose(costs, num_bytes, longest=longest)
        if choice is not None:
            return choice.segments
        least = least_bytes(costs, longest)
        message = (
            f"plan '{self._plan}': recompute=budget:{num_bytes} is less than what a rank keeps for the "
            f"backward pass when layers are computed again, at least {least} bytes; set budget:{least} or "
            "more, or make microbatches smaller"
        )
        if self._is_first:
            self._error = UserError(message)
        else:  # other ranks go on, and would wait
            warnings.warn(f"{message}; this batch takes as little as it can", stacklevel=2)
        choice = choose(costs, least, longest=longest)
        assert choice is not None
        return choice.segments

    def check(self) -> None:
        """Raise if the first step has shown that the budget is too small."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _shapes(arguments: Any) -> Shapes:
    leaves = tree_leaves(arguments)
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves if isinstance(leaf, Tensor))


def _is_no_larger(shapes: Shapes, others: Shapes) -> bool:
    if len(shapes) != len(others):
        return False
    return all(
        dtype == other_dtype
        and len(shape) == len(other)
        and all(a <= b for a, b in zip(shape, other, strict=True))
        for (shape, dtype), (other, other_dtype) in zip(shapes, others, strict=True)
    )
