"""Gradients after the sum over replicas: the sums with other ranks that hold them too, norm and clipping."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from echelon.collectives import Group
from echelon.collectives.agreement import set_anywhere
from echelon.parallel.data.buckets import gradient_dtype
from echelon.parallel.data.parameter_set import SharedGradient
from echelon.parallel.data.sharing import Sharing
from echelon.state.ownership import LocalParameter


def squared_norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    is_plain = all(map(_is_plain, gradients))
    if not is_plain:
        gradients = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        gradients = [torch.view_as_real(each) if each.is_complex() else each for each in gradients]
        is_plain = all(map(_is_plain, gradients))
    if is_plain:
        flat = [each if each.dim() == 1 else each.view(-1) for each in gradients]
        return torch.stack([torch.dot(each, each) for each in flat]).double().sum()
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for each in gradients:
        by_type.setdefault(each.dtype, []).append(each)
    # A norm in bf16 would keep three digits of a sum of millions. Of one type, one kernel computes all norms.
    norms = [
        torch.stack(torch._foreach_norm(of_type, dtype=torch.promote_types(dtype, torch.float32))).double()
        for dtype, of_type in by_type.items()
    ]
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square().sum()


def _is_plain(gradient: Tensor) -> bool:
    """Return whether a product with itself does: on a CPU it takes half of a norm's time, and rounds less."""
    is_wide = gradient.dtype in (torch.float32, torch.float64) and gradient.is_cpu
    return is_wide and not gradient.is_sparse and gradient.is_contiguous()


def clip_factor(norm: float | Tensor, limit: float | None) -> float | Tensor:
    """Return the factor that brings gradients of this norm down to `limit`, by torch's rule. It stays where
    the norm is. Not a number for such a norm, as torch does."""
    if limit is None:
        return 1.0
    if isinstance(norm, Tensor):
        return (limit / (norm + 1e-6)).clamp(max=1.0)
    return 1.0 if norm + 1e-6 <= limit else limit / (norm + 1e-6)


# Gradients that other ranks hold too: summed with theirs, after the sum over replicas.
#
# The first and the last stage of a language model share the embedding. Each sums its gradient over its own
# replicas; then both sum over each other, part by part, so that both make the same update. Tensor ranks do
# the same with parameters that each used on a part of the work.


_Shared = tuple[SharedGradient, list[LocalParameter]]  # with what this rank holds of the parameter


def sum_within_stage(sharings: Iterable[Sharing]) -> None:
    _sum_all([pair for sharing in sharings for pair in _shared(sharing) if pair[0].tie is None])


def sum_tied(sharings: Iterable[Sharing]) -> None:
    """Sum what stages share. All ranks go through the ties in one order, whichever stages they hold."""
    tied = [pair for sharing in sharings for pair in _shared(sharing) if pair[0].tie is not None]
    _sum_all(sorted(tied, key=lambda pair: pair[0].tie or 0))


def _shared(sharing: Sharing) -> list[_Shared]:
    local = sharing.local_parameters()
    return [
        (shared, [each for each in local if each.parameter is shared.parameter])
        for shared in sharing.parameter_set.shared_gradients
    ]


def _sum_all(pairs: Sequence[_Shared]) -> None:
    groups: dict[Group, list[_Shared]] = {}
    for pair in pairs:
        groups.setdefault(pair[0].group, []).append(pair)
    for group, shared in groups.items():  # what one group sums is one message
        with group.ledger.about("tied gradients"):
            _sum(shared, group)


def _sum(pairs: Sequence[_Shared], group: Group) -> None:
    """Sum the gradients over the group. A rank that holds nothing of one (a server's worker) brings zeros."""
    flags = [any(each.tensor.grad is not None for each in local) for _, local in pairs]
    used = set_anywhere(flags, group, pairs[0][0].parameter.device)
    # Those that no rank used are left alone, as on one device.
    summed = [pair for pair, is_used in zip(pairs, used, strict=True) if is_used]
    gradients = [gradient for shared, local in summed for gradient in _gradients(shared, local)]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        _sum_flat([gradient for gradient in gradients if gradient.dtype == dtype], group)


def _gradients(shared: SharedGradient, local: Sequence[LocalParameter]) -> list[Tensor]:
    """Return the gradients that this rank brings in, in the memory that will hold the sum."""
    for each in local:
        if each.tensor.grad is None:
            each.tensor.grad = torch.zeros_like(each.tensor, dtype=gradient_dtype(each.tensor))
        elif each.tensor.grad.is_sparse:
            each.tensor.grad = each.tensor.grad.to_dense()
        if not shared.contributes:
            each.tensor.grad.zero_()
    if not local:
        return [torch.zeros_like(shared.parameter, dtype=gradient_dtype(shared.parameter))]
    return [each.tensor.grad for each in local if each.tensor.grad is not None]


def _sum_flat(gradients: Sequence[Tensor], group: Group) -> None:
    """In one message, unless there is just one gradient."""
    if len(gradients) == 1 and gradients[0].is_contiguous():
        group.all_reduce(gradients[0])
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    group.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
