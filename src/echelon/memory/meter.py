"""Memory by category, measured from the storages that are alive, not computed from a plan.

Parameters, gradients, optimizer state and buffers are found by walking what holds them; activations are the
tensors that autograd saves for the backward pass, seen through its saved-tensor hooks. A storage that
several tensors share counts once, and one that is already a parameter or buffer is no activation.

What offload has put into the memory of the host is counted apart: it is in no category of the device, also
where the device is the CPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from echelon.hardware import available_memory, total_memory
from echelon.memory.storages import address_of, storages_of
from echelon.nn.autograd.saved_tensors import check_unchanged, observe
from echelon.nn.tracing import untraced
from echelon.parallel.observer import ForwardPass, StepObserver

CATEGORIES = ("parameters", "gradients", "optimizer", "activations", "buffers")
HOST_CATEGORIES = ("parameters", "gradients", "optimizer", "activations")

# Measuring costs a little time in each step, and steps are alike: the first ones tell.
METERED_STEPS = 3


class Memory(NamedTuple):
    """Bytes by category. `peak` is each category's own, of the first steps; `peak_total` of all at once.

    `host` and `host_peak` are of what offload keeps in the memory of the host, and in no other category.
    """

    now: dict[str, int]
    peak: dict[str, int]
    peak_total: int
    host: dict[str, int]
    host_peak: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.now.values())


class Meter(StepObserver):
    """Watches one rank's model; `storages` hold each category but activations, `host` is in host memory."""

    def __init__(
        self,
        module: nn.Module,
        storages: Callable[[], dict[str, list[Tensor]]],
        host: Callable[[], dict[str, list[Tensor]]] = dict,
    ) -> None:
        self._module, self._storages, self._host = module, storages, host
        self._saved: Counter[int] = Counter()
        self._activations = 0
        self._peak = dict.fromkeys(CATEGORIES, 0)
        self._host_peak = dict.fromkeys(HOST_CATEGORIES, 0)
        self._peak_total = self._other_bytes = 0
        self._steps = 0
        self.sample()

    def read(self) -> Memory:
        now, host = self._measure()
        return Memory(now, dict(self._peak), self._peak_total, host, dict(self._host_peak))

    def sample(self) -> None:
        """Raise the peaks to what memory holds now, in the steps that are metered."""
        if self._steps < METERED_STEPS:
            self._measure()

    def before_reduce(self) -> None:
        self.sample()

    before_unit = before_reduce

    def after_step(self) -> None:
        self.sample()
        self._steps += 1

    def _measure(self) -> tuple[dict[str, int], dict[str, int]]:
        on_host = self._host()
        apart = storages_of(tensor for tensors in on_host.values() for tensor in tensors)
        found = {category: _storage_bytes(tensors, apart) for category, tensors in self._storages().items()}
        found["activations"] = self._activations
        now = {category: found[category] for category in CATEGORIES}
        for category, size in now.items():
            self._peak[category] = max(self._peak[category], size)
        self._other_bytes = sum(now.values()) - self._activations
        self._peak_total = max(self._peak_total, sum(now.values()))
        host = {category: _storage_bytes(on_host.get(category, ())) for category in HOST_CATEGORIES}
        for category, size in host.items():
            self._host_peak[category] = max(self._host_peak[category], size)
        return now, host

    def around_pass(self, forward: ForwardPass) -> AbstractContextManager[None] | None:  # noqa: ARG002
        return self.activations() if self._steps < METERED_STEPS else None

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Count what autograd saves inside, until the backward pass lets it go."""
        held = storages_of(
            [
                *self._storages()["parameters"],
                *self._module.parameters(),
                *self._module.buffers(),
                *(tensor for tensors in self._host().values() for tensor in tensors),
            ]
        )

        @untraced  # a layer that is compiled in pieces calls these between them
        def pack(tensor: Tensor) -> _Saved:
            counts = tensor.layout == torch.strided and address_of(tensor) not in held
            return _Saved(tensor, self if counts else None)

        @untraced
        def unpack(saved: _Saved) -> Tensor:
            return saved.take()

        with observe(pack, unpack):
            yield

    def _keep(self, identity: int, size: int) -> None:
        if self._saved[identity] == 0:
            self._activations += size
            self._peak["activations"] = max(self._peak["activations"], self._activations)
            self._peak_total = max(self._peak_total, self._other_bytes + self._activations)
        self._saved[identity] += 1

    def _drop(self, identity: int, size: int) -> None:
        self._saved[identity] -= 1
        if self._saved[identity] == 0:
            del self._saved[identity]
            self._activations -= size


class _Saved:
    """A tensor that autograd keeps; tells the meter when it is let go."""

    def __init__(self, tensor: Tensor, meter: Meter | None) -> None:
        # Without its history: an output that holds its own graph would never be freed without a backward
        # pass.
        self._tensor, self._meter, self._version = tensor.detach(), meter, tensor._version
        if meter is not None:
            self._storage = (address_of(tensor), tensor.untyped_storage().nbytes())
            meter._keep(*self._storage)

    def take(self) -> Tensor:
        check_unchanged(self._tensor, self._version)
        return self._tensor

    @untraced
    def __del__(self) -> None:
        if self._meter is not None:
            self._meter._drop(*self._storage)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process could still take, with those that torch keeps of a CUDA device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = available_memory()
    return total_memory() // 2 if available is None else available


def _storage_bytes(tensors: Iterable[Tensor], without: Set[int] = frozenset()) -> int:
    """The bytes of the distinct storages behind `tensors`, but for those of `without`."""
    dense = (t for t in tensors if t.layout == torch.strided and address_of(t) not in without)
    storages = {(s.device, s.data_ptr()): s.nbytes() for s in (t.untyped_storage() for t in dense)}
    return sum(storages.values())
