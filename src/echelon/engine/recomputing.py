"""recompute=full, sqrt: the layers of a stage in segments, which run again in the backward pass."""

import torch
from torch import nn

from echelon.errors import UserError
from echelon.layering import how_to_list, listed_layers
from echelon.plan import Plan
from echelon.recompute import (
    SecondRunCheck,
    Segment,
    SegmentSettings,
    WholeCheckpoints,
    divide,
    goes_back_at_once,
)
from echelon.runtime import LocalStages
from echelon.sequence import View
from echelon.wrapping import Wrapping


def recompute_layers(
    local: LocalStages, plan: Plan, view: View, device: torch.device, wrapping: Wrapping
) -> None:
    """If the plan says so, let the layers of this rank's stages drop what autograd saves."""
    if plan.recompute == "none":
        return
    check = SecondRunCheck()
    for number, stage in local.stages.items():
        layers = _layers(stage.module, plan)
        first = [0, *local.boundaries][number]
        names = {
            layer: f"layer {first + index} ({type(layer).__name__})" for index, layer in enumerate(layers)
        }
        segments = divide(list(names), plan.recompute)
        if goes_back_at_once(local.program, number):
            segments = segments[:-1]
        settings = SegmentSettings(device, view, check, WholeCheckpoints(), stage.second_run)
        for segment in segments:
            Segment(segment, [names[layer] for layer in segment], settings).wrap(wrapping)
        stage.check_second_runs = check.decide


def _layers(module: nn.Module, plan: Plan) -> list[nn.Module]:
    layers = listed_layers(module)
    if not layers:
        raise UserError(
            f"plan '{plan}': {type(module).__name__} lists no layers, which would run again; "
            f"{how_to_list(module)}"
        )
    return layers
