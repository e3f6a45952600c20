"""State that a forward changes: buffers, which a refused step leaves as they were, and integers (below).

A forward pass changes running statistics before it is known whether the step makes an update. On a device
that stays unknown to the host: there a kernel chooses between old and new values.

Kernels may change a buffer and leave no mark on its version, so buffers are copied in every step. Those above
`LARGEST_COPY` (tables, frozen weights) are not, nor sparse, quantised and expanded ones: of these only a
reassigned one is put back, and what a refused step changed in place stays.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

LARGEST_COPY = 16 * 2**20  # bytes of one buffer; also of what one kernel chooses, for the sake of its memory

Slot = tuple[nn.Module, str]


class _Saved(NamedTuple):
    """A slot at `take`: the buffer itself, the address of its memory, and a copy of its values."""

    buffer: Tensor | None
    address: int
    copy: Tensor | None

    def is_reassigned(self, now: Tensor | None) -> bool:
        """Return True if the slot holds another tensor, or other memory: perhaps the user's batch."""
        if now is not self.buffer or now is None or self.copy is None:
            return now is not self.buffer
        return now.data_ptr() != self.address or not _same_form(now, self.copy)


class _Pair(NamedTuple):
    buffer: Tensor
    copy: Tensor


@final
class BufferSnapshot:
    """`take` before a step, then `restore` when it is decided whether the step was refused."""

    def __init__(self, modules: Sequence[nn.Module], *, largest: int | None = None) -> None:
        """Buffers of more than `largest` bytes (LARGEST_COPY) are not copied."""
        self._largest = LARGEST_COPY if largest is None else largest
        self._modules = list(dict.fromkeys(module for root in modules for module in root.modules()))
        self._saved: dict[Slot, _Saved] | None = None  # while a step is undecided
        self._copies: dict[Slot, Tensor] = {}  # of the last `take`; the next one uses their memory again

    def take(self) -> None:
        """Note and copy what the buffers are now. Waits for nothing."""
        if any(module._buffers for module in self._modules):
            self._copy_all()
        else:  # as in most models
            self._copies, self._saved = {}, {}

    @torch.no_grad()
    def _copy_all(self) -> None:
        earlier, self._copies, self._saved = self._copies, {}, {}
        pairs: list[_Pair] = []
        for slot, buffer in self._buffers():
            if buffer is None or not _is_copied(buffer, self._largest):
                self._saved[slot] = _Saved(buffer, 0, None)
                continue
            copy = earlier.get(slot)
            if copy is None or not _same_form(copy, buffer):
                copy = torch.empty_like(buffer)
            self._copies[slot] = copy
            self._saved[slot] = _Saved(buffer, buffer.data_ptr(), copy)
            pairs.append(_Pair(buffer, copy))
        for group in _by_memory(pairs):
            torch._foreach_copy_([each.copy for each in group], [each.buffer for each in group])

    def restore(self, refused: bool | Tensor) -> None:
        """Bring all buffers back to what `take` found, where `refused`. Only the first call decides.

        A flag on a device is read only where a kernel cannot choose: if a buffer has come, gone or got
        another form in the step, or has changed on another device.
        """
        saved, self._saved = self._saved, None
        if refused is not False and saved is not None:
            self._put_all_back(saved, refused)

    @torch.no_grad()
    def _put_all_back(self, saved: dict[Slot, _Saved], refused: bool | Tensor) -> None:
        in_place: list[_Pair] = []
        for slot, before in saved.items():
            module, name = slot
            now = module._buffers.get(name)
            if before.is_reassigned(now):
                _put_back(slot, before, now, refused)
            elif now is not None and before.copy is not None:
                in_place.append(_Pair(now, before.copy))
        for group in _by_memory(in_place):
            _write_back(group, refused)
        registered = [slot for slot, _ in self._buffers() if slot not in saved]
        if registered and refused:
            for module, name in registered:
                delattr(module, name)

    def storages(self) -> list[Tensor]:
        """List the copies and, while a step is undecided, the buffers that may be put back."""
        held = [saved.buffer for saved in (self._saved or {}).values() if saved.buffer is not None]
        return [*self._copies.values(), *held]

    def _buffers(self) -> Iterator[tuple[Slot, Tensor | None]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                yield (module, name), buffer


def _put_back(slot: Slot, before: _Saved, now: Tensor | None, refused: bool | Tensor) -> None:
    """Give the slot a tensor of its own, or what it held: `now` may be the user's batch, or a view of it."""
    module, name = slot
    old = before.buffer if before.copy is None else before.copy
    if isinstance(refused, Tensor) and old is not None and now is not None and _are_alike(refused, old, now):
        module._buffers[name] = torch.where(refused, old, now)
    elif refused:
        module._buffers[name] = old if before.copy is None else before.copy.clone()


def _write_back(pairs: Sequence[_Pair], refused: bool | Tensor) -> None:
    """Write what was there into the buffers, which all are on one device and of one type."""
    buffers = tuple(each.buffer for each in pairs)
    values = [each.copy for each in pairs]
    if isinstance(refused, Tensor):
        if refused.device == buffers[0].device:
            values = _choose(refused, pairs)
        elif all(torch.equal(*each) for each in pairs) or not refused:
            return
    # The backward passes are over, and a new version would say that constants have changed: replicas would
    # send them. What the step itself has changed keeps the version that it got there.
    with _unsafe_preserve_version_counter(buffers):
        torch._foreach_copy_(buffers, values)


def _choose(refused: Tensor, pairs: Sequence[_Pair]) -> list[Tensor]:
    """Choose the old values where `refused`, else the new ones; the host does not learn which."""
    before = torch.cat([each.copy.flatten() for each in pairs])
    after = torch.cat([each.buffer.flatten() for each in pairs])
    chosen = torch.where(refused, before, after).split([each.buffer.numel() for each in pairs])
    return [values.view(each.buffer.shape) for values, each in zip(chosen, pairs, strict=True)]


def _are_alike(refused: Tensor, old: Tensor, now: Tensor) -> bool:
    """Return True if a kernel can choose between the two: both dense, and all on one device."""
    return _is_dense(old) and _is_dense(now) and _same_form(old, now) and now.device == refused.device


def _is_copied(buffer: Tensor, largest: int) -> bool:
    if not _is_dense(buffer) or buffer.nbytes > largest:
        return False
    # Elements of an expanded tensor share memory: it cannot be written to, and its copy would be larger.
    return buffer.is_contiguous() or all(
        stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta


@final
class ChangedBuffers:
    """The buffers, of those that `read` returns by name, which something changes after this is made."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read, self._before = read, _versions(read())

    def now(self) -> dict[str, Tensor]:
        """Copy them."""
        buffers = self._read()
        changed = dict(_versions(buffers).items() - self._before.items())
        return {name: _numbers(buffers[name].detach()) for name in sorted(changed)}


def _numbers(buffer: Tensor) -> Tensor:
    """Copy a buffer; of a sparse one, the places and the values of its elements in one row."""
    if buffer.layout == torch.strided:
        return buffer.clone()
    elements = buffer.to_sparse_coo().coalesce()
    return torch.cat([elements.indices().flatten(), elements.values().flatten()])


def _versions(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    return {name: (id(each), each._version) for name, each in buffers.items() if not each.is_inference()}


def _same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _by_memory(pairs: Sequence[_Pair]) -> Iterator[list[_Pair]]:
    """Group pairs of one device and type, up to `LARGEST_COPY` bytes: few kernels serve them all."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Pair]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for each in pairs:
        kind = (each.buffer.device, each.buffer.dtype)
        size = sizes.get(kind, 0) + each.buffer.nbytes
        if size > LARGEST_COPY and kind in groups:
            yield groups.pop(kind)
            size = each.buffer.nbytes
        sizes[kind] = size
        groups.setdefault(kind, []).append(each)
    yield from groups.values()


# Integers that a forward keeps in attributes of its modules (self.calls += 1).
#
# On one device a step is one forward pass. Where it has several, as microbatches and second runs of layers,
# each begins with the numbers of the first (stage.py, memory/recompute/second_run.py).


K = TypeVar("K")
NumberSlot = tuple[nn.Module, str]
ABSENT: Any = object()  # for the value of an attribute that is not there


def integer_attributes(modules: Iterable[nn.Module]) -> dict[NumberSlot, int]:
    """Return the attributes of the user's modules that are integers."""
    return {
        (module, name): value
        for module in modules
        if not type(module).__module__.startswith(("torch.", "echelon."))
        for name, value in vars(module).items()
        if type(value) is int
    }


def named_integers(model: nn.Module) -> dict[str, int]:
    """Return the same by name: "layers.0.calls"."""
    paths = {module: path for path, module in model.named_modules()}
    numbers = integer_attributes(paths)
    return {f"{paths[module]}.{key}".removeprefix("."): number for (module, key), number in numbers.items()}


def moved_integers(before: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    """Return by how much each has gone up; one that was not there before, from 0."""
    moved = {key: number - before.get(key, 0) for key, number in now.items()}
    return {key: by for key, by in moved.items() if by}


def attributes(slots: Iterable[NumberSlot]) -> dict[NumberSlot, Any]:
    """Return what these attributes are now, for `attributes_as`."""
    return {(module, name): vars(module).get(name, ABSENT) for module, name in slots}


@contextmanager
def attributes_as(values: Mapping[NumberSlot, Any]) -> Iterator[None]:
    """Inside, attributes are these; then what they were."""
    current = attributes(values)
    _set(values)
    try:
        yield
    finally:
        _set(current)


def _set(values: Mapping[NumberSlot, Any]) -> None:
    for (module, name), value in values.items():
        if value is ABSENT:
            vars(module).pop(name, None)
        else:
            vars(module)[name] = value
