"""Weights that are in memory while something reads them, about a layer of them at a time.

    names        model.layers.0.up   model.layers.0.down   model.layers.1.up   …
    memory       whole               whole                 none                         capacity: a layer

A parameter keeps its tensor and its storage; the storage alone has memory, or none. So whatever autograd has
saved of it, also a view, is right again as soon as the memory is. Every read is known before: any operation
of torch, forward or backward, wherever it is called from. Kernels that torch does not see ask for
an address, or read what their module holds, or what a function has saved: these bring weights too.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_UNSEEN = {  # methods that read memory, and are no operations
    *(Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__),
}
_ADDRESSES = {Tensor.data_ptr, Tensor.__dlpack__}
_LAYER = re.compile(r"(.*\.)?\d+(?=\.)")  # up to the last number: an element of a list of modules


@final
class WeightStream(TorchDispatchMode):
    """`tensors` by name, without memory; what reads them inside `reading()` gets values from `fetch`. As a
    mode of torch it is given every operation of this thread, also those that autograd calls."""

    def __init__(
        self, likes: Mapping[str, Tensor], fetch: Callable[[str], Tensor], device: torch.device
    ) -> None:
        """`likes`: of the meta device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._fetch = fetch
        self._capacity = max(layer_sizes({name: each.nbytes for name, each in likes.items()}), default=0)
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        for name, like in likes.items():
            tensor = self.tensors[name] = torch.empty_like(like, device=device)
            if tensor.nbytes:
                tensor.untyped_storage().resize_(0)
                self._names[tensor.untyped_storage()._cdata] = name
        self._present: dict[str, bool] = {}  # the last used one last; whether it was written into

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights that are in memory now."""
        return sum(self.tensors[name].nbytes for name in self._present)

    @contextmanager
    def reading(self) -> Iterator[None]:
        hook = register_module_forward_pre_hook(lambda module, _: self.bring(module._parameters.values()))
        try:
            # Without threads of its own the backward pass of a device asks for weights in this one.
            with (
                torch.autograd.set_multithreading_enabled(False),
                saved_tensors_hooks(lambda tensor: tensor, self._unpack),
                self,
                _UnseenReads(self),
            ):
                yield
        finally:
            hook.remove()
            for name in list(self._present):
                self._free(name)

    def bring(self, tensors: Iterable[Any], written: Iterable[Any] = ()) -> None:
        """Give memory and values to the weights among `tensors` (or of which these are views), and take it
        from those that were not used for longest. What is written into stays."""
        wanted = self._named(tensors)
        self._present |= {name: self._present.pop(name) for name in wanted if name in self._present}
        absent = [name for name in wanted if name not in self._present]
        if absent:
            self._make_room(sum(self.tensors[name].nbytes for name in absent), wanted)
        for name in absent:
            self._fill(name)
        self._present |= dict.fromkeys(self._named(written), True)

    def _named(self, tensors: Iterable[Any]) -> dict[str, None]:
        storages = [
            each.untyped_storage()._cdata
            for each in tensors
            if isinstance(each, Tensor) and each.layout == torch.strided
        ]
        return {self._names[each]: None for each in storages if each in self._names}

    def _make_room(self, needed: int, wanted: Mapping[str, None]) -> None:
        for name, is_written in list(self._present.items()):
            if self.num_bytes + needed <= self._capacity:
                return
            if name not in wanted and not is_written:
                self._free(name)

    def _fill(self, name: str) -> None:
        with _disable_current_modes(), torch.no_grad():
            values, tensor = self._fetch(name), self.tensors[name]
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.data.copy_(values)  # of a version of its own: what was saved of the weight is as it was
        self._present[name] = False

    def _free(self, name: str) -> None:
        storage = self.tensors[name].untyped_storage()
        if storage.resizable():  # else an array of numpy shares its memory
            storage.resize_(0)
            del self._present[name]

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.bring([tensor])
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formals = func._schema.arguments
        given = {formal.name: each for formal, each in zip(formals, args, strict=False)} | (kwargs or {})
        writes = [formal.name for formal in formals if formal.alias_info and formal.alias_info.is_write]
        self.bring(tree_leaves((args, kwargs)), tree_leaves([given.get(name) for name in writes]))
        return func(*args, **(kwargs or {}))


@final
class _UnseenReads(TorchFunctionMode):
    def __init__(self, stream: WeightStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN:  # an address may be used for long: that weight stays
            self._stream.bring(args[:1], args[:1] if func in _ADDRESSES else ())
        return func(*args, **(kwargs or {}))


def layer_sizes(sizes: Mapping[str, int]) -> list[int]:
    """Add up the sizes of weights by layer: by element of a list of modules, or by module.
    layer_sizes({"0.up.weight": 3, "0.down.weight": 3, "1.up.weight": 4}) == [6, 4]"""
    layers: Counter[str] = Counter()
    for name, size in sizes.items():
        match = _LAYER.match(name)
        layers[match[0] if match else name.rpartition(".")[0]] += size
    return list(layers.values())
