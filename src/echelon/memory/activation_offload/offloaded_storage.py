"""One storage that autograd has saved: on the device, in host memory, or being copied between them.

    forward     device ──store──▶ host      the device's memory is released when the copy is done
    backward    device ◀──fetch── host      new memory; the host's copy stays until its last user is gone

A storage is copied whole, once, however many tensors lie in it: views are restored with their strides.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.collectives.boundary import Copy, HostBoundary, HostMemoryError
from echelon.nn.autograd.saved_tensors import Hooks, KeptTensor, check_unchanged
from echelon.quantities import show_bytes

_SIZES = 8  # of pieces, for each power of two
_PAGE = 4096  # bytes: the smallest piece, and what sizes are multiples of
_MOST_LARGER = 1.5  # how many times larger a piece may be than what is asked for


@final
class HostPool:
    """Pieces of host memory. `free_bytes`: what the host has left for a new piece; None if it is unknown. A
    piece has one of eight sizes for each power of two, so that batches of other shapes use it again. What is
    held is at most what was in use at once, of each size."""

    def __init__(self, boundary: HostBoundary, free_bytes: Callable[[], int | None]) -> None:
        self._boundary, self._free_bytes = boundary, free_bytes
        self._idle: defaultdict[int, list[Tensor]] = defaultdict(list)  # by their size
        self.pieces: list[Tensor] = []
        self.refusal: str | None = None  # why there was no memory, the first time

    @property
    def num_bytes(self) -> int:
        """All that is held, in use or idle."""
        return sum(map(len, self.pieces))

    def take(self, num_bytes: int) -> Tensor | None:
        """A piece of at least so many bytes; None if the host has no memory left."""
        size = piece_size(num_bytes)
        for known in sorted(self._idle):
            if size <= known <= _MOST_LARGER * size and self._idle[known]:
                return self._idle[known].pop()
        free = self._free_bytes()
        if free is not None and size > free:
            self.refusal = self.refusal or (
                f"{show_bytes(size)} more are needed beside the {show_bytes(self.num_bytes)} that this rank "
                f"holds, and the host has {show_bytes(max(0, free))} left"
            )
            return None
        try:
            piece = self._boundary.empty(size, torch.uint8)
        except HostMemoryError as error:
            self.refusal = self.refusal or str(error)
            return None
        self.pieces.append(piece)
        return piece

    def give_back(self, piece: Tensor) -> None:
        self._idle[len(piece)].append(piece)


def piece_size(num_bytes: int) -> int:
    """The size of the piece for so many bytes.

    >>> piece_size(1), piece_size(5000), piece_size(1_000_000)
    (4096, 8192, 1048576)
    """
    step = max(_PAGE, (1 << (max(num_bytes, 1) - 1).bit_length()) // (2 * _SIZES))
    return -(-max(num_bytes, 1) // step) * step


_free_reference = torch.UntypedStorage._free_weak_ref


@final
class StepStream:
    """The stream of the step that runs, in whose order activations are allocated, copied and released.
    Autograd's saved tensors may be freed by any thread, under any current stream: by the garbage collector,
    or by a caller that held a loss. If a copy were waited for on that stream, the step's own stream could
    write into memory that the copy still reads. On the CPU there is one order only."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        """Queue the device work inside on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def lend(self, memory: Tensor) -> None:
        """Let the current stream use memory of this stream, as it is now."""
        if self._stream is not None:
            current = torch.cuda.current_stream(memory.device)
            if current != self._stream:
                current.wait_stream(self._stream)
                # Else the allocator gives the memory out again when this stream, not `current`, is done.
                memory.record_stream(current)


class View(NamedTuple):
    """A tensor as elements of its storage."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "View":
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def take(self, memory: Tensor) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        return tensor.set_(memory.untyped_storage(), self.offset, self.shape, self.strides)


@final
class SavedVersion:
    """Remembers whether a saved tensor was changed in place before its copy was made."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version

    def finish(self) -> None:
        """The copy is made: later changes do not reach it."""
        if self._tensor is not None and self._tensor._version == self._version:
            self._tensor = None

    def check(self) -> None:
        """Raise, as autograd does, if the tensor was changed."""
        if self._tensor is not None:
            check_unchanged(self._tensor, self._version)


@final
class SharedPiece:
    """A piece of host memory for storages that are stored together; the last of them gives it back."""

    def __init__(self, pool: HostPool, piece: Tensor) -> None:
        self.piece = piece
        self._pool, self._num_users = pool, 0

    def acquire(self) -> None:
        self._num_users += 1

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self._pool.give_back(self.piece)


@final
class OffloadedStorage:
    """`group`: the number of the layer that saved it first. `versions`: of the tensors that were saved before
    the copy was made. `observer`: counts what lies on the device."""

    def __init__(
        self, tensor: Tensor, group: int, boundary: HostBoundary, stream: StepStream, observer: Hooks | None
    ) -> None:
        storage = tensor.untyped_storage()
        self.group, self.num_bytes, self.num_users = group, storage.nbytes(), 0
        self.versions: list[SavedVersion] = []
        self._stream = stream
        self._boundary, self._observer, self._device = boundary, observer, tensor.device
        # A weak reference keeps the address from being used by another storage during the forward pass.
        self._reference: Any = storage._weak_ref()
        self._memory: Tensor | None = None
        self._counted: KeptTensor | None = None
        self._hold(View(torch.uint8, torch.Size([self.num_bytes]), (1,), 0).take(tensor))
        self._copy: Copy | None = None
        self._host: Tensor | None = None
        self._piece: SharedPiece | None = None

    @property
    def is_stored(self) -> bool:
        return self._host is not None

    @property
    def is_here(self) -> bool:
        """Return whether it takes memory of the device."""
        return self._memory is not None

    def store(self, piece: SharedPiece, begin: int) -> None:
        assert self._memory is not None
        self._piece, self._host = piece, piece.piece[begin : begin + self.num_bytes]
        piece.acquire()
        with self._stream.entered():
            self._copy = self._boundary.store(self._host, self._memory)

    def fetch(self) -> None:
        """Begin to copy it to the device, if it is not there."""
        if self._memory is None:
            assert self._host is not None
            with self._stream.entered():
                memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)
                self._copy = self._boundary.fetch(memory, self._host)
            self._hold(memory)

    def value(self) -> Tensor:
        self.fetch()
        self._wait()
        assert self._memory is not None
        self._stream.lend(self._memory)
        return self._memory

    def drop(self) -> None:
        """Release the device's memory, if the host has a copy."""
        if self.is_stored and self._memory is not None:
            # The memory may be given out again at once: work queued from here on must find the copy done.
            self._wait()
            self._memory = self._counted = None
            for version in self.versions:
                version.finish()
            self.versions = []

    def release_address(self) -> None:
        """The forward pass is over: no other tensor of this storage will be saved."""
        if self._reference is not None:
            _free_reference(self._reference)  # type: ignore[no-untyped-call]
            self._reference = None

    def end_use(self) -> None:
        """One of the saved tensors that need it is gone."""
        self.num_users -= 1
        if self.num_users == 0:
            self._wait()
            self._memory = self._counted = None
            self.versions = []
            if self._piece is not None:
                self._piece.release()
                self._piece = None

    def _hold(self, memory: Tensor) -> None:
        self._memory, self._counted = memory, KeptTensor(memory, self._observer)

    def _wait(self) -> None:
        """Let the step's stream wait for the copy; the host does not wait."""
        copy, self._copy = self._copy, None
        if copy is not None:
            with self._stream.entered():
                copy.wait()

    def __del__(self) -> None:
        self.release_address()
