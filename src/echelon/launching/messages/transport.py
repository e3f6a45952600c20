"""Turns values into bytes (`pack`) and back (`unpack`) for the pipes between the parent and its ranks.

This is pickle, with tensors as plain bytes. torch would send file descriptors of shared memory, which run
out with hundreds of tensors and die with the process that made them. Only processes that this package
started read these bytes, and they are never written to a file.
"""

import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def pack(value: object) -> bytes:
    """The bytes of `value`. Tensors are copied to the CPU; shared storages become separate ones."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The value that `pack` was given; its tensors are on the CPU."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if "torch" not in sys.modules:  # then nothing is a tensor, and torch is not imported
            return NotImplemented
        import torch

        # torch pickles subclasses, sparse and quantized tensors itself, without shared memory.
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        assert isinstance(value, torch.Tensor)
        plain = value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized
        return _reduce(value) if plain else NotImplemented


def _reduce(tensor: "torch.Tensor") -> tuple[Any, ...]:
    import torch

    contiguous = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytearray(contiguous.reshape(-1).view(torch.uint8).numpy().data)
    is_parameter = type(tensor) is torch.nn.Parameter
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, is_parameter)


def _rebuild(
    data: bytearray, dtype: "torch.dtype", shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> "torch.Tensor":
    import torch

    # frombuffer refuses an empty buffer; a bytearray is writable, so the tensor may own it.
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
