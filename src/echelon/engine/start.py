"""How a training starts: the model on its device, in its type, and the same on every rank."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from echelon.collectives import Group
from echelon.huggingface import frequencies

_BYTES_AT_ONCE = 32 * 2**20


def convert(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on the device, its real numbers in `dtype`; integers and complex numbers stay what they are,
    and so do frequencies of rotary positions: in bf16 they would be off by turns at the 1,000th token."""
    kept = {id(buffer) for buffer in frequencies(model)}

    def convert_tensor(t: Tensor) -> Tensor:
        return t.to(device, dtype) if t.is_floating_point() and id(t) not in kept else t.to(device)

    converted: nn.Module = model._apply(convert_tensor)
    return converted


@torch.no_grad()
def start_equal(model: nn.Module, group: Group) -> None:
    """Rank 0's parameters and buffers into everyone's: the only place where ranks are made equal."""
    if group.size == 1:
        return
    with group.ledger.about("parameters"):
        for portion in _portions([*model.parameters(), *model.buffers()]):
            flat = _flatten_dense_tensors([tensor.contiguous() for tensor in portion])
            group.broadcast(flat, source=0)
            for tensor, values in zip(portion, _unflatten_dense_tensors(flat, portion), strict=True):
                tensor.copy_(values)


def _portions(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, about as many bytes at a time as make one message worth it."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        portion: list[Tensor] = []
        size = 0
        for tensor in (tensor.detach() for tensor in tensors if tensor.dtype == dtype and tensor.numel()):
            portion.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= _BYTES_AT_ONCE:
                yield portion
                portion, size = [], 0
        if portion:
            yield portion
