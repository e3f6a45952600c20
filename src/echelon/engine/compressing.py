"""compress=gist, gist-fp16, gist-fp10, gist-fp8: what layers save for the backward pass is kept encoded."""

import warnings
from collections.abc import Sequence

from torch import nn

from echelon.gist import CompressedLayer, CompressedModule, Compression, can_compress
from echelon.layering import listed_layers
from echelon.mesh import Mesh
from echelon.plan import Plan
from echelon.wrapping import Wrapper, Wrapping, find_wrapper, unwrap


def compress_layers(stages: Sequence[nn.Module], mesh: Mesh, wrapping: Wrapping) -> None:
    """If the plan says so, let the layers that the stages list encode what they save; a model that lists
    none, as a whole."""
    _unwrap_earlier(stages)
    if mesh.plan.compress == "none":
        return
    compression = Compression.of(mesh.plan.compress)
    layers: list[nn.Module] = []
    for stage in stages:
        inside = list(stage.modules())
        for module in filter(can_compress, inside):
            wrapping.wrap(CompressedModule(module, compression))
        listed = [layer for layer in listed_layers(stage) if layer in inside]
        layers += [layer for layer in dict.fromkeys(listed or [stage]) if not can_compress(layer)]
    report = _FirstCalls(len(layers), compression, mesh)
    for layer in layers:
        wrapping.wrap(CompressedLayer(layer, compression, report))


def _unwrap_earlier(stages: Sequence[nn.Module]) -> None:
    """Take away what an engine that was not closed has put around the layers, or around other layers."""
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        for kind in (CompressedLayer, CompressedModule):
            previous: Wrapper | None = find_wrapper(module, kind)
            if previous is not None:
                unwrap(previous)


class _FirstCalls:
    """Warns if nothing was found to encode, when each layer was called."""

    def __init__(self, num_layers: int, compression: Compression, mesh: Mesh) -> None:
        self._num_left, self._compression = num_layers, compression
        self._plan: Plan = mesh.plan
        self._warns = mesh.rank == 0

    def __call__(self) -> None:
        self._num_left -= 1
        if self._num_left == 0 and self._warns and not self._compression.found:
            warnings.warn(
                f"plan '{self._plan}': the layers of this rank save nothing that compress="
                f"{self._plan.compress} encodes, so it saves no memory; compress=gist is for models with "
                "ReLU and pooling, and compress=gist-fp16, gist-fp10 or gist-fp8 also for others",
                stacklevel=2,
            )
