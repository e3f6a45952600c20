"""recompute=selective: what is large and cheap is not kept for the backward pass, but computed again there.

    forward    h = up(x)       autograd saves h for gelu: kept
               a = gelu(h)     a call that can be repeated: (gelu, h)
               y = down(a)     autograd saves a for down: the call is kept in its place
    backward   down asks for a: gelu(h) runs again

No layer runs twice. The same operations run on the same arguments, so gradients are the same to the last bit.
What a call needs is kept anyway, or made by another call, or small; else its output is kept.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.memory.recompute.selective_calls import Call, Output, Source, View, Weight, leaves
from echelon.memory.recompute.selective_operations import (
    MOST_PASSES,
    WAYS,
    Kind,
    Way,
    drops_nothing,
    is_autocast,
    kind_of,
    passes_product,
    product_cost,
    repeatable,
    returns_new_memory,
    writes,
)
from echelon.memory.storages import address_of
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, is_recorded
from echelon.nn.autograd.saved_tensors import replace as replace_saved
from echelon.parallel.observer import ForwardPass, StepObserver
from echelon.plan import Plan

_SMALL = 16  # an argument that is so many times smaller than what is saved is held rather than computed
_DEEPEST = 12  # calls of which one needs the next
_SMALLEST = 1024  # bytes: below, the time of the host counts for more than the memory
_free_reference = torch.UntypedStorage._free_weak_ref


@final
class SelectiveRecompute(StepObserver):
    """Is around every forward pass and its loss."""

    def __init__(self, plan: Plan) -> None:
        self._frees_weights = plan.frees_weights

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:  # noqa: ARG002
        return selective(frees_weights=self._frees_weights) if torch.is_grad_enabled() else None


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
    """Held by autograd in place of a tensor."""

    output: Output
    view: View

    def take(self) -> Tensor:
        self.output.call.num_waiting -= 1
        return self.view.take(self.output.value())


class _Memory:
    """The values of a storage at some time. The weak reference keeps its address from being used again."""

    __slots__ = ("_dtype", "_reference", "_version", "kept", "output")

    def __init__(self, tensor: Tensor, output: Output | None, kept: KeptTensor | None) -> None:
        """`output`: of the call that wrote it. `kept`: for the backward pass."""
        self._version, self._dtype = tensor._version, tensor.dtype
        self._reference = tensor.untyped_storage()._weak_ref()
        self.output, self.kept = output, kept

    def has(self, tensor: Tensor) -> bool:
        """Return whether it is that of the tensor, as it is now."""
        return self._version == tensor._version and self._dtype == tensor.dtype

    def __del__(self) -> None:
        _free_reference(self._reference)  # type: ignore[no-untyped-call]


class _Need:
    """The cost of repeating a call, for so many bytes that autograd saves."""

    __slots__ = ("cost", "held", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.cost = 0.0  # bytes that memory moves
        # Tensors to hold, and how many bytes for this alone.
        self.held: list[tuple[Source, Tensor, int]] = []

    def hold(self, source: Source, tensor: Tensor, num_new_bytes: int) -> bool:
        self.held.append((source, tensor, num_new_bytes))
        return True

    def num_new_bytes(self) -> int:
        """Several arguments may lie in one storage."""
        return sum(
            {address_of(tensor): num_bytes for _, tensor, num_bytes in self.held if num_bytes}.values()
        )


class _Memo:
    """The calls of one forward pass, by the memory that they wrote; and what autograd saves of them."""

    def __init__(self, *, frees_weights: bool) -> None:
        self._frees_weights = frees_weights
        # By the address of a storage.
        self._memories: dict[int, _Memory] = {}
        self._weights: set[int] = set()
        self._num_products = 0  # that were asked to run again
        self._hooks = current_hooks()
        # Hooks of others may give back a copy with other strides, of which views show other elements.
        self._keeps_all = is_recorded()

    def close(self) -> None:
        """The forward pass is over. Autograd holds this as long as a graph."""
        self._memories, self._weights = {}, set()

    # What autograd saves.

    def pack(self, tensor: Tensor) -> Any:
        if self._note_weight(tensor) or self._keeps_all or tensor.layout is not torch.strided:
            return KeptTensor(tensor, self._hooks)
        memory = self._memory(tensor)
        if memory is None or memory.kept is not None or (output := memory.output) is None:
            return self._hold(tensor, memory)
        call = output.call
        # A product runs again only as an argument of a sum, never for its own output: it is too dear.
        if call.is_product or not (call.is_settled or self._settle(call, _num_bytes(tensor))):
            return self._hold(tensor, memory)
        call.num_waiting += 1
        return _Again(output, View.of(tensor))

    @staticmethod
    def unpack(saved: "_Again | KeptTensor") -> Tensor:
        return saved.take()

    def _hold(self, tensor: Tensor, memory: _Memory | None) -> KeptTensor:
        """Keep a tensor, which is in this memory; others share it."""
        kept = KeptTensor(tensor, self._hooks)
        if memory is None:
            self._memories[address_of(tensor)] = _Memory(tensor, None, kept)
        elif memory.kept is None:
            memory.kept = kept
        return kept

    def _memory(self, tensor: Tensor) -> _Memory | None:
        """Return the entry for the memory of a tensor, as it is now."""
        memory = self._memories.get(tensor.untyped_storage()._cdata)
        return memory if memory is not None and memory.has(tensor) else None

    # Which calls can be repeated.

    def _settle(self, call: Call, num_bytes: int) -> bool:
        """Return whether to repeat `call` for a saved tensor of so many bytes; what it needs is held then."""
        need = _Need(num_bytes)
        if not self._add_call(need, call, 0, in_sum=False):
            return False
        if 2 * need.num_new_bytes() > num_bytes:  # a second run for less than half of the bytes
            return False
        for source, tensor, _ in need.held:
            if self._is_freed(tensor):
                # The backward pass may not find this weight in memory: a copy of a small one is kept.
                copy = tensor.clone()
                source.hold_copy(KeptTensor(copy, self._hooks), copy)
            else:
                memory = self._memory(tensor)
                source.hold((memory and memory.kept) or self._hold(tensor, memory))
        call.is_settled = True
        return True

    def _runs_again(self, product: Call) -> bool:
        """Products are the dearest of what could run again: every second one does."""
        if product.runs_again is None:
            product.runs_again = self._num_products % 2 == 0
            self._num_products += 1
        return product.runs_again

    def _add_call(self, need: _Need, call: Call, depth: int, *, in_sum: bool) -> bool:
        """Add what a call needs; whether it is cheap enough."""
        need.cost += call.cost
        if need.cost > MOST_PASSES * need.num_bytes or (call.is_product and not self._runs_again(call)):
            return False
        in_sum = passes_product(call.function, in_sum=in_sum)
        for source in call.sources:
            if source.kept is None and not self._add_source(need, source, depth, in_sum=in_sum):
                return False
        return True

    def _add_source(self, need: _Need, source: Source, depth: int, *, in_sum: bool) -> bool:
        """An argument is kept anyway, or small, or made again, or held for this alone."""
        is_small, made_by = source.num_bytes * _SMALL <= need.num_bytes, source.made_by
        if (tensor := source.tensor) is not None:
            if self._is_freed(tensor):
                return is_small and need.hold(source, tensor, source.num_bytes)
            memory = self._memory(tensor)
            if memory is not None and memory.kept is not None:
                return need.hold(source, tensor, 0)
            if is_small:
                return need.hold(source, tensor, source.num_bytes)
        if made_by is not None and depth < _DEEPEST and (in_sum or not made_by.call.is_product):
            cost, num_held = need.cost, len(need.held)
            if self._add_call(need, made_by.call, depth + 1, in_sum=in_sum):
                return True
            need.cost = cost
            del need.held[num_held:]
        return tensor is not None and need.hold(source, tensor, source.num_bytes)

    def _note_weight(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a weight; or a view of one, where weights are freed."""
        kind = type(tensor)
        if not self._frees_weights:
            return kind is not Tensor and issubclass(kind, nn.Parameter)
        is_weight = issubclass(kind, nn.Parameter) or issubclass(type(tensor._base), nn.Parameter)
        if is_weight:
            self._weights.add(address_of(tensor))
        return is_weight

    def _is_freed(self, tensor: Tensor) -> bool:
        """Return whether it is a weight that the backward pass may not find in memory."""
        return self._frees_weights and address_of(tensor) in self._weights

    # What the forward pass does.

    def record_product(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """A product that is too long to run again needs no note."""
        if isinstance(result, Tensor):
            cost = product_cost(function, args, result)
            if cost <= MOST_PASSES * result.nbytes:
                self.record(function, args, kwargs, result, cost)

    def record(self, function: Any, args: Any, kwargs: Any, result: Any, cost: float | None = None) -> None:
        """A call that has returned new memory. `cost`: of a product."""
        outputs = result if type(result) is tuple else (result,)
        first = outputs[0]
        if not isinstance(first, Tensor) or first.layout is not torch.strided or first.nbytes < _SMALLEST:
            return
        if args and isinstance(args[0], Tensor) and args[0].device != first.device:
            return  # it was moved
        sources: list[Source] = []
        try:
            args = [self._stand_in(leaf, sources) for leaf in args]
            kwargs = {name: self._stand_in(leaf, sources) for name, leaf in kwargs.items()}
        except _SpecialTensorError:
            return
        call = Call(function, args, kwargs, sources, cost)
        for number, output in enumerate(outputs):
            if isinstance(output, Tensor):
                call.cost += output.nbytes if cost is None else 0
                self._memories[address_of(output)] = _Memory(output, Output(call, number), None)

    def _stand_in(self, leaf: Any, sources: list[Source]) -> Any:
        """Return the replacement of an argument in a call; append its sources."""
        kind = type(leaf)
        if kind is tuple or kind is list:
            return kind([self._stand_in(item, sources) for item in leaf])
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout is not torch.strided or leaf.dtype.is_complex:
            raise _SpecialTensorError
        if kind is nn.Parameter and not self._frees_weights:
            return Weight(leaf)
        source = self._source(leaf)
        sources.append(source)
        return source

    def _source(self, tensor: Tensor) -> Source:
        if self._note_weight(tensor):
            return Source(tensor, None, None)
        if type(tensor) is not Tensor:
            raise _SpecialTensorError
        memory = self._memory(tensor)
        return Source(tensor, None, None) if memory is None else Source(tensor, memory.output, memory.kept)

    def forget(self, args: Any, kwargs: Any) -> None:
        """Arguments were written: no call makes them as they are now."""
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._memories.pop(address_of(leaf), None)


class _Watch(TorchFunctionMode):
    """Sees the functions that the model calls. Cheap ones are watched operation by operation."""

    def __init__(self, memo: _Memo) -> None:
        super().__init__()
        self._memo, self._recorder = memo, _Recorder(memo)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        way, kwargs = WAYS.get(func), kwargs or {}
        if not torch.is_grad_enabled():
            if writes(func, kwargs):
                self._memo.forget(args[:1], kwargs)  # through `.data`, it leaves no mark
            return func(*args, **kwargs)
        if way is Way.STRAIGHT or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        # A dispatch mode sees every operation inside, and takes microseconds for each: only functions whose
        # way is not known need it. So do all under autocast, which casts arguments below this mode: what runs
        # again are the operations on what was cast.
        if way is None or not args or is_autocast() or "out" in kwargs:
            with nullcontext() if drops_nothing(func, kwargs) else self._recorder:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if way is Way.PRODUCT:
            self._memo.record_product(func, args, kwargs, result)
        elif way is Way.NEW or returns_new_memory(result, args):
            self._memo.record(func, args, kwargs, result)
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
    """Return the bytes of keeping a tensor: no more than its storage, of which it may repeat elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else 0
