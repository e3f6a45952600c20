"""What a plan asks of a model, a batch and a cluster, before anything is predicted: every error at once."""

from echelon.planner.cluster.cluster import Cluster
from echelon.planner.foresight.settings import Settings
from echelon.planner.shape.shape import ModelShape


def fit_errors(shape: ModelShape, settings: Settings, cluster: Cluster, batch: int) -> list[str]:
    """List what does not fit together."""
    errors = []
    if settings.ranks > cluster.count:
        errors.append(
            f"the plan has {settings.ranks} ranks, the cluster {cluster.count} devices: use a smaller plan, "
            f"or {cluster.device.name}:{settings.ranks}"
        )
    parts = settings.data * settings.microbatches
    if batch < 1 or batch % parts:
        errors.append(
            f"batch={batch} data={settings.data} microbatches={settings.microbatches}: each microbatch has "
            f"equally many sequences; make the batch a multiple of {parts}"
        )
    return [*errors, *shape_errors(shape, settings)]


def shape_errors(shape: ModelShape, settings: Settings) -> list[str]:
    """List what does not divide."""
    errors = []
    for count, kind in ((shape.heads, "heads"), (shape.kv_heads, "key/value heads")):
        if count % settings.tensor:
            errors.append(
                f"tensor={settings.tensor}: {count} {kind} do not divide evenly; use a divisor of {count}"
            )
    if settings.pipeline * settings.chunks > shape.layers:
        errors.append(
            f"pipeline={settings.pipeline} chunks={settings.chunks}: {shape.layers} layers are too few; use "
            f"at most {shape.layers} stages"
        )
    if shape.sequence % settings.context:
        errors.append(
            f"context={settings.context}: a sequence of {shape.sequence} tokens does not divide evenly"
        )
    if settings.expert > 1:
        if shape.experts is None:
            errors.append(f"expert={settings.expert}: '{shape.name}' has no experts; use expert=1")
        elif shape.experts.number % settings.expert:
            errors.append(
                f"expert={settings.expert}: {shape.experts.number} experts do not divide evenly; use a "
                f"divisor of {shape.experts.number}"
            )
    return errors
