"""The plans that a search considers: every way to share a model among all devices of a cluster.

A layout says which ranks work together and in which order; what only trades memory for time (zero,
recompute, offload) is a variant of it. `layouts` leaves out nothing that the engine runs, but for schedules
that are never faster than another one here (naive, gpipe) or train with old weights (pipedream…). A request
may fix any word, also to one of these.
"""

from collections.abc import Iterator

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.checks import shape_errors
from echelon.planner.foresight.settings import Settings, summed_bytes
from echelon.planner.searching.request import Request
from echelon.planner.shape.shape import ModelShape

_MOST_CHUNKS = 16
_LEAST_PART = 1024  # tokens of a sequence on a rank: shorter parts are not worth the messages


def layouts(shape: ModelShape, cluster: Cluster, batch: int, request: Request) -> Iterator[Settings]:
    """Every layout over all devices. `zero` is 1 where it shards something."""
    for tensor in _divisors(cluster.count, min(cluster.per_node, shape.kv_heads)):
        for context in _divisors(cluster.count // tensor, max(1, shape.sequence // _LEAST_PART)):
            for pipeline in _divisors(cluster.count // tensor // context, shape.layers):
                data = cluster.count // tensor // context // pipeline
                if batch % data:
                    continue
                for expert in _expert_degrees(shape, data):
                    layout = request.base._replace(
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        expert_tensor=tensor,
                        sequence=tensor > 1 and bool(request.fixed.get("sequence", True)),
                        zero=1 if data * context > 1 else 0,
                        recompute="none",
                        budget=0.0,
                        offload=frozenset(),
                        chunks=1,
                        shard=0,
                        schedule="1f1b",
                    )
                    allowed = request.allows(layout, "data", "tensor", "pipeline", "context", "expert")
                    if allowed and not shape_errors(shape, layout):
                        yield from _orders(shape, layout, batch, request)


def _divisors(number: int, most: int) -> Iterator[int]:
    return (each for each in range(1, min(number, most) + 1) if number % each == 0)


def _expert_degrees(shape: ModelShape, data: int) -> Iterator[int]:
    if shape.experts is None:
        return iter((1,))
    number = shape.experts.number
    return (each for each in _divisors(data, number) if number % each == 0)


def _orders(shape: ModelShape, layout: Settings, batch: int, request: Request) -> Iterator[Settings]:
    """Numbers of microbatches, schedules and chunks."""
    each, sums = batch // layout.data, request.values.get("gradients") != "same"
    for microbatches in _divisors(each, each):
        flat = layout._replace(microbatches=microbatches)
        if sums:
            gradient = summed_bytes(layout.precision, microbatches, layout.copies)
            flat = flat._replace(gradient_bytes=gradient, message_bytes=gradient)
        if request.allows(flat, "microbatches"):
            yield from _schedules(shape, flat, request)


def _schedules(shape: ModelShape, flat: Settings, request: Request) -> Iterator[Settings]:
    stages, fixed = flat.pipeline, request.fixed.get("schedule", "1f1b")
    if fixed not in ("zero-bubble", "interleaved") and request.fixed.get("chunks", 1) == 1:
        yield flat._replace(schedule=fixed)
    if stages == 1:
        return
    if request.allows(bubbleless := flat._replace(schedule="zero-bubble"), "schedule", "chunks"):
        yield bubbleless
    if flat.microbatches % stages == 0:
        for chunks in range(2, min(_MOST_CHUNKS, shape.layers // stages) + 1):
            interleaved = flat._replace(schedule="interleaved", chunks=chunks)
            is_even = any((shape.layers + ends) % (stages * chunks) == 0 for ends in (0, 1, 2))
            if is_even and request.allows(interleaved, "schedule", "chunks"):
                yield interleaved


RECOMPUTES = ("none", "selective", "full")  # each takes more time than the one before, and less memory
OFFLOADS = (frozenset[str](), frozenset({"optimizer"}), frozenset({"optimizer", "activations"}))


def savers(layout: Settings, request: Request) -> Iterator[Iterator[Settings]]:
    """For each level of offload, the levels of recompute: more of either is never faster."""
    for offload in _offloads(request):
        yield (
            layout._replace(recompute=recompute, budget=request.base.budget, offload=offload)
            for recompute in _recomputes(request)
        )


def _offloads(request: Request) -> tuple[frozenset[str], ...]:
    return (request.fixed["offload"],) if "offload" in request.fixed else OFFLOADS


def _recomputes(request: Request) -> tuple[str, ...]:
    return (request.base.recompute,) if "recompute" in request.fixed else RECOMPUTES


def shardings(layout: Settings, per_node: int, request: Request) -> Iterator[Settings]:
    """What ranks along `data` share, and over how many of them."""
    return (
        each for each in _all_shardings(layout, per_node, request) if request.allows(each, "zero", "shard")
    )


def _all_shardings(layout: Settings, per_node: int, request: Request) -> Iterator[Settings]:
    yield layout._replace(zero=0)
    copies = layout.copies
    if copies == 1:
        return
    inside = request.fixed.get("shard", per_node // layout.tensor)
    shards = [0]
    if 1 < inside < copies and copies % inside == 0 and layout.expert == 1:
        shards.append(inside)
    for zero in (1, 2, 3):
        if zero == 3 and layout.schedule == "zero-bubble":
            continue
        yield from (layout._replace(zero=zero, shard=shard) for shard in shards)


def smallest(layout: Settings, request: Request) -> Settings:
    """The variant of a layout, sharded as it is, that takes the least memory."""
    return layout._replace(
        recompute=_recomputes(request)[-1], budget=request.base.budget, offload=_offloads(request)[-1]
    )


def most_sharded(layout: Settings, request: Request) -> Settings:
    """The layout with as much sharded as the engine can, and the request allows."""
    zero = 0 if layout.copies == 1 else 2 if layout.schedule == "zero-bubble" else 3
    return layout._replace(zero=request.fixed.get("zero", zero), shard=request.fixed.get("shard", 0))


def plan_text(settings: Settings, others: str = "") -> str:
    """The plan as words: 'data=4 tensor=8 precision=bf16'. `others`: words that no search chooses."""
    values = {
        "data": settings.data,
        "tensor": settings.tensor,
        "pipeline": settings.pipeline,
        "expert": settings.expert,
        "context": settings.context,
        "zero": settings.zero,
        "shard": settings.shard,
        "microbatches": settings.microbatches,
        "chunks": settings.chunks,
    }
    defaults = {"zero": 0, "shard": 0}
    words = [f"{name}={value}" for name, value in values.items() if value != defaults.get(name, 1)]
    if settings.pipeline > 1:
        words.append(f"schedule={settings.schedule}")
    if settings.sequence:
        words.append("sequence=true")
    if others:
        words.append(others)
    if settings.recompute != "none":
        budget = f":{settings.budget:.0f}" if settings.recompute == "budget" else ""
        words.append(f"recompute={settings.recompute}{budget}")
    if settings.offload:
        words.append(f"offload={','.join(sorted(settings.offload, reverse=True))}")
    return " ".join(words) or "data=1"
