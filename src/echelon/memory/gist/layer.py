"""A layer whose saved tensors are kept encoded, after the forward pass has used them as they are.

    forward     x ── linear ──          autograd saves x: it gets what x is encoded to
    backward    linear asks for x:      decoded, used, and gone

What is left as it is: weights and buffers, inputs that need no gradient (their giver holds them),
integers, what is small, and what must not be rounded (statistics.py). Memory that several operations save is
encoded once.
"""

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from inspect import signature
from typing import Any, ClassVar, Final, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from echelon.collectives.mesh import Mesh
from echelon.memory.gist import backend, floats, sparse
from echelon.memory.gist.compression import SMALLEST, Compression, Memory, is_encoded, is_off
from echelon.memory.gist.functions import CompressedModule, Window, can_compress, max_pool2d, relu
from echelon.memory.gist.packing import Layout, flatten, shares_elements
from echelon.memory.storages import address_of, is_dense, overlap
from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor, current_hooks, is_recorded, replace
from echelon.nn.autograd.second_run import once
from echelon.nn.batch import tensors_of
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper, unwrap
from echelon.parallel.observer import Observers, StepObserver
from echelon.parallel.stage import Stage
from echelon.plan import Plan


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
        inputs = _tensors(args, kwargs)
        calls = CompressedCalls(compression) if self._calls_functions is not False else None
        around: AbstractContextManager[Any] = nullcontext() if calls is None else calls
        with around:
            if compression.format is None and inputs and all(each.is_cuda for each in inputs):
                output = self.inner(*args, **kwargs)  # all that is left is not sparse: see `Saver`
            else:
                output = self._call_saving(compression, inputs, args, kwargs)
        if calls is not None:
            self._calls_functions = self._calls_functions or calls.seen  # of a call that has returned
        return output

    def _call_saving(self, compression: Compression, inputs: list[Tensor], args: Any, kwargs: Any) -> Any:
        most = max((each.numel() for each in inputs if each.is_floating_point()), default=0)
        saver = Saver(compression, self._held(inputs), most)
        pack = saver.pack  # one object, which hooks are known by
        try:
            with replace(pack, _take):
                return self.inner(*args, **kwargs)
        finally:
            saver.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compression": None}

    def _held(self, inputs: list[Tensor]) -> dict[int, list[Tensor]]:
        """Return tensors that others hold, by storage: buffers, and inputs without gradients. An input with
        gradients may lie in the same storage, as a message of a pipeline has all inputs of a stage."""
        tensors = [each for each in inputs if not each.requires_grad]
        for module in self._with_buffers:
            tensors += [buffer for buffer in module._buffers.values() if buffer is not None]
        held: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                held.setdefault(address_of(tensor), []).append(tensor)
        return held


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    if not kwargs and all(type(each) is Tensor for each in args):
        return list(args)
    return tensors_of((args, kwargs))


class _Encoding(NamedTuple):
    parts: tuple[KeptTensor, ...]
    name: str  # of a format, or _SPARSE
    dtype: torch.dtype

    def decode(self, layout: Layout) -> Tensor:
        parts = tuple([part.take() for part in self.parts])
        if self.name == _SPARSE:
            return layout.shape(sparse.decode(sparse.Sparse(*parts), layout.size.numel()))
        return backend.decode_floats(parts, self.name, layout, self.dtype)


_SPARSE = "sparse"


class _Encoded(NamedTuple):
    """Held by autograd in place of a tensor."""

    encoding: _Encoding
    layout: Layout

    def take(self) -> Tensor:
        return self.encoding.decode(self.layout)


@final
class Saver:
    """Encodes what one call of a layer saves. `num_inputs`: numbers in its largest input; 0: it has none, as
    a model of tokens, and the largest tensor that it has saved counts."""

    def __init__(
        self, compression: Compression, held: Mapping[int, Sequence[Tensor]], num_inputs: int
    ) -> None:
        self._compression, self._held = compression, held
        self._num_inputs, self._num_saved = num_inputs, 0
        self._exact: dict[int, Memory] = {}
        self._outer: Hooks | None = current_hooks()
        self._encodings: dict[Any, tuple[Memory, _Encoding]] = {}

    def close(self) -> None:
        """The call is over. Autograd holds this as long as a graph."""
        self._encodings, self._held, self._exact = {}, {}, {}

    def pack(self, tensor: Tensor) -> "_Encoded | KeptTensor":
        encoded = self._encode(tensor) if is_encoded(tensor) else None
        return KeptTensor(tensor, self._outer) if encoded is None else encoded

    def _encode(self, tensor: Tensor) -> _Encoded | None:
        base = tensor._base
        if shares_elements(tensor) or (base is not None and isinstance(base, nn.Parameter)):
            return None
        address = address_of(tensor)
        is_held = any(overlap(tensor, other) for other in self._held.get(address, ()))
        if is_held or self._is_exact(tensor, address):
            return None
        dense = tensor
        order: tuple[Any, ...] = (tensor.numel(),)
        if not tensor.is_contiguous():
            dense = tensor if is_dense(tensor) else tensor.detach().clone()
            order = (tensor.size(), tensor.stride())
        layout = Layout(dense.size(), dense.stride())
        key = (address, tensor.storage_offset(), tensor.dtype, order)
        memory, encoding = self._encodings.get(key, _NOTHING)
        if memory is None or encoding is None or not memory.has(tensor):
            encoding = self._encode_dense(tensor, dense, address)
            if encoding is None:
                return None
            self._encodings[key] = Memory(tensor), encoding
        return _Encoded(encoding, layout)

    def _is_exact(self, tensor: Tensor, address: int) -> bool:
        """Return whether these numbers must not be rounded."""
        if self._compression.format is None or address in self._exact:
            return address in self._exact
        if is_power(tensor):
            self._exact[address] = Memory(tensor)  # views of it are kept as they are too
            return True
        self._num_saved = max(self._num_saved, tensor.numel())
        num = self._num_inputs or self._num_saved
        return FEWER * tensor.untyped_storage().nbytes() <= num * tensor.element_size()

    def _encode_dense(self, tensor: Tensor, dense: Tensor, address: int) -> _Encoding | None:
        compression, name = self._compression, None
        parts: tuple[Tensor, ...] | None = None
        if compression.format is not None:
            name = floats.format_for(tensor.dtype, compression.format)
        elif not tensor.is_cuda and once(lambda: compression.marks.has(tensor)):
            name, parts = _SPARSE, sparse.encode(flatten(dense)[0])  # on a device, to count would be to wait
        if name is not None and name != _SPARSE:
            parts = compression.fresh.take(tensor, address) if dense is tensor else None
            parts = backend.encode_floats(dense, name) if parts is None else parts
        if name is None or parts is None:
            return None
        compression.found.add(name)
        return _Encoding(tuple([KeptTensor(each, self._outer) for each in parts]), name, tensor.dtype)


_NOTHING: tuple[None, None] = None, None


def _take(saved: "_Encoded | KeptTensor") -> Tensor:
    return saved.take()


# Which saved numbers are never rounded: those that backward passes raise e to, or divide everything by.

# Of a tensor, there are this many times fewer statistics.
FEWER: Final = 8

_OPERATIONS: Final = ("SoftmaxBackward", "LogsumexpBackward", "LogcumsumexpBackward", "RsqrtBackward")


def is_power(tensor: Tensor) -> bool:
    """Return whether the operation that made a tensor computes with its result again."""
    made_by = tensor.grad_fn
    return made_by is not None and _is_listed(made_by.name())


@cache
def _is_listed(name: str) -> bool:
    return any(each in name for each in _OPERATIONS)


# relu and max_pool2d that a forward calls as functions, and not as modules.

_RELUS = {F.relu: False, torch.relu: False, Tensor.relu: False, torch.relu_: True, Tensor.relu_: True}
_POOL = signature(F.max_pool2d_with_indices)


@final
class CompressedCalls(TorchFunctionMode):
    """Inside, such functions save less. `seen`: whether one was called."""

    def __init__(self, compression: Compression) -> None:
        super().__init__()
        self._compression = compression
        self.seen = False

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_recorded():  # a checkpoint, which computes again outside of this
            return func(*args, **kwargs)
        if func in _RELUS:
            return self._relu(func, *args, **kwargs)
        if func is F.max_pool2d:
            self.seen = True
            arguments = dict(_POOL.bind(*args, **kwargs).arguments)
            arguments.pop("return_indices", None)
            return max_pool2d(arguments.pop("input"), Window.of(**arguments), self._compression)
        return func(*args, **kwargs)

    def _relu(self, func: Any, input: Tensor, inplace: bool = False) -> Tensor:
        self.seen = True
        return relu(input, self._compression, inplace=inplace or _RELUS[func])


def compress_layers(stages: Sequence[Stage], mesh: Mesh, wrapping: Wrapping, observers: Observers) -> None:
    """Let the layers of stages (or the whole model) encode what they save; rank 0 says if that is none."""
    _unwrap_earlier([stage.module for stage in stages])
    if mesh.plan.compress == "none":
        return
    compression = Compression.of(mesh.plan.compress)
    for stage in stages:
        for module in filter(can_compress, stage.module.modules()):
            wrapping.wrap(CompressedModule(module, compression))
        for layer in dict.fromkeys(stage.wrapped_layers(mesh.plan)):
            if not can_compress(layer):
                wrapping.wrap(CompressedLayer(layer, compression))
    if mesh.rank == 0:
        observers.add(CompressionReport(compression, mesh.plan, mesh.device))


def _unwrap_earlier(stages: Sequence[nn.Module]) -> None:
    """Take away what an engine that was not closed has put around the layers, or around other layers."""
    for module in dict.fromkeys(module for stage in stages for module in stage.modules()):
        for kind in (CompressedLayer, CompressedModule):
            previous: Wrapper | None = find_wrapper(module, kind)
            if previous is not None:
                unwrap(previous)


@final
class CompressionReport(StepObserver):
    """Warns at the end of the first step if nothing was found to encode."""

    def __init__(self, compression: Compression, plan: Plan, device: torch.device) -> None:
        self._compression, self._plan, self._device = compression, plan, device
        self._is_over = False

    def after_step(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self._compression.found:
            warnings.warn(
                f"plan '{self._plan}': the layers of this rank save nothing that compress="
                f"{self._plan.compress} encodes, so it saves no memory; compress=gist is for models with "
                "ReLU and pooling, and compress=gist-fp16, gist-fp10 or gist-fp8 also for others"
                f"{self._bound()}",
                stacklevel=3,
            )

    def _bound(self) -> str:
        if self._device.type != "cuda":
            return ""
        return (
            f". Tensors below {SMALLEST['cuda'] >> 20} MiB stay as they are on a CUDA device: a microbatch "
            "of more samples saves larger ones"
        )
