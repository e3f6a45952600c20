"""All samples of the global batch on every replica, for what compares them: a loss over pairs of samples.

    forward     the rows of replica 0, then of replica 1, …, on every replica
    backward    the gradients of a replica's own rows, summed over replicas

An engine divides losses so that their sum over replicas is the loss of the global batch. Whatever share of it
each replica has computed of all rows, the sum of the shares' gradients is the gradient of one device.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from echelon.collectives.agreement import gather_rows
from echelon.collectives.group import Group
from echelon.collectives.mesh import Mesh
from echelon.errors import UserError
from echelon.nn.autograd.second_run import once
from echelon.nn.tracing import untraced

_SUBJECT = "samples"


@final
class Replicas:
    """The replicas of one engine, as `gather_samples` meets them. Without a mesh: one device."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.group: Group | None = None if mesh is None or mesh.plan.data == 1 else mesh.group("data")
        self.error = "" if mesh is None else _error(mesh, self.group)
        self.is_used = False  # whether anything was gathered

    def gathering(self) -> AbstractContextManager[None]:
        """Let `gather_samples` gather over these replicas inside."""
        return _Gathering(self)

    def open(self) -> None:
        """Let it do so also where no engine runs: between the calls of a loop of the user's own."""
        _open[self] = None

    def close(self) -> None:
        _open.pop(self, None)


@final
class _Gathering:
    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    def __enter__(self) -> None:
        self._token = _CURRENT.set(self._replicas)

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)


def _error(mesh: Mesh, group: Group | None) -> str:
    """Say why samples cannot be gathered under a plan, if they cannot."""
    plan = mesh.plan
    reason = ""
    if plan.microbatches > 1 or not plan.flushes:
        reason = "cuts a replica's samples into microbatches, none of which can know those of the others"
    elif plan.sync == "async":
        reason = "has workers that do not wait for each other's samples"
    elif plan.context > 1:
        reason = "gives each rank a part of every sample's positions"
    elif group is not None and group.size != plan.data:
        reason = "has stages of different numbers of replicas"
    if not reason:
        return ""
    return f"echelon.gather_samples: plan '{plan}' {reason}; use data=N with microbatches=1"


_CURRENT: ContextVar[Replicas | None] = ContextVar("echelon.nn.sample_gathering", default=None)
# Those of engines that are open in this process, in the order in which these were made: that of every rank.
_open: WeakKeyDictionary[Replicas, None] = WeakKeyDictionary()


@untraced
def gather_samples(x: Tensor) -> Tensor:
    """Return the rows (dim 0) of all replicas, in the order of the global batch; differentiable.

    For losses that compare samples: each replica computes them of all rows. Inside of a loss or a forward,
    or between the calls of a loop of your own, every replica must call it. Without an engine, and with one
    replica, it returns x.
    """
    replicas = once(_current)
    replicas.is_used = True
    if replicas.error:
        raise UserError(replicas.error)
    if replicas.group is None:
        return x
    if x.dim() == 0:
        raise UserError("echelon.gather_samples: the tensor has no dims; give it one row for each sample")
    counts = once(partial(_counts, x, replicas.group))
    rows: Tensor = _Gather.apply(x, replicas.group, counts)  # type: ignore[no-untyped-call]
    return rows


def _current() -> Replicas:
    current = _CURRENT.get()
    if current is not None:
        return current
    candidates = [each for each in _open if each.group is not None and not each.group.is_closed]
    if len({each.group.size for each in candidates if each.group is not None}) > 1:
        raise UserError(
            "echelon.gather_samples: engines of different numbers of replicas are open, and none of them is "
            "running; call it inside of a loss or a forward, or close the engines that are done"
        )
    # The newest: an older one may be left open and forgotten, on some ranks longer than on others.
    return candidates[-1] if candidates else Replicas()


def _counts(x: Tensor, group: Group) -> list[int]:
    """Return how many rows each replica has; reads the device. All other dims must be the same."""
    form = torch.tensor([len(x), x[:1].numel() if len(x) else -1, x.dim()], device=x.device)
    forms: list[list[int]] = gather_rows(form, group, _SUBJECT).tolist()
    if len({tuple(sizes) for _, *sizes in forms}) > 1:
        raise UserError(
            f"echelon.gather_samples: replicas have rows of different sizes, or none: {forms} (rows, numbers "
            "of each, dims); give every replica at least one sample, and pad rows to one size"
        )
    return [number for number, *_ in forms]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        return once(partial(_gathered, x, group, counts))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        summed: Tensor = _Sum.apply(gradient, ctx.group, ctx.counts)  # type: ignore[no-untyped-call]
        return summed, None, None


class _Sum(torch.autograd.Function):
    """The other direction, so that gradients have gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
        ctx.group, ctx.counts = group, counts
        wide = torch.promote_types(rows.dtype, torch.float32)
        summed = rows.to(wide, copy=True, memory_format=torch.contiguous_format)
        with group.ledger.about(_SUBJECT):
            group.all_reduce(summed)
        begin = sum(counts[: group.rank])
        return summed[begin : begin + counts[group.rank]].to(rows.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows: Tensor = _Gather.apply(gradient, ctx.group, ctx.counts)  # type: ignore[no-untyped-call]
        return rows, None, None


def _gathered(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    largest = max(counts)
    padded = x.contiguous()
    if len(x) < largest:
        padded = torch.cat([padded, x.new_zeros(largest - len(x), *x.shape[1:])])
    parts = gather_rows(padded, group, _SUBJECT)
    if min(counts) == largest:
        return parts.flatten(0, 1)
    return torch.cat([part[:number] for part, number in zip(parts, counts, strict=True)])
