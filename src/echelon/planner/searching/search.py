"""`search`: the fastest plans that fit, of all that `space` has. Exact: what is cut is proven slower.

    1  of each layout, a bound of its time: nothing recomputed, nothing sharded, nothing offloaded
    2  layouts in the order of that bound; of each, for each way of sharding, the fastest that fits
    3  the end: a layout's bound is above the slowest of the best so far. All others are slower still

The bound holds because zero, recompute and offload add work and messages, and take none away.
"""

import heapq
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from echelon.errors import UserError, raise_errors
from echelon.plan import Plan
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.predict import Forecast, forecast_of
from echelon.planner.foresight.prediction import Prediction
from echelon.planner.foresight.settings import ADAM, Settings
from echelon.planner.searching.request import Request
from echelon.planner.searching.space import layouts, most_sharded, plan_text, savers, shardings, smallest
from echelon.planner.shape.shape import ModelShape
from echelon.quantities import show_bytes

_MOST_DEVICES = 2**17  # for which a fit is looked for


class Found(NamedTuple):
    """A plan that fits, and its prediction."""

    plan: str
    prediction: Prediction


@dataclass(frozen=True)
class SearchResult:
    """The best plans, fastest first; why others were cut, by reason; what would fit, if nothing does."""

    best: tuple[Found, ...]
    cut: dict[str, int]
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "plans": [{"plan": each.plan, **each.prediction.to_dict()} for each in self.best],
            "cut": self.cut,
            "advice": self.advice or None,
        }


def search(
    shape: ModelShape,
    cluster: Cluster,
    batch: int,
    *,
    sequence: int | None = None,
    precision: str = "bf16",
    top: int = 10,
    optimizer: str = ADAM,
    request: Request | None = None,
) -> SearchResult:
    """Return the `top` fastest plans that train `shape` on all devices of `cluster`, in this precision and
    with this optimizer, or as the request says."""
    request = Request(f"precision={precision}", optimizer=optimizer) if request is None else request
    if batch < 1:
        raise_errors("the search", [f"batch={batch}: a step has at least 1 sequence"])
    if sequence is not None:
        shape = replace(shape, sequence=sequence)
    forecast = forecast_of(shape, cluster)
    cut: Counter[str] = Counter()
    best = _best(forecast, batch, request, top, cut)
    advice = "" if best else _advice(shape, cluster, batch, request)
    return SearchResult(tuple(best), dict(cut), advice)


def _best(forecast: Forecast, batch: int, request: Request, top: int, cut: Counter[str]) -> list[Found]:
    """The fastest plans that fit, in order."""
    bounded = [
        (_bound(forecast.predict(layout, batch)), index, layout)
        for index, layout in enumerate(layouts(forecast.shape, forecast.cluster, batch, request))
    ]
    heapq.heapify(bounded)
    best: list[tuple[float, str, Found]] = []
    while bounded:
        bound, _, layout = heapq.heappop(bounded)
        if len(best) == top and bound > best[-1][0]:
            cut["slower, whatever their memory"] += 1 + len(bounded)
            break
        if not forecast.predict(smallest(most_sharded(layout, request), request), batch).fits:
            cut["too large, with all savers"] += 1
            continue
        for sharded in shardings(layout, forecast.cluster.per_node, request):
            if not forecast.predict(smallest(sharded, request), batch).fits:
                cut["too large"] += 1
                continue
            _add_fastest(forecast, sharded, batch, request, top, best, cut)
    return [each[-1] for each in best]


def _add_fastest(
    forecast: Forecast,
    layout: Settings,
    batch: int,
    request: Request,
    top: int,
    best: list[tuple[float, str, Found]],
    cut: Counter[str],
) -> None:
    """Add the fastest variants of a layout that fit: with the least recomputation for each level of offload,
    and no more offload once nothing is recomputed."""
    for variants in savers(layout, request):
        for settings in variants:
            prediction = forecast.predict(settings, batch)
            if not prediction.fits:
                cut["too large"] += 1
                continue
            _consider(settings, prediction, request.others, top, best, cut)
            if settings.recompute == "none":
                return
            break


def _consider(
    settings: Settings,
    prediction: Prediction,
    others: str,
    top: int,
    best: list[tuple[float, str, Found]],
    cut: Counter[str],
) -> None:
    seconds = prediction.step_seconds
    if len(best) == top and seconds >= best[-1][0]:
        cut["slower"] += 1
    elif (refusal := _refusal(plan_text(settings, others))) is not None:
        cut[refusal] += 1
    else:
        text = plan_text(settings, others)
        best.append((seconds, text, Found(text, prediction)))
        best.sort(key=lambda each: each[:2])
        del best[top:]


def _bound(prediction: Prediction) -> float:
    """Seconds that no variant of a layout can go below."""
    seconds = prediction.seconds
    return seconds.step - seconds.data - seconds.optimizer - seconds.offload - seconds.stragglers


def _refusal(text: str) -> str | None:
    """Why the engine refuses a plan: nothing, for almost all."""
    try:
        Plan.parse(text)
    except UserError as error:
        return error.errors[0] if error.errors else str(error)
    return None


def _advice(shape: ModelShape, cluster: Cluster, batch: int, request: Request) -> str:
    """What would fit where nothing does: more devices, or the least memory that a device would need."""
    least = _least_memory(shape, cluster, batch, request)
    if least is None:
        return (
            f"no plan divides {cluster.count} devices, a batch of {batch} and '{shape.name}' evenly: "
            f"use a batch that is a multiple of {cluster.count}"
        )
    capacity = show_bytes(cluster.device.memory)
    found = f"does not fit: the smallest plan needs {show_bytes(least)} per device, which has {capacity}"
    count = cluster.count
    while count < _MOST_DEVICES:
        count *= 2
        scaled = batch * max(1, count // cluster.count)
        if _fits(shape, replace(cluster, count=count), scaled, request):
            return f"{found}; it fits from {count} devices, with a batch of {scaled}"
    return found


def _least_memory(shape: ModelShape, cluster: Cluster, batch: int, request: Request) -> float | None:
    forecast = forecast_of(shape, cluster)
    sizes = (
        forecast.predict(smallest(most_sharded(layout, request), request), batch).peak
        for layout in layouts(shape, cluster, batch, request)
    )
    return min(sizes, default=None)


def _fits(shape: ModelShape, cluster: Cluster, batch: int, request: Request) -> bool:
    forecast = forecast_of(shape, cluster)
    return any(
        forecast.predict(smallest(most_sharded(layout, request), request), batch).fits
        for layout in layouts(shape, cluster, batch, request)
    )
