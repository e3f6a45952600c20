"""Bugs of forward and backward passes: positions, dropout, batch norm, and layers that run again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echelon.engine import Engine
from echelon.memory.recompute.segment import RecomputedLayer
from echelon.nn.dropout.training_position import current, restore
from echelon.nn.wrapping import W, find_wrapper
from echelon.parallel.data.batch_norm import WholeBatchNorm
from echelon.verify.bugs.alterations import Message, alter, is_in_backward, replace_method, then


def _wrappers(engine: Engine, kind: type[W]) -> Iterator[W]:
    for module in engine._modules:
        wrapper = find_wrapper(module, kind)
        if wrapper is not None:
            yield wrapper


def count_positions_from_zero(engine: Engine) -> bool:
    """The positions of each rank's part of a sequence begin at 0."""

    def positions(length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device)

    replace_method(engine._runner._layers.view, "positions", lambda _: positions)
    return True


def drop_alike(engine: Engine) -> bool:
    """Dropout draws the same masks on every replica."""
    scopes = engine._runner._scopes
    scopes._replica = 0
    return any(module.p > 0 for module in scopes._modules)


def weigh_norms_alike(engine: Engine) -> bool:
    """Batch norm takes every replica's number of samples to be this rank's own."""

    def equalise(message: Message) -> None:
        gathered, own = message.tensors
        gathered[:, -1] = own[-1]

    found = any(True for _ in _wrappers(engine, WholeBatchNorm))
    return alter(engine.mesh.group("data"), "batch norm", then(equalise), operation="all_gather") and found


def drop_again(engine: Engine) -> bool:
    """A layer that runs again for the backward pass draws new dropout masks."""

    def make(wrapper: RecomputedLayer) -> Callable[..., Any]:
        inner = wrapper.inner

        def call(*args: Any, **kwargs: Any) -> Any:
            position = current()
            if position is None or not is_in_backward():
                return inner(*args, **kwargs)
            with restore(replace(position, seed=position.seed + 1)):
                return inner(*args, **kwargs)

        return call

    layers = list(_wrappers(engine, RecomputedLayer))
    for layer in layers:
        layer._next = make(layer)
    return bool(layers)


def mix_kept_parts(engine: Engine) -> bool:
    """What tensor ranks kept of a layer's input is put together in another order."""

    def roll(message: Message) -> None:
        whole, part = message.tensors
        whole.copy_(whole.roll(part.numel()))

    return alter(engine.mesh.group("tensor"), "checkpoints", then(roll))


def route_padding(engine: Engine) -> bool:
    """Gates count what was added at the end of a sequence, so that ranks share it evenly, as its tokens."""
    gates = [] if engine._balance is None else list(engine._balance._here)
    for gate in gates:
        replace_method(gate.positions, "is_true", lambda _: lambda _: None)
    return bool(gates)
