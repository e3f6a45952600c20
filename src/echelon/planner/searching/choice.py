"""`auto`: the plan that ranks train with, and why it and no other.

What a model cannot be divided by (tensor ranks, stages) is no choice. Where ranks are cores of a processor,
offload is none either: their host's memory is the same.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from echelon.errors import UserError
from echelon.planner.cluster.cluster import Cluster
from echelon.planner.cluster.read import CPU
from echelon.planner.foresight.prediction import Prediction
from echelon.planner.searching.request import Request
from echelon.planner.searching.search import Found, search
from echelon.planner.shape.shape import ModelShape
from echelon.quantities import show_bytes, show_seconds

_TOP = 10
_SHOWN = 3  # parts of a step, and plans that were not chosen


@final
@dataclass(frozen=True)
class Choice:
    """A plan, the text that says why, and the other plans that fit, fastest first."""

    plan: str
    why: str
    others: tuple[Found, ...]


Refusal = Callable[[str], str | None]  # why a model cannot be trained with a plan, if so


def choose(shape: ModelShape, cluster: Cluster, batch: int, request: Request, refusal: Refusal) -> Choice:
    """Return the fastest plan that fits and that the model can be trained with. If there is none, a UserError
    says what would fit."""
    if request.memory is not None:
        cluster = cluster.limited_to(request.memory)
    impossible = dict(_impossible(cluster.count, request, refusal))
    narrowed = request.fixing(**_without(impossible, cluster, request))
    result = search(shape, cluster, batch, request=narrowed, top=_TOP)
    refused: dict[str, str] = {}
    for index, found in enumerate(result.best):
        reason = refusal(found.plan)
        if reason is None:
            reasons = [*impossible.items(), *refused.items()]
            others = (*result.best[:index], *result.best[index + 1 :])
            unrefused = tuple(each for each in others if each.plan not in refused)
            why = "\n".join(_lines(found, unrefused, cluster, request, result.cut, reasons))
            return Choice(found.plan, why, unrefused)
        refused[found.plan] = reason
    errors = [result.advice] if result.advice else []
    errors += [f"{plan}: {reason}" for plan, reason in (impossible | refused).items()]
    raise UserError(f"plan '{f'auto {request.words}'.strip()}' for {_ranks(cluster)}", errors)


def _impossible(ranks: int, request: Request, refusal: Refusal) -> Iterator[tuple[str, str]]:
    """The axes that the model cannot be divided along, and why."""
    least = next((each for each in range(2, ranks + 1) if ranks % each == 0), 1)
    if least == 1:
        return
    for words in (
        f"tensor={least}",
        f"sequence=true tensor={least}",
        f"context={least}",
        f"pipeline={least}",
    ):
        name = words.partition("=")[0]
        if name in request.fixed:
            continue
        reason = refusal(f"{words} {request.others}".strip())
        if reason is not None:
            yield name, reason


def _without(impossible: Collection[str], cluster: Cluster, request: Request) -> Mapping[str, Any]:
    fixed: dict[str, Any] = {name: False if name == "sequence" else 1 for name in impossible}
    if cluster.device.name == CPU and "offload" not in request.fixed:
        fixed["offload"] = frozenset[str]()
    return fixed


def _lines(
    found: Found,
    others: Collection[Found],
    cluster: Cluster,
    request: Request,
    cut: Mapping[str, int],
    refused: Collection[tuple[str, str]],
) -> Iterator[str]:
    """What a person is told: the plan, its prediction, the next ones, and what was left out."""
    yield f'auto: plan="{found.plan}" for {_ranks(cluster)}; this text as the plan gives the same again'
    yield f"  {_predicted(found.prediction)}"
    next_ones = [f'"{each.plan}" {show_seconds(each.prediction.step_seconds)}' for each in others]
    if next_ones:
        yield f"  next: {', '.join(next_ones[:_SHOWN])}"
    if request.words:
        yield f"  asked for: {request.words}"
    if cut:
        yield f"  left out: {', '.join(f'{count:,} plans {reason}' for reason, count in cut.items())}"
    yield from (f"  not possible: {name}: {reason}" for name, reason in refused)


def _predicted(prediction: Prediction) -> str:
    parts = sorted(prediction.seconds._asdict().items(), key=lambda part: -part[1])
    shown = [f"{name} {show_seconds(size)}" for name, size in parts if size and name != "hidden"]
    return (
        f"predicted: a step of {show_seconds(prediction.step_seconds)} ({', '.join(shown[:_SHOWN])}), "
        f"{show_bytes(prediction.peak)} at the peak"
    )


def _ranks(cluster: Cluster) -> str:
    each = f"{cluster.device.name} with {show_bytes(cluster.device.memory)}"
    return f"1 rank, a {each}" if cluster.count == 1 else f"{cluster.count} ranks, each a {each}"
