"""Pipeline parallelism: a model split into stages. What runs them is in `echelon.engine.step.runtime`."""

from echelon.parallel.pipeline.model_split import (
    ModelSplit,
    StageModule,
    Tie,
    check_boundaries,
    even_boundaries,
    keep_only,
    split_model,
)

__all__ = [
    "ModelSplit",
    "StageModule",
    "Tie",
    "check_boundaries",
    "even_boundaries",
    "keep_only",
    "split_model",
]
