"""What tests of Gist share: compressed models, their gradients, and the bytes that autograd saves."""

from typing import Any

import torch
from torch import Tensor, nn

from echelon.memory.gist.compression import Compression
from echelon.memory.gist.functions import CompressedModule, can_compress
from echelon.memory.gist.layer import CompressedLayer
from echelon.nn.autograd.saved_tensors import observe
from echelon.nn.layering import listed_layers
from echelon.nn.wrapping import Wrapping


def compress(model: nn.Module, compress: str) -> Compression:
    """Let the layers of a model encode what they save, as an engine does."""
    compression, wrapping = Compression.of(compress), Wrapping()
    for module in filter(can_compress, model.modules()):
        wrapping.wrap(CompressedModule(module, compression))
    for layer in listed_layers(model) or [model]:
        if not can_compress(layer):
            wrapping.wrap(CompressedLayer(layer, compression))
    return compression


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Of the storages that autograd holds after a forward pass, without weights and buffers."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with observe(pack, lambda tensor: tensor):
        model(x)
    return sum(storage.nbytes() for storage in held.values())


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Of the parameters and of the input, for a loss in which every output counts in its own way."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    output = model(x)
    (output * torch.randn_like(output)).sum().backward()
    return [t.grad.clone() for t in [*model.parameters(), x] if t.grad is not None]


def is_same(first: list[Tensor], second: list[Tensor]) -> bool:
    """To the last bit."""
    return len(first) == len(second) and all(map(torch.equal, first, second))
