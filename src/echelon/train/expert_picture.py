"""The picture of what gates did in a training: the share of each expert in the tokens, and the entropy."""

from collections.abc import Sequence
from typing import TypeVar

from echelon.train.charts import Series, line_chart, side_by_side
from echelon.train.events import GateLoad, Stepped

_MOST_LINES = 8  # experts that have a line each; of more, the largest, the median and the smallest
_MOST_PANELS = 12  # gates that have a panel each; of more, some that are spread over the layers
_MOST_POINTS = 200
_WIDTH, _HEIGHT = 480, 280

T = TypeVar("T")


def expert_picture(steps: Sequence[Stepped]) -> str:
    """One panel for each gate, and one for the entropy of all."""
    steps = [step for step in _spread(steps, _MOST_POINTS) if step.experts]
    gates = _spread(range(len(steps[0].experts)), _MOST_PANELS)
    x = [step.step for step in steps]
    panels = []
    for gate in gates:
        loads = [step.experts[gate] for step in steps]
        series = [Series(name, x, y) for name, y in _shares(loads).items()]
        panels.append(line_chart(series, loads[0].gate, "step", "share of tokens", _WIDTH, _HEIGHT))
    names = {gate: steps[0].experts[gate].gate for gate in gates}
    entropies = [Series(names[gate], x, [step.experts[gate].entropy for step in steps]) for gate in gates]
    panels.append(line_chart(entropies, "Entropy of gates", "step", "nats", _WIDTH, _HEIGHT))
    return side_by_side(panels, 2)


def _shares(loads: Sequence[GateLoad]) -> dict[str, list[float]]:
    """Lines by name: the part of the slots that each expert had in each step."""
    shares = [[tokens / (sum(load.tokens) or 1.0) for tokens in load.tokens] for load in loads]
    if len(shares[0]) <= _MOST_LINES:
        return {f"{index}": list(line) for index, line in enumerate(zip(*shares, strict=True))}
    in_order = [sorted(step) for step in shares]
    middle = len(in_order[0]) // 2
    places = {"largest": -1, "median": middle, "smallest": 0}
    return {name: [step[place] for step in in_order] for name, place in places.items()}


def _spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
