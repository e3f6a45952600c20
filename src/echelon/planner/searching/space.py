"""The plans that a search considers: every way to share a model among all devices of a cluster.

A layout says which ranks work together and in which order; what only trades memory for time (zero,
recompute, offload) is a variant of it. `layouts` leaves out nothing that the engine runs, but for schedules
that are never faster than another one here (naive, gpipe) or train with old weights (pipedream…).
"""

from collections.abc import Iterator

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.checks import shape_errors
from echelon.planner.foresight.kernels import BYTES
from echelon.planner.foresight.settings import Settings, summed_bytes
from echelon.planner.shape.shape import ModelShape

_MOST_CHUNKS = 16
_LEAST_PART = 1024  # tokens of a sequence on a rank: shorter parts are not worth the messages


def layouts(shape: ModelShape, cluster: Cluster, batch: int, precision: str) -> Iterator[Settings]:
    """Every layout over all devices. `zero` is 1 where it shards something."""
    size = float(BYTES[precision])
    is_narrow = precision in ("bf16", "fp16")
    base = Settings(
        precision=precision,
        weight_bytes=size,
        optimizer_bytes=12.0 if is_narrow else 2 * size,
    )
    for tensor in _divisors(cluster.count, min(cluster.per_node, shape.kv_heads)):
        for context in _divisors(cluster.count // tensor, max(1, shape.sequence // _LEAST_PART)):
            for pipeline in _divisors(cluster.count // tensor // context, shape.layers):
                data = cluster.count // tensor // context // pipeline
                if batch % data:
                    continue
                for expert in _expert_degrees(shape, data):
                    layout = base._replace(
                        data=data,
                        tensor=tensor,
                        pipeline=pipeline,
                        context=context,
                        expert=expert,
                        expert_tensor=tensor,
                        sequence=tensor > 1,
                        zero=1 if data * context > 1 else 0,
                    )
                    if not shape_errors(shape, layout):
                        yield from _orders(shape, layout, batch)


def _divisors(number: int, most: int) -> Iterator[int]:
    return (each for each in range(1, min(number, most) + 1) if number % each == 0)


def _expert_degrees(shape: ModelShape, data: int) -> Iterator[int]:
    if shape.experts is None:
        return iter((1,))
    number = shape.experts.number
    return (each for each in _divisors(data, number) if number % each == 0)


def _orders(shape: ModelShape, layout: Settings, batch: int) -> Iterator[Settings]:
    """Numbers of microbatches, schedules and chunks."""
    each, stages = batch // layout.data, layout.pipeline
    for microbatches in _divisors(each, each):
        gradient = summed_bytes(layout.precision, microbatches, layout.copies)
        flat = layout._replace(microbatches=microbatches, gradient_bytes=gradient, message_bytes=gradient)
        yield flat
        if stages == 1:
            continue
        yield flat._replace(schedule="zero-bubble")
        if microbatches % stages == 0:
            for chunks in range(2, min(_MOST_CHUNKS, shape.layers // stages) + 1):
                if any((shape.layers + ends) % (stages * chunks) == 0 for ends in (0, 1, 2)):
                    yield flat._replace(schedule="interleaved", chunks=chunks)


RECOMPUTES = ("none", "selective", "full")  # each takes more time than the one before, and less memory
OFFLOADS = (frozenset[str](), frozenset({"optimizer"}), frozenset({"optimizer", "activations"}))


def savers(layout: Settings) -> Iterator[Iterator[Settings]]:
    """For each level of offload, the levels of recompute: more of either is never faster."""
    for offload in OFFLOADS:
        yield (layout._replace(recompute=recompute, offload=offload) for recompute in RECOMPUTES)


def shardings(layout: Settings, per_node: int) -> Iterator[Settings]:
    """What ranks along `data` share, and over how many of them."""
    yield layout._replace(zero=0)
    copies = layout.copies
    if copies == 1:
        return
    inside = per_node // layout.tensor
    shards = [0]
    if 1 < inside < copies and copies % inside == 0 and layout.expert == 1:
        shards.append(inside)
    for zero in (1, 2, 3):
        if zero == 3 and layout.schedule == "zero-bubble":
            continue
        yield from (layout._replace(zero=zero, shard=shard) for shard in shards)


def smallest(layout: Settings) -> Settings:
    """The variant of a layout, sharded as it is, that takes the least memory."""
    return layout._replace(recompute="full", offload=OFFLOADS[-1])


def most_sharded(layout: Settings) -> Settings:
    """The layout with as much sharded as the engine can."""
    zero = 0 if layout.copies == 1 else 2 if layout.schedule == "zero-bubble" else 3
    return layout._replace(zero=zero)


def plan_text(settings: Settings) -> str:
    """The plan as words: 'data=4 tensor=8 precision=bf16'."""
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
    words.append(f"precision={settings.precision}")
    if settings.recompute != "none":
        words.append(f"recompute={settings.recompute}")
    if settings.offload:
        words.append(f"offload={','.join(sorted(settings.offload, reverse=True))}")
    return " ".join(words)
