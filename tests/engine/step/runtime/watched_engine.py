"""An engine of a small model, and a look at every instruction that it executes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import echelon
from echelon.engine import Engine
from echelon.program import Instruction
from tests.cases import mean_loss, sgd
from tests.parallel.pipeline.models import perceptron

Watch = Callable[[Instruction], None]


def engine_for(plan: str, model: nn.Module | None = None, **options: Any) -> Engine:
    torch.manual_seed(0)
    given = {"optimizer": sgd, "loss": mean_loss} | options
    return echelon.parallelize(perceptron() if model is None else model, plan, **given)


def watch(engine: Engine, after: Watch) -> None:
    """Call `after` with every instruction that was executed."""
    do = engine._runner._interpreter._do

    def watched(instruction: Instruction, inner: Watch) -> None:
        inner(instruction)
        after(instruction)

    for op, inner in list(do.items()):
        do[op] = lambda instruction, inner=inner: watched(instruction, inner)
