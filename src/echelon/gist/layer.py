"""A layer whose saved tensors are kept encoded, after the forward pass has used them as they are.

    forward     x ── linear ──          autograd saves x: it gets what x is encoded to
    backward    linear asks for x:      decoded, used, and gone

What is left as it is: weights and buffers, inputs that need no gradient (whoever gave them holds them),
integers, what is small, and what must not be rounded (statistics.py). Memory that several operations save is
encoded once.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from echelon.gist import backend, floats, sparse
from echelon.gist.calls import CompressedCalls
from echelon.gist.dense import Layout, flatten, shares_elements
from echelon.gist.marks import Memory
from echelon.gist.settings import Compression, is_encoded, is_off
from echelon.gist.statistics import is_few, is_power
from echelon.saved_tensors import Hooks, KeptTensor, current_hooks, replace
from echelon.second_run import once
from echelon.wrapping import Wrapper


@final
class CompressedLayer(Wrapper):
    """A layer, in place of its forward. A copy of a model is called as if it were not there."""

    entry: ClassVar[str] = "compress"

    def __init__(self, module: nn.Module, compression: Compression) -> None:
        super().__init__(module)
        self._compression: Compression | None = compression
        self._calls_functions: bool | None = None  # relu or max_pool2d; None: not known yet
        self._with_buffers = [each for each in module.modules() if each._buffers]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compression = self._compression
        if compression is None or is_off() or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        saver = Saver(compression, self._held(inputs), _most_numbers(inputs))
        calls = CompressedCalls(compression) if self._calls_functions is not False else None
        pack = saver.pack  # one object, which hooks are known by
        around: AbstractContextManager[Any] = nullcontext() if calls is None else calls
        try:
            with replace(pack, _take), around:
                return self.inner(*args, **kwargs)
        finally:
            saver.close()
            if self._calls_functions is None and calls is not None:
                self._calls_functions = calls.seen

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compression": None}

    def _held(self, inputs: list[Tensor]) -> set[int]:
        """Storages that others hold: buffers, and inputs without gradients."""
        tensors = [each for each in inputs if not each.requires_grad]
        for module in self._with_buffers:
            tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        return {int(t.untyped_storage()._cdata) for t in tensors if t.layout is torch.strided}


def _most_numbers(inputs: list[Tensor]) -> int:
    """Of the largest input of real numbers."""
    return max((each.numel() for each in inputs if each.is_floating_point()), default=0)


class _Encoding(NamedTuple):
    """What is kept in place of some memory."""

    parts: tuple[KeptTensor, ...]
    name: str  # of a format, or _SPARSE
    num: int
    dtype: torch.dtype

    def decode(self) -> Tensor:
        parts = tuple(part.take() for part in self.parts)
        if self.name == _SPARSE:
            return sparse.decode(sparse.Sparse(*parts), self.num)
        return backend.decode_floats(parts, self.name, self.num, self.dtype)


_SPARSE = "sparse"


class _Encoded(NamedTuple):
    """What autograd keeps in place of a tensor."""

    encoding: _Encoding
    layout: Layout

    def take(self) -> Tensor:
        return self.layout.shape(self.encoding.decode())


@final
class Saver:
    """What one call of a layer saves. `num_inputs`: numbers in its largest input; 0: it has none, as a model
    of tokens, and the largest tensor that it has saved counts."""

    def __init__(self, compression: Compression, held: set[int], num_inputs: int) -> None:
        self._compression, self._held = compression, held
        self._num_inputs, self._num_saved = num_inputs, 0
        self._exact: dict[int, Memory] = {}
        self._outer: Hooks | None = current_hooks()
        self._encodings: dict[Any, tuple[Memory, _Encoding]] = {}

    def close(self) -> None:
        """The call is over. Autograd holds this as long as a graph."""
        self._encodings, self._held, self._exact = {}, set(), {}

    def pack(self, tensor: Tensor) -> "_Encoded | KeptTensor":
        encoded = self._encode(tensor) if is_encoded(tensor) else None
        return KeptTensor(tensor, self._outer) if encoded is None else encoded

    def _encode(self, tensor: Tensor) -> _Encoded | None:
        if isinstance(tensor._base, nn.Parameter) or shares_elements(tensor):
            return None
        address = int(tensor.untyped_storage()._cdata)
        if address in self._held or self._is_exact(tensor, address):
            return None
        flat, layout = flatten(tensor)
        key = (address, tensor.storage_offset(), tensor.dtype, *_order(layout, tensor))
        memory, encoding = self._encodings.get(key, (None, None))
        if memory is None or encoding is None or not memory.has(tensor):
            encoding = self._encode_flat(tensor, flat)
            if encoding is None:
                return None
            self._encodings[key] = Memory(tensor), encoding
        return _Encoded(encoding, layout)

    def _is_exact(self, tensor: Tensor, address: int) -> bool:
        """Whether these numbers must not be rounded."""
        if self._compression.format is None or address in self._exact:
            return address in self._exact
        if is_power(tensor):
            self._exact[address] = Memory(tensor)  # views of it are kept as they are too
            return True
        self._num_saved = max(self._num_saved, tensor.numel())
        return is_few(tensor, self._num_inputs or self._num_saved)

    def _encode_flat(self, tensor: Tensor, flat: Tensor) -> _Encoding | None:
        compression = self._compression
        has_zeros = compression.format is None and once(lambda: compression.marks.has(tensor))
        name = None if compression.format is None else floats.format_for(tensor.dtype, compression.format)
        parts: tuple[Tensor, ...] | None = None
        if has_zeros and not tensor.is_cuda:  # to count on a device would be to wait for it
            name, parts = _SPARSE, sparse.encode(flat)
        elif name is not None:
            parts = backend.encode_floats(flat, name)
        if name is None or parts is None:
            return None
        compression.found.add(name)
        return _Encoding(tuple(KeptTensor(p, self._outer) for p in parts), name, len(flat), tensor.dtype)


def _order(layout: Layout, tensor: Tensor) -> tuple[Any, ...]:
    """What tells orders of elements apart: nothing but their number, if a tensor is contiguous."""
    return (tensor.numel(),) if tensor.is_contiguous() else (layout.size, tensor.stride())


def _take(saved: "_Encoded | KeptTensor") -> Tensor:
    return saved.take()
