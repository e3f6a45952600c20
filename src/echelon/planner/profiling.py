"""`profile`: measures each layer of a model on a batch, and leaves the model as it was.

Each layer runs by itself on what the layer before returned: forward, then backward from a gradient of ones.
Gradients are handed out by autograd and dropped, never put into `.grad`.
"""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import UserError
from echelon.layering import how_to_list, listed_layers
from echelon.planner.graph import Node, Profile, chain


def profile(model: nn.Module, batch: Any, *, repeats: int = 5, warmups: int = 2) -> Profile:
    """What each layer of `model` costs: medians of `repeats`, in training mode, on the batch's device.

    `model` is an nn.Sequential, or has `layers() -> list[nn.Module]`, each taking what the one before
    returned, or is of a known family of transformers. `batch` is one microbatch as `engine.step` takes it,
    (inputs, targets); or the inputs alone, if they are no pair. Threads and device are the caller's choice.
    """
    layers = _layers(model)
    if repeats < 1 or warmups < 0:
        raise UserError(
            f"repeats={repeats} warmups={warmups}: measure at least once, after 0 or more warm-ups"
        )
    names = _names(model, layers)
    given = [batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch]
    with _untouched(model, given):
        for name, layer in zip(names, layers, strict=True):
            given.append(_output(name, layer, given[-1]))
        # Round by round, not layer by layer: what disturbs the machine for a while disturbs all layers.
        rounds = [
            [_time(layer, its) for layer, its in zip(layers, given, strict=False)]
            for _ in range(warmups + repeats)
        ]
        stashes = [_stash(layer, its) for layer, its in zip(layers, given, strict=False)]
    own, tied = _parameters(names, layers)
    nodes = [
        Node(
            name,
            statistics.median(forward for forward, _ in times),
            statistics.median(backward for _, backward in times),
            output_bytes=_size(_tensors(output)),
            parameter_bytes=_size(own[name]),
            stash_bytes=stash,
            about=type(layer).__name__,
        )
        for name, layer, times, output, stash in zip(
            names, layers, zip(*rounds[warmups:], strict=True), given[1:], stashes, strict=True
        )
    ]
    return chain(nodes, tied, what=f"the profile of {type(model).__name__}")


def _layers(model: nn.Module) -> list[nn.Module]:
    layers = listed_layers(model)
    if not layers:
        raise UserError(f"{type(model).__name__} does not say where it can be cut: {how_to_list(model)}")
    return layers


def _names(model: nn.Module, layers: list[nn.Module]) -> list[str]:
    """The names the model knows its layers by; a layer that comes again is told apart by its place."""
    known = {module: name for name, module in model.named_modules()}
    names = [known.get(layer, f"layer{place}") for place, layer in enumerate(layers)]
    return [f"{name}@{place}" if name in names[:place] else name for place, name in enumerate(names)]


def _parameters(
    names: list[str], layers: list[nn.Module]
) -> tuple[dict[str, list[nn.Parameter]], list[tuple[str, str]]]:
    """The parameters that are each layer's own, and who shares with whom: the first that has one owns it."""
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
    """Training mode inside; after it modes, buffers and random state are what they were."""
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
    """What a layer returns, cut off from how it was made."""
    try:
        output = layer(_fresh(value)[0])
    except Exception as error:
        raise UserError(
            f"layer {name} ({type(layer).__name__}) fails on what it is given: {error}; each layer must take "
            "what the one before returned, and the first the inputs of the batch"
        ) from error
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)


def _time(layer: nn.Module, value: Any) -> tuple[float, float]:
    """Seconds forward and seconds backward."""
    given, leaves = _fresh(value)
    begin = _now(leaves)
    output = layer(given)
    forward = _now(_tensors(output)) - begin
    results = [tensor for tensor in _tensors(output) if tensor.requires_grad]
    if not results:
        return forward, 0.0
    wanted = [t for t in (*leaves, *layer.parameters()) if t.requires_grad]
    ones = [torch.ones_like(tensor) for tensor in results]
    begin = _now(results)
    torch.autograd.grad(results, wanted, ones, allow_unused=True)
    return forward, _now(results) - begin


def _fresh(value: Any) -> tuple[Any, list[Tensor]]:
    """`value` as a layer meets it in training, and its tensors, to take gradients for.

    The layer is given copies: one that works in place must not change what the next run starts from.
    """
    leaves: list[Tensor] = []

    def renew(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        real = leaf.is_floating_point() or leaf.is_complex()
        leaves.append(leaf.detach().clone().requires_grad_(real))
        return leaves[-1].clone()

    return tree_map(renew, value), leaves


def _stash(layer: nn.Module, value: Any) -> float:
    """Bytes that one microbatch leaves in memory behind this layer: what autograd saved, and the output.

    Not the input, which is the output of the layer before, nor weights and buffers.
    """
    given, _ = _fresh(value)
    standing = {_storage(t) for t in (*layer.parameters(), *layer.buffers(), *_tensors(given))}
    kept: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and _storage(tensor) not in standing:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        output = layer(given)
    for tensor in _tensors(output):
        see(tensor)
    return float(sum(kept.values()))


def _tensors(value: Any) -> list[Tensor]:
    """The distinct tensors of a structure."""
    found = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    return list({id(tensor): tensor for tensor in found}.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _size(tensors: list[Any]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _now(tensors: list[Tensor]) -> float:
    """The time, once the devices of `tensors` have done all they were given."""
    for device in sorted({tensor.device.index for tensor in tensors if tensor.is_cuda}):
        torch.cuda.synchronize(device)
    return time.perf_counter()
