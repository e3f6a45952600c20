"""The layers of a stage under a budget: each forward pass in the segments that were chosen for its shapes.

    new shapes        measured, in segments that take about as little memory as any: of single layers, or, if
                      those would keep too many inputs, as long as they save at most half of the budget
    after the step    the choice is made, of all stages of the rank together, and used from then on

With n microbatches of L layers that each save s bytes and take an input of x, segments of k layers keep
n·(L/k)·x + k·s: least, 2·√(n·L·s·x), where both are equal. So a budget for which there is a choice at all is
also enough for the measurement, unless layers differ much from those before them.

Ranks that communicate inside of layers run the same segments: `agree` returns the largest of their numbers.
Ranks along `expert` do so too, and each has microbatches of its own: before each pass they agree on the
shapes of the largest one, for which all of them choose.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.errors import UserError
from echelon.memory.recompute.budget import LayerCost, Segments, StageCosts, choose, evaluate, least_bytes
from echelon.memory.recompute.measured_layers import LayerInput, LayerMeasurement, SavedBytes
from echelon.memory.recompute.segment import LayerRuns, RecomputedLayer, SegmentSettings
from echelon.memory.storages import weight_storages
from echelon.parallel.observer import ForwardPass, StepObserver

Agree = Callable[[Sequence[float]], list[float]]
Shapes = tuple[tuple[tuple[int, ...], str], ...]  # of the tensors that a stage is called with


class BudgetSettings(NamedTuple):
    """The budget of a plan. `agree_shapes`: as `agree`, of ranks with microbatches of their own; None where
    no such ranks communicate inside of layers. `longest`: how many layers a segment may have."""

    num_bytes: int
    agree: Agree
    agree_shapes: Agree | None
    longest: int | None


class StagePass(NamedTuple):
    shapes: Shapes
    layers: list[LayerMeasurement]
    loss: SavedBytes
    outside: SavedBytes  # around the layers
    segments: list[tuple[int, int]]


@final
class BudgetedStage(LayerRuns):
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
        super().__init__(layers, names, settings)
        self._budget, self._in_flight = budget, in_flight
        self.choices: dict[Shapes, Segments] = {}
        self.measured: dict[Shapes, StagePass] = {}  # in this step
        self._agreed: Shapes | None = None  # of the largest microbatch of ranks that each have their own
        self._in_step: Shapes | None = None  # the largest so far
        self._segments: Segments = ()
        self._pass: StagePass | None = None  # that is measured
        self._outside = SavedBytes()  # of the forward pass that runs
        self._seen: set[Shapes] = set()  # what the stage was called with in passes that were measured

    def call(self, layer: RecomputedLayer, args: Any, kwargs: Any) -> Any:
        place = self.layers.index(layer)
        if place == 0:
            self._start_pass(_shapes((args, kwargs)) if self._agreed is None else self._agreed)
            self._outside.is_open &= self._pass is not None
        with self._outside.paused():
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
            self._pass = StagePass(shapes, [], SavedBytes(), self._outside, [])

    # A pass that is measured.

    def _call_measured(self, measured: StagePass, place: int, args: Any, kwargs: Any) -> Any:
        layer = self.layers[place]
        run = self._run(place, follows=self._goes_on(measured, place))
        measurement = LayerMeasurement(
            layer.name,
            (args, kwargs),
            self.settings.inputs,
            layer.history.weight_storages() | measured.outside.storages.keys(),
            self.settings.device,
        )
        is_new, run.watch = run.last is None, measurement.saving
        with measurement.timed():
            output = self._call_in(run, layer, args, kwargs)
        run.watch = None
        measurement.returned(output)
        if place == len(measured.layers):  # and not out of order
            measured.layers.append(measurement)
            begin = place if is_new else measured.segments.pop()[0]
            measured.segments.append((begin, place + 1))
        if len(measured.layers) == len(self.layers):
            self.measured[measured.shapes] = measured
        return output

    def _goes_on(self, measured: StagePass, place: int) -> bool:
        """Return whether a layer belongs to the segment before it: single layers would keep too many inputs,
        and this segment does not yet save half of the budget. Later layers are mostly as the last."""
        if not measured.segments or measured.segments[-1][1] != place:
            return False
        begin, _ = measured.segments[-1]
        if self._budget.longest is not None and place - begin >= self._budget.longest:
            return False
        saved = [layer.saved_bytes for layer in measured.layers]
        inputs = [measured.layers[first].input_bytes for first, _ in measured.segments]
        rest = (len(self.layers) - place) * measured.layers[-1].input_bytes
        kept = sum(self._in_flight) * (sum(inputs) + rest)
        single, longer = self._budget.agree([kept + max(saved), sum(saved[begin:]) + max(saved)])
        return single > self._budget.num_bytes and longer <= self._budget.num_bytes / 2

    @contextmanager
    def during_forward(self, module: nn.Module, value: Any) -> Iterator[None]:
        """Around the whole forward pass of the stage: code before, between and behind layers saves something
        too. Whether the pass is measured is known when the first layer is called."""
        shapes = _shapes(value)
        if torch.is_grad_enabled() and self._budget.agree_shapes is not None:
            shapes = self._agreed = _largest(shapes, self._budget.agree_shapes)
        if shapes in self._seen or not torch.is_grad_enabled():
            yield
            return
        self._outside = SavedBytes(weight_storages(module.modules()))
        with self._outside.count():
            yield
        if self._pass is not None and self._pass.outside is self._outside:
            self._seen.add(shapes)

    @contextmanager
    def during_loss(self) -> Iterator[None]:
        if self._pass is None:
            yield
            return
        with self._pass.loss.count():
            yield

    # The choice.

    @property
    def is_out_of_order(self) -> bool:
        """Return whether a forward pass of this step has not called each layer once, in the known order."""
        return self._pass is not None and self._pass.shapes not in self.measured

    def finish_step(self) -> None:
        self._in_step, self._pass, self._open = None, None, None
        self.measured.clear()

    def costs(self, measured: StagePass) -> StageCosts:
        """Return the costs of a stage: the largest that ranks which run the same segments have measured."""
        layers = measured.layers
        previous = [None, *layers]
        costs = [layer.cost(before) for layer, before in zip(layers, previous, strict=False)]
        costs = _smoothed(costs, [type(layer.module) for layer in self.layers])
        elsewhere = [layer.elsewhere(before) for layer, before in zip(layers, previous, strict=False)]
        outside = _outside_bytes(measured.outside, elsewhere)
        *numbers, loss, outside_bytes = self._budget.agree(
            [*(n for cost in costs for n in _numbers(cost)), measured.loss.total, outside]
        )
        agreed = [
            LayerCost(round(saved), round(size), seconds, round(-reused), round(-shared))
            for saved, size, seconds, reused, shared in zip(*[iter(numbers)] * 5, strict=True)
        ]
        in_flight, waiting = self._in_flight
        last = LayerCost(round(loss), 0, 0.0, can_recompute=False)
        return StageCosts((*agreed, last), in_flight, waiting, round(outside_bytes))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None, "_pass": None, "_outside": SavedBytes(), "measured": {}}


def _outside_bytes(saved: SavedBytes, elsewhere: Sequence[Mapping[int, LayerInput]]) -> int:
    """Return the bytes that code around the layers saves or passes to them, each memory once, with copies."""
    inputs = [item for each in elsewhere for item in each.items()]
    alive = saved.storages | {key: each.kept_bytes for key, each in inputs if each.keeps_memory}
    return sum(alive.values()) + sum(each.kept_bytes for _, each in inputs if not each.keeps_memory)


def _smoothed(costs: Sequence[LayerCost], kinds: Sequence[type]) -> list[LayerCost]:
    """Layers that are alike take the same time: the least of them, since first calls take longer."""
    alike = [(kind, cost.saved, cost.input) for kind, cost in zip(kinds, costs, strict=True)]
    least: dict[object, float] = {}
    for key, cost in zip(alike, costs, strict=True):
        least[key] = min(cost.seconds, least.get(key, cost.seconds))
    return [cost._replace(seconds=least[key]) for key, cost in zip(alike, costs, strict=True)]


def _numbers(cost: LayerCost) -> list[float]:
    """Return the numbers of a cost so that larger is worse."""
    return [cost.saved, cost.input, cost.seconds, -cost.reused, -cost.shared]


def _shapes(arguments: Any) -> Shapes:
    leaves = tree_leaves(arguments)
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves if isinstance(leaf, Tensor))


def _largest(shapes: Shapes, agree: Agree) -> Shapes:
    """Shapes with the largest of each size that ranks have."""
    sizes = iter(agree([size for shape, _ in shapes for size in shape]))
    return tuple((tuple(round(next(sizes)) for _ in shape), dtype) for shape, dtype in shapes)


def _is_no_larger(shapes: Shapes, others: Shapes) -> bool:
    if len(shapes) != len(others):
        return False
    return all(
        dtype == other_dtype
        and len(shape) == len(other)
        and all(a <= b for a, b in zip(shape, other, strict=True))
        for (shape, dtype), (other, other_dtype) in zip(shapes, others, strict=True)
    )


@final
class RankBudget(StepObserver):
    """The budget of a rank, and its stages by number, each with its module."""

    def __init__(
        self, settings: BudgetSettings, stages: Mapping[int, tuple[BudgetedStage, nn.Module]], plan: str
    ) -> None:
        self._settings, self._by_number, self._plan = settings, stages, plan
        self._stages = [stage for stage, _ in stages.values()]
        self._costs: dict[BudgetedStage, StageCosts] = {}  # of the newest shapes
        self._measured: dict[BudgetedStage, Segments] = {}  # the segments in which they were measured
        self._error: UserError | None = None
        self._is_first = True

    def around_layers(self, forward: ForwardPass) -> AbstractContextManager[None]:
        stage, module = self._by_number[forward.slot[0]]
        return stage.during_forward(module, forward.value)

    def around_loss(self, forward: ForwardPass) -> AbstractContextManager[None]:
        stage, _ = self._by_number[forward.slot[0]]
        return stage.during_loss()

    def after_passes(self) -> None:
        """Choose for the shapes that a step has measured, together with ranks that run the same segments."""
        measured = [(stage, each) for stage in self._stages for each in stage.measured.values()]
        for stage, each in measured:
            self._costs[stage], self._measured[stage] = stage.costs(each), tuple(each.segments)
        if measured and len(self._costs) == len(self._stages):
            chosen = dict(zip(self._costs, self._choose(), strict=True))
            for stage, each in measured:
                stage.choices[each.shapes] = chosen[stage]
        if self._is_first and any(stage.is_out_of_order for stage in self._stages):
            self._error = UserError(
                f"plan '{self._plan}': the forward does not call each of the layers once and in their order, "
                "so that no budget can be shared among them; use recompute=full"
            )
        for stage in self._stages:
            stage.finish_step()
        self._is_first = False

    def _choose(self) -> Sequence[Segments]:
        costs, measured = list(self._costs.values()), list(self._measured.values())
        longest, budget = self._settings.longest, self._settings.num_bytes
        choice = choose(costs, budget, longest=longest)
        if choice is None:
            self._tell(least_bytes(costs, longest))
            return measured
        taken = evaluate(costs, measured).peak
        if taken > budget:  # the measurement itself
            self._tell(taken)
        return choice.segments

    def _tell(self, needed: int) -> None:
        """The budget is too small: for a training, or for a batch in the middle of one."""
        message = (
            f"plan '{self._plan}': recompute=budget:{self._settings.num_bytes} is less than what a rank must "
            f"keep for the backward pass even if layers are computed again, at least {needed} bytes; set "
            f"budget:{needed} or more, or make microbatches smaller"
        )
        if self._is_first:
            self._error = UserError(message)
        else:  # ranks of other stages go on, and would wait
            warnings.warn(f"{message}; this batch takes as little as it can", stacklevel=2)

    def check_first_step(self) -> None:
        """Raise if the first step has shown that the budget is too small."""
        error, self._error = self._error, None
        if error is not None:
            raise error
