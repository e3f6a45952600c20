"""compress=gist, gist-fp16, gist-fp10, gist-fp8: what layers save for the backward pass is kept encoded."""

import warnings
from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from echelon.collectives.mesh import Mesh
from echelon.memory.gist import CompressedLayer, CompressedModule, Compression, can_compress
from echelon.memory.gist.settings import SMALLEST
from echelon.nn.layering import listed_layers
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, unwrap
from echelon.parallel.observer import Observers, StepObserver
from echelon.plan import Plan


def compress_layers(
    stages: Sequence[nn.Module], mesh: Mesh, wrapping: Wrapping, observers: Observers
) -> None:
    """If the plan says so, let the layers that the stages list encode what they save; a model that lists
    none, as a whole. Rank 0 says if there was nothing to encode."""
    _unwrap_earlier(stages)
    if mesh.plan.compress == "none":
        return
    compression = Compression.of(mesh.plan.compress)
    for stage in stages:
        inside = list(stage.modules())
        for module in filter(can_compress, inside):
            wrapping.wrap(CompressedModule(module, compression))
        listed = [layer for layer in listed_layers(stage) if layer in inside]
        for layer in dict.fromkeys(listed or [stage]):
            if not can_compress(layer):
                wrapping.wrap(CompressedLayer(layer, compression))
    if mesh.rank == 0:
        observers.add(CompressionReport(compression, mesh.plan, mesh.device))


def _unwrap_earlier(stages: Sequence[nn.Module]) -> None:
    """Take away what an engine that was not closed has put around the layers, or around other layers."""
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        for kind in (CompressedLayer, CompressedModule):
            previous: Wrapper | None = find_wrapper(module, kind)
            if previous is not None:
                unwrap(previous)


@final
class CompressionReport(StepObserver):
    """Warns at the end of the first step if nothing was found to encode."""

    def __init__(self, compression: Compression, plan: Plan, device: torch.device) -> None:
        self._compression, self._plan, self._device = compression, plan, device
        self._is_over = False

    def after_step(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self._compression.found:
            warnings.warn(
                f"plan '{self._plan}': the layers of this rank save nothing that compress="
                f"{self._plan.compress} encodes, so it saves no memory; compress=gist is for models with "
                "ReLU and pooling, and compress=gist-fp16, gist-fp10 or gist-fp8 also for others"
                f"{self._bound()}",
                stacklevel=3,
            )

    def _bound(self) -> str:
        if self._device.type != "cuda":
            return ""
        return (
            f". Tensors below {SMALLEST['cuda'] >> 20} MiB stay as they are on a CUDA device: a microbatch "
            "of more samples saves larger ones"
        )
