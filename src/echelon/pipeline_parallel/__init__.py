"""Pipelines: models in stages, and the interpreter that runs a program over them."""

from echelon.pipeline_parallel.interpreter import Interpreter, Microbatch, Replicas, Script, Task
from echelon.pipeline_parallel.stages import (
    Split,
    Stage,
    Tie,
    check_boundaries,
    even_boundaries,
    keep_only,
    split,
    start_equal,
)
from echelon.pipeline_parallel.structure import Spec
from echelon.pipeline_parallel.versions import Versions
from echelon.pipeline_parallel.wire import Wire

__all__ = [
    "Interpreter",
    "Microbatch",
    "Replicas",
    "Script",
    "Spec",
    "Split",
    "Stage",
    "Task",
    "Tie",
    "Versions",
    "Wire",
    "check_boundaries",
    "even_boundaries",
    "keep_only",
    "split",
    "start_equal",
]
