"""Check in the first step that each pass of a gate with a loss brings its gradient back.

The gradient of an auxiliary loss is asked for by the backward pass of a gate's weights: see
`nn/experts/recording.py`. It is that of a plain loop only if backward passes ask for what was recorded.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, final

import torch
from torch import Tensor

from echelon.nn.experts import Gate

# By how much two runs of a pass may differ, as a part of what all tokens sum to.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 2e-2}


class Named(Protocol):
    """A gate and its name."""

    @property
    def name(self) -> str: ...

    @property
    def gate(self) -> Gate: ...


@final
class GatePasses:
    """The passes of the gates of this rank in one step."""

    def __init__(self) -> None:
        self.start_step()

    def start_step(self) -> None:
        self.attached: set[Gate] = set()  # whose weights and statistics want a gradient
        self._traced: set[Gate] = set()  # seen in a forward pass that has a backward pass
        self._recorded: dict[Gate, Tensor] = {}
        self._asked: dict[Gate, Tensor] = {}
        self._foreign: set[Gate] = set()  # whose loss depends on more than statistics

    def see(self, gate: Gate) -> None:
        if torch.is_grad_enabled():
            self._traced.add(gate)

    def recorded(self, gate: Gate, statistics: Tensor) -> None:
        _add(self._recorded, gate, statistics)

    def asked(self, gate: Gate, statistics: Tensor) -> None:
        _add(self._asked, gate, statistics)

    def differentiate(self, gate: Gate, loss: Tensor, statistics: Tensor) -> Tensor:
        if any(leaf is not statistics for leaf in _leaves(loss)):
            self._foreign.add(gate)
        return differentiate(loss, statistics)

    def errors(self, gates: Iterable[Named], tolerance: float) -> Iterator[str]:
        """Yield the errors of the gates of this rank."""
        for each in gates:
            problem = self._problem(each.gate, tolerance)
            if problem:
                yield f"{each.name} ({type(each.gate).__name__}): {problem}"

    def _problem(self, gate: Gate, tolerance: float) -> str:
        if gate.ran_in_backward and gate not in self._traced and (gate.has_loss or gate.balances_itself):
            return (
                "the model runs this gate again in the backward pass (torch.utils.checkpoint?), where what "
                "it sees is not counted; leave it to the plan, by recompute=full, or use use_reentrant=False"
            )
        if gate in self._foreign:
            return (
                "its auxiliary_loss depends on other tensors that want a gradient than the statistics, and "
                "they would get none; compute it of the statistics alone, and add other terms to the loss"
            )
        recorded = self._recorded.get(gate)
        if gate not in self.attached or recorded is None:
            return ""
        if gate not in self._asked:
            return (
                "the loss does not depend on the weights that this gate returned (they, or what experts made "
                "of them, are detached or not used), so that its auxiliary loss would get no gradient; use "
                "them, or give the gate no loss"
            )
        if _differ(recorded, self._asked[gate], tolerance):
            return (
                "the passes whose statistics are counted are not those that the backward pass goes through: "
                "the forward computes something else without autograd or when it is called again, or does "
                "not use what the gate returned in some of its calls; where forwards and backwards take "
                "turns, a pass without autograd counts first: draw at random with echelon's dropout and "
                "noise (seed), leave out passes under no_grad, or use microbatches=1"
            )
        return ""


@final
class NoPasses:
    """After the first step nothing is watched."""

    def __init__(self) -> None:
        self.attached: set[Gate] = set()

    def start_step(self) -> None:
        pass

    def see(self, gate: Gate) -> None:
        pass

    def recorded(self, gate: Gate, statistics: Tensor) -> None:
        pass

    def asked(self, gate: Gate, statistics: Tensor) -> None:
        pass

    def differentiate(self, gate: Gate, loss: Tensor, statistics: Tensor) -> Tensor:  # noqa: ARG002
        return differentiate(loss, statistics)

    def errors(self, gates: Iterable[Named], tolerance: float) -> Iterator[str]:  # noqa: ARG002
        return iter(())


def differentiate(loss: Tensor, statistics: Tensor) -> Tensor:
    """0 where the loss does not depend on the statistics."""
    if not loss.requires_grad:
        return torch.zeros_like(statistics)
    (gradient,) = torch.autograd.grad(loss, statistics, allow_unused=True, materialize_grads=True)
    return gradient


def _add(sums: dict[Gate, Tensor], gate: Gate, statistics: Tensor) -> None:
    statistics = statistics.double()
    sums[gate] = sums[gate] + statistics if gate in sums else statistics


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """In some row. Those that are not finite are refused elsewhere."""
    size = torch.maximum(one.abs(), other.abs()).sum(1)
    return bool(((one - other).abs().sum(1) > tolerance * size).any())


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """Yield the leaves that the loss is a function of."""
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo += [following for following, _ in node.next_functions]
