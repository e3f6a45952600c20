"""A few numbers that stand for a tensor, computed where it is.

Equal bits have equal fingerprints. Values that differ by rounding alone have measures that are near.
"""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
# Elements that are summed at a time, which bounds the memory. On a CPU they fit a cache.
_AT_ONCE, _AT_ONCE_ON_CPU = 1 << 22, 1 << 16


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """`device_fingerprint` on the host."""
    plain, weighted = device_fingerprint(tensor).tolist()
    return plain, weighted


def device_fingerprint(tensor: Tensor) -> Tensor:
    """Sum all elements' bits as integers, plainly and weighted by position, as 64 bits hold them."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    step = _portion(tensor)
    for begin in range(0, bits.numel(), step):
        part = bits[begin : begin + step].long()
        places = torch.arange(begin + 1, begin + 1 + len(part), device=part.device)
        sums += torch.stack([part.sum(), places.mul_(part).sum()])
    return sums


def wrapped(number: int) -> int:
    """Return an integer modulo 2⁶⁴, as int64 holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def measures(tensor: Tensor) -> Tensor:
    """Return a sum that depends on positions, and the norm, in float64; nonfinite values count as zero."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in flat.split(_portion(tensor)):
        numbers = part.double().nan_to_num(0.0, 0.0, 0.0)  # a loss that overflows does so on all ranks
        places = torch.arange(len(part), dtype=torch.float64, device=part.device)
        sums += torch.stack([numbers @ places.cos_(), numbers @ numbers])
    sums[1].sqrt_()
    return sums


def _portion(tensor: Tensor) -> int:
    return _AT_ONCE_ON_CPU if tensor.is_cpu else _AT_ONCE


def near(gathered: Tensor, eps: float) -> Tensor:
    """Compare the measures of several ranks, [ranks, tensors, 2]; return which are near, [tensors].

    `eps`: of the type in which they were computed.
    """
    sizes, tolerance = gathered[..., 1].amax(0), eps**0.5
    # Tensors that are nothing but rounding may be anything up to that of the largest.
    allowed = tolerance * (sizes + 10 * tolerance * sizes.amax())
    spread = gathered.amax(0) - gathered.amin(0)
    is_near: Tensor = (spread <= allowed[:, None]).all(1)
    return is_near
