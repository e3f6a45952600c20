"""Record the statistics of gates, so that they reach the loss.

An auxiliary loss is a function of sums over the global batch, which no microbatch and no rank has. What the
backward pass of a microbatch needs is the gradient of that function with respect to the sums, the same for
all microbatches. So a gate attaches its statistics to what it returns, and the gradient is asked for when the
backward pass arrives there:

    forward     weights = record(gate, weights, statistics)     recorder.add(gate, statistics)
    backward    gradient of weights goes on as it is;  gradient of statistics = recorder.gradient(gate, …)

Without a recorder, gates keep their statistics, and `auxiliary_loss(model)` is added to the loss as in any
plain training loop, in which `after_step(model)` follows an update.

A gate in evaluation mode has no part in any of this. Nor have passes under `no_grad` in the forward pass of a
model that is trained, where a loss or the balance of the gate is computed of the statistics.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from echelon.nn.autograd.second_run import once
from echelon.nn.experts.gate import Gate


class Recorder(Protocol):
    """Adds up the statistics of gates over microbatches and ranks."""

    def add(self, gate: Gate, statistics: Tensor) -> None:
        """Add the statistics of a microbatch; called once, also where its forward runs a second time."""

    def attach(self, gate: Gate) -> None:
        """Note that the forward pass has a trace from the gate's weights to its statistics."""

    def gradient(self, gate: Gate, statistics: Tensor | None) -> Tensor:
        """Return the gradient of the gate's auxiliary loss with respect to its statistics; in the backward
        pass. `statistics`: those of the pass that asks, the first time."""


_Gradient = Callable[[Tensor | None], Tensor]

_RECORDER: ContextVar[Recorder | None] = ContextVar("echelon.nn.experts", default=None)
_TRACES: ContextVar[bool] = ContextVar("echelon.nn.experts.traces", default=True)  # whether autograd does


def current_recorder() -> Recorder | None:
    """Return the recorder of the forward pass that runs, for code that runs it again in another thread."""
    return _RECORDER.get()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Let `recorder` add up the statistics of the forward pass inside."""
    token, traces = _RECORDER.set(recorder), _TRACES.set(torch.is_grad_enabled())
    try:
        yield
    finally:
        _RECORDER.reset(token)
        _TRACES.reset(traces)


def record(gate: Gate, weights: Tensor, statistics: Tensor) -> Tensor:
    """Return `weights`, whose backward pass brings the gradient of the auxiliary loss to `statistics`."""
    if not gate.training:
        return weights
    recorder = _RECORDER.get()
    if recorder is None:
        if torch.is_grad_enabled():
            _keep(gate, statistics)
        return weights
    counts = torch.is_grad_enabled() == _TRACES.get() or not (gate.has_loss or gate.balances_itself)
    once(lambda: recorder.add(gate, statistics.detach()) if counts else None)
    if not gate.has_loss:
        return weights
    attached: Tensor = _Attach.apply(weights, statistics, partial(recorder.gradient, gate))  # type: ignore[no-untyped-call]
    if attached.requires_grad:
        recorder.attach(gate)
    return attached


def _keep(gate: Gate, statistics: Tensor) -> None:
    if torch._C._current_graph_task_id() != -1:  # a second run, in the backward pass
        gate.ran_in_backward = True
        return
    if gate.has_loss:
        gate.pending.append(statistics)
    if gate.balances_itself:
        seen = statistics.detach()
        gate.seen = seen if gate.seen is None else gate.seen + seen


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, statistics: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient, ctx.dtype, ctx.statistics = gradient, statistics.dtype, statistics.detach()
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad_weights: Tensor) -> Any:
        statistics, ctx.statistics = ctx.statistics, None
        return grad_weights, ctx.gradient(statistics).to(ctx.dtype), None


def gates_of(model: nn.Module) -> list[Gate]:
    """Return the gates of a model, in the order in which it lists its modules."""
    return [module for module in model.modules() if isinstance(module, Gate)]


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """Return the auxiliary losses of all forward passes since the last call, for a training loop of your own.

    The loss is then `cross_entropy(model(inputs), targets) + auxiliary_loss(model)`.
    """
    total: Tensor | float = 0.0
    for gate in gates_of(model):
        pending, gate.pending = gate.pending, []
        if pending:
            total = total + gate.auxiliary_loss(torch.stack(pending).sum(0))
    return total


def after_step(model: nn.Module) -> None:
    """Let gates that balance themselves do so, by all forward passes since the last call; after an update, in
    a training loop of your own."""
    for gate in gates_of(model):
        seen, gate.seen = gate.seen, None
        if seen is not None:
            gate.after_step(seen)
