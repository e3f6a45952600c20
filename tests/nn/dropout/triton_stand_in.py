"""What kernels of dropout, experts and precision use of Triton, in numpy: programs run one by one on a CPU.

Loads and stores outside of a tensor fail here, where a GPU would read or write something else. Addresses in a
table are those of tensors in `ADDRESSED`.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from operator import index
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

import echelon.nn.dropout

ADDRESSED: dict[int, Any] = {}  # by address: the memory of a tensor


class PointerType:
    """What an address becomes."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


class Block(np.ndarray):  # type: ignore[type-arg]
    """A block of numbers; a scalar is a block of one."""

    def to(self, dtype: Any, bitcast: bool = False) -> Any:
        if isinstance(dtype, PointerType):
            memory = ADDRESSED[int(self[0])]
            assert memory.dtype == dtype.kind
            return Pointer(memory, np.zeros(1, np.int64))
        return self.view(dtype) if bitcast else self.astype(dtype)

    def __index__(self) -> int:
        return int(np.asarray(self).item())


class Pointer:
    """Places in the memory of one tensor."""

    def __init__(self, memory: Any, places: Any) -> None:
        self.memory, self.places = memory, places
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.places + offsets)

    def __sub__(self, offsets: Any) -> "Pointer":
        return Pointer(self.memory, self.places - offsets)

    def inside(self, mask: Any) -> Any:
        places = np.broadcast_to(self.places, np.shape(mask))[mask]
        assert ((places >= 0) & (places < len(self.memory))).all(), "outside of the tensor"
        return places


class Jit:
    """A kernel, or a function of one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
            assert num_warps in (1, 2, 4, 8)
            assert num_stages > 0
            values = [_value(argument) for argument in arguments]
            for program in product(*map(range, grid)):
                LANGUAGE.program = program
                self._function(*values, **constants)

        return launch


class Descriptor:
    """A matrix that is loaded in blocks; what is outside of it is 0."""

    def __init__(self, tensor: Tensor, block: list[int]) -> None:
        assert tensor.is_contiguous()
        assert all(size.bit_count() == 1 for size in block)
        self._values, self._block = tensor.numpy(), block

    @classmethod
    def from_tensor(cls, tensor: Tensor, block: list[int]) -> "Descriptor":
        return cls(tensor, block)

    def load(self, places: list[Any]) -> Any:
        row, column = map(index, places)
        loaded = np.zeros(self._block, self._values.dtype)
        found = self._values[row : row + self._block[0], column : column + self._block[1]]
        loaded[: found.shape[0], : found.shape[1]] = found
        return loaded.view(Block)


def _value(argument: Any) -> Any:
    if isinstance(argument, Descriptor):
        return argument
    if isinstance(argument, Tensor):
        return Pointer(argument.numpy().reshape(-1), np.zeros(1, np.int64))
    kind = np.float32 if isinstance(argument, float) else np.int64
    return argument if argument is None else _block([argument], kind)


def _block(values: Any, dtype: Any) -> Any:
    return np.array(values, dtype).view(Block)


def _load(pointer: Pointer, mask: Any = None, other: float = 0) -> Any:
    mask = np.ones(np.shape(pointer.places), bool) if mask is None else mask
    values = np.full(np.shape(mask), other, pointer.memory.dtype)
    values[mask] = pointer.memory[pointer.inside(mask)]
    return values.view(Block)


def _store(pointer: Pointer, values: Any, mask: Any) -> None:
    mask = np.ones(np.shape(pointer.places), bool) if mask is None else mask
    pointer.memory[pointer.inside(mask)] = values[mask]


def _arange(begin: int, end: int) -> Any:
    assert (end - begin).bit_count() == 1, "must be a power of 2"
    return _block(range(begin, end), np.int32)


def _multiple_of(pointer: Pointer, count: int) -> Pointer:
    """Of bytes: what a kernel is promised must be so, or it reads something else."""
    assert pointer.memory.ctypes.data % count == 0
    return pointer


def _module(name: str, **functions: Any) -> Any:
    module = ModuleType(name)
    vars(module).update(functions)
    return module


LANGUAGE = _module(
    "triton.language",
    int16=np.int16,
    int32=np.int32,
    int64=np.int64,
    uint64=np.uint64,
    float32=np.float32,
    float64=np.float64,
    constexpr=lambda value: value,
    program_id=lambda dim: _block([LANGUAGE.program[dim]], np.int32),
    arange=_arange,
    float16=np.float16,
    bfloat16=None,  # numpy has none
    pointer_type=PointerType,
    multiple_of=_multiple_of,
    sqrt=np.sqrt,
    exp=np.exp,
    log=np.log,
    max=lambda values, axis: np.asarray(values.max(axis)).view(Block),
    sum=lambda values, axis: np.asarray(values.sum(axis, values.dtype)).view(Block),
    cumsum=lambda values, axis: values.cumsum(axis, values.dtype).view(Block),
    dot=lambda left, right, total, **_: (np.asarray(left) @ np.asarray(right) + total).view(Block),
    cdiv=lambda a, b: -(-a // b),
    range=lambda begin, end, step, **_: range(begin, end, step),
    zeros=lambda shape, dtype: _block(np.zeros(shape), dtype),
    static_range=range,
    interleave=lambda one, other: np.stack([one, other], -1).reshape(-1).view(Block),
    where=lambda mask, one, other: np.where(mask, one, np.asarray(other, one.dtype)).view(Block),
    load=_load,
    store=_store,
)


def _jit(function: Any = None, **_: Any) -> Any:
    return Jit if function is None else Jit(function)


TRITON = _module(
    "triton",
    __version__="3.6.0",
    jit=_jit,
    cdiv=lambda a, b: -(-a // b),
    next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    language=LANGUAGE,
)


@contextmanager
def kernel_on_cpu(package: ModuleType = echelon.nn.dropout, module: str = "kernel") -> Iterator[Any]:
    """The module of a kernel, as if Triton were this."""
    name = f"{package.__name__}.{module}"
    descriptors = _module("triton.tools.tensor_descriptor", TensorDescriptor=Descriptor)
    modules = {"triton": TRITON, "triton.language": LANGUAGE, "triton.tools": _module("triton.tools")}
    with patch.dict(sys.modules, modules | {descriptors.__name__: descriptors}):
        sys.modules.pop(name, None)
        before = vars(package).pop(module, None)
        try:
            yield importlib.import_module(name)
        finally:
            vars(package).pop(module, None)
            if before is not None:
                vars(package)[module] = before
