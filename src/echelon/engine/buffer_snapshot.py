"""The buffers of a model before a step, so that a step that is refused leaves them as they were.

A forward pass changes running statistics before anybody knows whether the step makes an update. On a device
that stays unknown to the host: there a kernel chooses between old and new values.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

Slot = tuple[nn.Module, str]


class _Saved(NamedTuple):
    """A copy of `source`, made when that had `version`."""

    copy: Tensor
    source: Tensor
    version: int


class _Change(NamedTuple):
    slot: Slot
    buffer: Tensor
    before: Tensor

    def can_be_undone_in_place(self, refused: bool | Tensor) -> bool:
        near = not isinstance(refused, Tensor) or refused.device == self.buffer.device
        return near and _is_writable(self.buffer) and _same_form(self.buffer, self.before)


@final
class BufferSnapshot:
    """`take` before a step, `restore` where it may have been refused."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(module for root in modules for module in root.modules()))
        self._saved: dict[Slot, _Saved] = {}

    @torch.no_grad()
    def take(self) -> None:
        """Copy the buffers that may have changed since they were last copied. Waits for nothing."""
        again: list[_Change] = []
        for slot, buffer in self._buffers():
            saved = self._saved.get(slot)
            if saved is None or not _same_form(buffer, saved.copy):
                self._saved[slot] = _Saved(buffer.detach().clone(), buffer, buffer._version)
            elif _may_differ(buffer, saved):
                self._saved[slot] = _Saved(saved.copy, buffer, buffer._version)
                again.append(_Change(slot, buffer, saved.copy))
        for group in _by_memory(again):
            torch._foreach_copy_([each.before for each in group], [each.buffer for each in group])

    @torch.no_grad()
    def restore(self, refused: bool | Tensor) -> None:
        """Where `refused`, bring all buffers back to what `take` found.

        A flag on a device is not read, unless a buffer has got another form or device in the step.
        """
        if refused is False:
            return
        in_place: list[_Change] = []
        for change in self._changes():
            if change.can_be_undone_in_place(refused):
                in_place.append(change)
            elif refused:
                module, name = change.slot
                module._buffers[name] = change.before.clone()
        for group in _by_memory(in_place):
            before = [each.before for each in group]
            values = _choose(refused, group) if isinstance(refused, Tensor) else before
            torch._foreach_copy_([each.buffer for each in group], values)

    def _buffers(self) -> Iterator[tuple[Slot, Tensor]]:
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield (module, name), buffer

    def _changes(self) -> Iterator[_Change]:
        for slot, buffer in self._buffers():
            saved = self._saved.get(slot)
            if saved is not None and _may_differ(buffer, saved):
                yield _Change(slot, buffer, saved.copy)


def _may_differ(buffer: Tensor, saved: _Saved) -> bool:
    # Kernels of normalisation change running statistics, vectors, and leave no mark on the tensor's version.
    is_vector = buffer.ndim == 1 and buffer.is_floating_point() and _is_writable(buffer)
    return is_vector or buffer is not saved.source or buffer._version != saved.version


def _same_form(one: Tensor, other: Tensor) -> bool:
    is_same_kind = one.dtype == other.dtype and one.device == other.device and one.layout == other.layout
    return is_same_kind and one.shape == other.shape


def _is_writable(buffer: Tensor) -> bool:
    """Whether each element has memory of its own: an expanded tensor cannot be copied into."""
    if buffer.layout != torch.strided:
        return False
    return buffer.is_contiguous() or all(
        stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)
    )


def _by_memory(changes: Sequence[_Change]) -> list[list[_Change]]:
    """Those of one device and type together: few kernels serve them all."""
    groups: dict[tuple[torch.device, torch.dtype], list[_Change]] = {}
    for each in changes:
        groups.setdefault((each.buffer.device, each.buffer.dtype), []).append(each)
    return list(groups.values())


def _choose(refused: Tensor, changes: Sequence[_Change]) -> list[Tensor]:
    """The old values where `refused`, else the new ones; the host does not learn which."""
    before = torch.cat([each.before.flatten() for each in changes])
    after = torch.cat([each.buffer.flatten() for each in changes])
    chosen = torch.where(refused, before, after).split([each.buffer.numel() for each in changes])
    return [values.view(each.buffer.shape) for values, each in zip(chosen, changes, strict=True)]
