"""recompute=selective: what is large and cheap is not kept for the backward pass, but computed again there.

    forward    h = up(x)       autograd saves h for gelu: kept
               a = gelu(h)     a call that can be repeated: (gelu, h)
               y = down(a)     autograd saves a for down: the call is kept in its place
    backward   down asks for a: gelu(h) runs again

No layer runs twice. The same operations run on the same arguments, so gradients are the same to the last bit.
What a call needs is kept anyway, or made by another call, or small; else its output is kept.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.plan import Plan
from echelon.recompute.selective_calls import Call, Output, Source, View, Weight, leaves, replace
from echelon.recompute.selective_operations import (
    MOST_PASSES,
    SIMPLE,
    STRAIGHT,
    Kind,
    is_autocast,
    kind_of,
    passes_product,
    product_cost,
    repeatable,
    returns_new_memory,
)
from echelon.saved_tensors import KeptTensor, current_hooks
from echelon.saved_tensors import replace as replace_saved

_SMALL = 16  # an argument that is so many times smaller than what is saved is held rather than computed
_DEEPEST = 12  # calls of which one needs the next
_SMALLEST = 1024  # bytes: below, the time of the host counts for more than the memory


def selective_of(plan: Plan) -> Callable[[], AbstractContextManager[None]]:
    """What a plan puts around every forward pass."""
    if plan.recompute != "selective":
        return nullcontext
    return partial(selective, frees_weights=plan.zero == 3)


@contextmanager
def selective(*, frees_weights: bool = False) -> Iterator[None]:
    """Around a forward pass and its loss. `frees_weights`: weights are not there in all of the backward."""
    if not torch.is_grad_enabled():
        yield
        return
    memo = _Memo(frees_weights=frees_weights)
    try:
        with replace_saved(memo.pack, memo.unpack), _Watch(memo):
            yield
    finally:
        memo.close()


@contextmanager
def not_watched() -> Iterator[None]:
    """Around compiled code, for which the compiler chooses what to compute again."""
    if not isinstance(_get_current_function_mode(), _Watch):
        yield
        return
    with _pop_mode_temporarily():
        yield


class _Again(NamedTuple):
    """What autograd keeps in place of a tensor."""

    output: Output
    view: View

    def take(self) -> Tensor:
        self.output.call.num_waiting -= 1
        return self.view.take(self.output.value())


class _Memory(NamedTuple):
    """What is in a storage at some time. The weak reference keeps its address from being used again."""

    version: int  # how often it was written
    dtype: torch.dtype
    storage: StorageWeakRef
    value: Any  # the output of a call; or a kept tensor

    @classmethod
    def of(cls, tensor: Tensor, value: Any) -> "_Memory":
        return cls(tensor._version, tensor.dtype, StorageWeakRef(tensor.untyped_storage()), value)


class _Need(NamedTuple):
    """What it takes to repeat a call: bytes that memory moves, tensors to hold, and which storages, by their
    bytes, are held for this alone."""

    cost: float
    held: list[tuple[Source, Tensor]]
    new_bytes: dict[int, int]

    def plus(self, other: "_Need") -> "_Need":
        return _Need(self.cost + other.cost, self.held + other.held, self.new_bytes | other.new_bytes)


class _Memo:
    """The calls of one forward pass, by the memory that they wrote; and what autograd saves of them."""

    def __init__(self, *, frees_weights: bool) -> None:
        self._frees_weights = frees_weights
        # By the address of a storage.
        self._outputs: dict[int, _Memory] = {}
        self._kept: dict[int, _Memory] = {}
        self._weights: set[int] = set()
        self._hooks = current_hooks()

    def close(self) -> None:
        """The forward pass is over. Autograd holds this as long as a graph."""
        self._outputs, self._kept, self._weights = {}, {}, set()

    # What autograd saves.

    def pack(self, tensor: Tensor) -> Any:
        if self._note_weight(tensor):
            return KeptTensor(tensor, self._hooks)
        output = _find(self._outputs, tensor)
        if output is None or output.call.is_product or not self._settle(output.call, _num_bytes(tensor)):
            return self._hold(tensor)
        output.call.num_waiting += 1
        return _Again(output, View.of(tensor))

    @staticmethod
    def unpack(saved: "_Again | KeptTensor") -> Tensor:
        return saved.take()

    def _hold(self, tensor: Tensor) -> KeptTensor:
        """Keep a tensor; others share it."""
        kept = KeptTensor(tensor, self._hooks)
        if tensor.layout is torch.strided and _find(self._kept, tensor) is None:
            self._kept[_address(tensor)] = _Memory.of(tensor, kept)
        return kept

    # Which calls can be repeated.

    def _settle(self, call: Call, num_bytes: int) -> bool:
        """Whether to repeat `call` for a saved tensor of so many bytes; what it needs is held then."""
        need = self._need(call, num_bytes)
        if need is None or need.cost > MOST_PASSES * num_bytes:
            return False
        if 2 * sum(need.new_bytes.values()) > num_bytes:
            return False
        for source, tensor in need.held:
            if self._is_freed(tensor):
                copy = tensor.clone()
                source.hold_copy(self._hold(copy), copy)
            else:
                source.hold(_find(self._kept, tensor) or self._hold(tensor))
        return True

    def _need(self, call: Call, num_bytes: int, depth: int = 0, *, in_sum: bool = False) -> _Need | None:
        in_sum = passes_product(call.function, in_sum=in_sum)
        total = _Need(call.cost, [], {})
        for source in call.sources:
            need = self._need_of(source, num_bytes, depth, in_sum=in_sum)
            if need is None or total.cost + need.cost > MOST_PASSES * num_bytes:
                return None
            total = total.plus(need)
        return total

    def _need_of(self, source: Source, num_bytes: int, depth: int, *, in_sum: bool) -> _Need | None:
        """An argument is kept by somebody else, or small, or made again, or held for this alone."""
        if source.kept is not None:
            return _Need(0, [], {})
        is_small, alone = source.num_bytes * _SMALL <= num_bytes, None
        if (tensor := source.tensor) is not None:
            alone = _Need(0, [(source, tensor)], {_address(tensor): source.num_bytes})
            if self._is_freed(tensor):
                return alone if is_small else None
            if _find(self._kept, tensor) is not None:
                return _Need(0, [(source, tensor)], {})
        if source.made_by is None or depth == _DEEPEST or (is_small and alone is not None):
            return alone
        call = source.made_by.call
        if call.is_product and not in_sum:
            return alone
        return self._need(call, num_bytes, depth + 1, in_sum=in_sum) or alone

    def _note_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight; or a view of one, where weights are freed."""
        is_weight = issubclass(type(tensor), nn.Parameter)
        if self._frees_weights and (is_weight or issubclass(type(tensor._base), nn.Parameter)):
            self._weights.add(_address(tensor))
            return True
        return is_weight

    def _is_freed(self, tensor: Tensor) -> bool:
        """Whether it is a weight that the backward pass may not find in memory."""
        return self._frees_weights and _address(tensor) in self._weights

    # What the forward pass does.

    def record(
        self, function: Any, args: Any, kwargs: Any, result: Any, product_cost: float | None = None
    ) -> None:
        """A call that has returned new memory."""
        outputs = result if type(result) is tuple else (result,)
        if not isinstance(outputs[0], Tensor) or outputs[0].nbytes < _SMALLEST:
            return
        if any(leaf.device != outputs[0].device for leaf in args[:1] if isinstance(leaf, Tensor)):
            return  # it was moved
        try:
            args, kwargs = replace(args, self._source), replace(kwargs, self._source)
        except _SpecialTensorError:
            return
        call = Call(function, args, kwargs, product_cost)
        for number, output in enumerate(outputs):
            if isinstance(output, Tensor):
                call.cost += output.nbytes if product_cost is None else 0
                self._outputs[_address(output)] = _Memory.of(output, Output(call, number))

    def _source(self, leaf: Any) -> Any:
        """What stands for an argument."""
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.dtype.is_complex:
            raise _SpecialTensorError
        if type(leaf) is nn.Parameter and not self._frees_weights:
            return Weight(leaf)
        if self._note_weight(leaf):
            return Source(leaf, None, None)
        if type(leaf) is not Tensor:
            raise _SpecialTensorError
        return Source(leaf, _find(self._outputs, leaf), _find(self._kept, leaf))

    def forget(self, args: Any, kwargs: Any) -> None:
        """Arguments were written: no call makes them as they are now."""
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._outputs.pop(_address(leaf), None)


class _Watch(TorchFunctionMode):
    """Sees the functions that the model calls. Cheap ones are watched operation by operation."""

    def __init__(self, memo: _Memo) -> None:
        super().__init__()
        self._memo, self._recorder = memo, _Recorder(memo)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in STRAIGHT or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func not in SIMPLE or not args or "out" in kwargs or is_autocast():
            with self._recorder:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if returns_new_memory(result, args):
            self._memo.record(func, args, kwargs, result, product_cost(func, args, result))
        return result


class _Recorder(TorchDispatchMode):
    """Sees the operations that one function consists of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it is not active in compiled code, and torch's guard against that takes microseconds

    def __init__(self, memo: _Memo) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memo = memo

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        kind = kind_of(func)
        if kind is Kind.CHEAP:
            self._memo.record(func, repeatable(func, args), kwargs, result)
        elif kind is Kind.WRITES:
            self._memo.forget(args, kwargs)
        return result


class _SpecialTensorError(Exception):
    """An argument is more than elements of a storage."""


def _num_bytes(tensor: Tensor) -> int:
    """What it takes to keep a tensor: no more than its storage, of which it may repeat elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else 0


def _find(memories: dict[int, _Memory], tensor: Tensor) -> Any:
    """What there is for the memory of a tensor, as it is now."""
    if tensor.layout is not torch.strided:
        return None
    memory = memories.get(_address(tensor))
    if memory is None or memory.version != tensor._version or memory.dtype != tensor.dtype:
        return None
    return memory.value


def _address(tensor: Tensor) -> int:
    """Which storage a tensor lies in."""
    return int(tensor.untyped_storage()._cdata)
