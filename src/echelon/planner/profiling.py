"""`profile` measures each layer of a model on a batch and leaves the model unchanged.

Each layer runs by itself on the output of the layer before: forward, then backward from a gradient of ones.
Gradients are computed and dropped; `.grad` is not touched.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.errors import UserError
from echelon.nn.batch import call_stage, tensors_of
from echelon.nn.layering import how_to_list, listed_layers, stage_layers
from echelon.planner.graph import Node, Profile, chain


def profile(model: nn.Module, batch: Any, *, repeats: int = 5, warmups: int = 2) -> Profile:
    """The cost of each layer of `model`: medians of `repeats`, in training mode, on the device of the batch.

    `model` is an nn.Sequential, or has `layers() -> list[nn.Module]`, each taking the output of the layer
    before, or is a transformers model of a supported family. `batch` is one microbatch as `engine.step` takes
    it, (inputs, targets); or the inputs alone, if they are not a pair. The caller chooses threads and device.
    """
    layers = _layers(model)
    if repeats < 1 or warmups < 0:
        raise UserError(
            f"repeats={repeats} warmups={warmups}: measure at least once, after 0 or more warm-ups"
        )
    names = _names(model, layers)
    values = [batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch]
    with _untouched(model, values):
        for name, layer in zip(names, layers, strict=True):
            values.append(_output(name, layer, values[-1]))
        # Round by round, not layer by layer: a disturbance of the machine then affects all layers alike.
        rounds = [
            [_time(layer, value) for layer, value in zip(layers, values, strict=False)]
            for _ in range(warmups + repeats)
        ]
        stashes = [_stash(layer, value) for layer, value in zip(layers, values, strict=False)]
    own_parameters, tied = _parameters(names, layers)
    nodes = [
        Node(
            name,
            statistics.median(forward for forward, _ in times),
            statistics.median(backward for _, backward in times),
            output_bytes=_size(_tensors(output)),
            parameter_bytes=_size(own_parameters[name]),
            stash_bytes=stash,
            about=type(layer).__name__,
        )
        for name, layer, times, output, stash in zip(
            names, layers, zip(*rounds[warmups:], strict=True), values[1:], stashes, strict=True
        )
    ]
    return chain(nodes, tied, subject=f"the profile of {type(model).__name__}")


def _layers(model: nn.Module) -> list[nn.Module]:
    layers = listed_layers(model)
    if not layers and stage_layers(model):
        raise UserError(
            f"{type(model).__name__} calls its layers with code around them, and only layers that take what "
            "the one before returned are measured; say the stages, like pipeline=2, and boundaries"
        )
    if not layers:
        raise UserError(f"{type(model).__name__} does not say where it can be cut: {how_to_list(model)}")
    return layers


def _names(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    """The names of the layers in the model; a layer that is used again gets its position appended."""
    module_names = {module: name for name, module in model.named_modules()}
    names = [module_names.get(layer, f"layer{place}") for place, layer in enumerate(layers)]
    return [f"{name}@{place}" if name in names[:place] else name for place, name in enumerate(names)]


def _parameters(
    names: list[str], layers: list[nn.Module]
) -> tuple[dict[str, list[nn.Parameter]], list[tuple[str, str]]]:
    """The parameters that each layer owns, and the pairs of layers that share one (the first owns it)."""
    owners: dict[nn.Parameter, str] = {}
    own: dict[str, list[nn.Parameter]] = {}
    tied: dict[tuple[str, str], None] = {}
    for name, layer in zip(names, layers, strict=True):
        own[name] = [p for p in layer.parameters() if p not in owners]
        tied |= {(owners[p], name): None for p in layer.parameters() if p in owners}
        owners |= dict.fromkeys(own[name], name)
    return own, list(tied)


@contextmanager
def _untouched(model: nn.Module, value: Any) -> Iterator[None]:
    """Training mode inside; afterwards modes, buffers and random state are restored."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = sorted({tensor.device.index for tensor in _tensors(value) if tensor.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            model.train()
            yield
        finally:
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _output(name: str, layer: nn.Module, value: Any) -> Any:
    """The output of a layer, detached from its graph."""
    try:
        output = call_stage(layer, _fresh(value)[0])
    except Exception as error:
        raise UserError(
            f"layer {name} ({type(layer).__name__}) fails on its input: {error}; each layer must take the "
            "output of the layer before, and the first the inputs of the batch"
        ) from error
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _time(layer: nn.Module, value: Any) -> tuple[float, float]:
    """Seconds forward and seconds backward."""
    inputs, leaves = _fresh(value)
    begin = _time_after(leaves)
    output = call_stage(layer, inputs)
    forward = _time_after(_tensors(output)) - begin
    results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not results:
        return forward, 0.0
    sources = [t for t in (*leaves, *layer.parameters()) if t.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in results]
    begin = _time_after(results)
    torch.autograd.grad(results, sources, ones, allow_unused=True)
    return forward, _time_after(results) - begin


def _fresh(value: Any) -> tuple[Any, list[Tensor]]:
    """A copy of `value` as a layer gets it in training, and the tensors to take gradients for.

    A copy, because a layer that works in place must not change the input of the next run.
    """
    leaves: list[Tensor] = []

    def copy_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        real = leaf.is_floating_point() or leaf.is_complex()
        leaves.append(leaf.detach().clone().requires_grad_(real))
        return leaves[-1].clone()

    return tree_map(copy_leaf, value), leaves


def _stash(layer: nn.Module, value: Any) -> float:
    """Bytes that one microbatch keeps in memory after this layer: what autograd saved, and the output.

    Neither the input, which is the output of the layer before, nor weights and buffers.
    """
    inputs, _ = _fresh(value)
    excluded = {_storage(t) for t in (*layer.parameters(), *layer.buffers(), *_tensors(inputs))}
    saved: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and _storage(tensor) not in excluded:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = call_stage(layer, inputs)
    for tensor in _tensors(output):
        see(tensor)
    return float(sum(saved.values()))


def _tensors(value: Any) -> list[Tensor]:
    """The distinct tensors of a structure."""
    return list({id(tensor): tensor for tensor in tensors_of(value)}.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensors: list[Any]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _time_after(tensors: list[Tensor]) -> float:
    """The time, once the devices of `tensors` have finished their work."""
    for device in sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}):
        torch.cuda.synchronize(device)
    return time.perf_counter()
