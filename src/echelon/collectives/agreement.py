"""Ranks agree on something small: numbers, texts, plain values, a decision, the first failure.

Functions with a `group` use its collectives, and are entered into its ledger. A check or a decision of all
ranks, which may take minutes, goes through the store of the process group: an operation has a time limit.
All ranks must call each function, in the same order.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.group import Group
from echelon.errors import UserError
from echelon.launching.group import agree_in_world, all_gather_bytes
from echelon.launching.results import decode, encode

T = TypeVar("T")

# Through the store.


def check_on_every_rank(check: Callable[[], object]) -> None:
    """Raise, on every rank, the error that `check` raises on any."""

    def report() -> None:
        check()

    agree_on_every_rank(report, lambda _: None)


def agree_on_every_rank(report: Callable[[], object], decide: Callable[[list[Any]], object]) -> Any:
    """Return what `decide`, on rank 0, makes of the reports of all ranks, in rank order; both travel as JSON.

    A UserError, of `decide` or of any report, is raised on every rank, and rank 0 decides only when all have
    reported. Any other error is a PeerLost on the other ranks. Without a process group, this rank is all.
    """
    return agree_in_world(report, decide) if dist.is_initialized() else decide([report()])


def decide_on_rank_0(decide: Callable[[], object]) -> Any:
    """Return, on every rank, what `decide` returns on rank 0, as JSON; or raise its UserError."""
    return agree_in_world(lambda: None, lambda _: decide())


def ask_rank_0(fn: Callable[[], T]) -> T:
    """As `decide_on_rank_0`, for any value that `launch` can return."""
    text = decide_on_rank_0(lambda: encode(fn()).hex())
    all_gather_bytes(b"")  # rank 0 may hold the store: it must not end before all have read
    value: T = decode(bytes.fromhex(text))
    return value


# Through a group.


def gather_rows(row: Tensor, group: Group, subject: str) -> Tensor:
    """Return every rank's `row`, [ranks, …]; nothing is read from the device."""
    rows = row.new_empty(group.size, *row.shape)
    with group.ledger.about(subject):
        group.all_gather(rows, row.contiguous())
    return rows


def gather_values(value: object, group: Group, device: torch.device, subject: str = "agreement") -> list[Any]:
    """Return every rank's plain values, in rank order; they travel as JSON, so tuples arrive as lists."""
    text = json.dumps(value)
    if group.size == 1:
        return [json.loads(text)]
    lengths = gather_rows(torch.tensor([len(text)], device=device), group, subject)
    # JSON is ASCII and ends where its value ends, so blanks are no part of it.
    padded = bytearray(text.ljust(int(lengths.max())).encode())
    rows = gather_rows(torch.frombuffer(padded, dtype=torch.uint8).to(device), group, subject)
    return [json.loads(row.numpy().tobytes()) for row in rows.cpu()]


def is_same(numbers: Sequence[int], group: Group, device: torch.device) -> bool:
    """Return whether all ranks have these numbers, as many on each. Reads the device."""
    with group.ledger.about("agreement"):
        # One message: the largest of −x is minus the smallest of x.
        extremes = torch.tensor([numbers, [-number for number in numbers]], device=device)
        group.all_reduce(extremes, "max")
    largest, smallest_negated = extremes.tolist()
    return all(high == -low for high, low in zip(largest, smallest_negated, strict=True))


class Difference(NamedTuple):
    """The first line that differs between rank 0 and `rank`, as each has it."""

    rank: int
    first: str
    other: str


def check_same_text(
    lines: Sequence[str], group: Group, device: torch.device, message: Callable[[Difference], str]
) -> None:
    """Raise a UserError with `message`, on every rank of the group, unless all have these lines.

    Asked before ranks use what the lines describe: over NCCL, ranks that disagree on the size of a message
    wait forever, or get each other's memory. The texts move only where two numbers of them differ.
    """
    text = "\n".join(lines).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())  # fits an int64
    if not is_same([len(text), digest], group, device):
        gathered = gather_values(list(lines), group, device)
        rank = next(rank for rank, of_rank in enumerate(gathered) if of_rank != gathered[0])
        pairs = zip_longest(gathered[0], gathered[rank], fillvalue="nothing more")
        raise UserError(message(Difference(rank, *next(pair for pair in pairs if pair[0] != pair[1]))))


@final
class RankAgreement:
    """Agreement in an audit, where each rank sees a part and all must continue, or stop, alike. Without a
    group, this rank decides for itself."""

    def __init__(self, group: Group | None, device: torch.device) -> None:
        self.group, self._device = group, device

    @property
    def is_late(self) -> bool:
        """Return whether reading `largest` at once would wait for a device."""
        return self._device.type == "cuda"

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank

    def least(self, *numbers: int) -> list[int]:
        """Return the smallest of each number over all ranks."""
        if self.group is None:
            return list(numbers)
        negative = torch.tensor([-number for number in numbers], device=self._device)
        return [-int(number) for number in self.largest(negative).tolist()]

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the largest of each number over all ranks, on their device. Nothing is read there."""
        on_device = numbers.to(self._device, non_blocking=True)
        if self.group is not None:
            with self.group.ledger.about("checks"):
                self.group.all_reduce(on_device, "max")
        return on_device

    def any(self, *flags: bool) -> list[bool]:
        """Return which flags are set on some rank."""
        return [number < 0 for number in self.least(*(-int(flag) for flag in flags))]

    def gather(self, value: object) -> list[Any]:
        if self.group is None:
            return [json.loads(json.dumps(value))]
        return gather_values(value, self.group, self._device, "checks")

    def check(self, check: Callable[[], object]) -> None:
        if self.group is None:
            check()
        else:
            check_on_every_rank(check)


# Flags that are set if any rank has set them: used parameters, changed buffers.


def set_anywhere(flags: Sequence[bool], group: Group, device: torch.device) -> Sequence[bool]:
    """Return which of `flags` are set on any rank of the group; all ranks take part."""
    return FlagExchange(flags, group, device).wait()


@final
class FlagExchange:
    """Flags on their way to the other ranks. To read the result is to wait for the device. A rank that has
    set all of them knows it without: so in most steps no host waits."""

    def __init__(
        self, flags: Sequence[bool], group: Group, device: torch.device, *, overlaps: bool = False
    ) -> None:
        """`overlaps`: this rank does other work before it waits."""
        self._flags, self._on_device = flags, _to_device(flags, device)
        self._handle = group.all_reduce(self._on_device, "max", wait=False, overlaps=overlaps)

    def wait(self) -> Sequence[bool]:
        self._handle.wait()
        return self._flags if all(self._flags) else self._on_device.bool().tolist()


def _to_device(flags: Sequence[bool], device: torch.device) -> Tensor:
    if all(flags):
        return torch.ones(len(flags), dtype=torch.uint8, device=device)
    # From memory that is not pinned, a copy to a CUDA device waits for it.
    local = torch.tensor(flags, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return local.to(device, non_blocking=True)


# A few numbers that stand for a tensor, computed where it is. Equal bits have equal fingerprints.


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
# Elements that are summed at a time, which bounds the memory. On a CPU they fit a cache.
_AT_ONCE, _AT_ONCE_ON_CPU = 1 << 22, 1 << 16


def fingerprint(tensor: Tensor) -> tuple[int, int]:
    """`device_fingerprint` on the host."""
    plain, weighted = device_fingerprint(tensor).tolist()
    return plain, weighted


def device_fingerprint(tensor: Tensor) -> Tensor:
    """Sum all elements' bits as integers, plainly and weighted by position, as 64 bits hold them."""
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.uint8))
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    step = _portion(tensor)
    for begin in range(0, bits.numel(), step):
        part = bits[begin : begin + step].long()
        places = torch.arange(begin + 1, begin + 1 + len(part), device=part.device)
        sums += torch.stack([part.sum(), places.mul_(part).sum()])
    return sums


def wrapped(number: int) -> int:
    """Return an integer modulo 2⁶⁴, as int64 holds it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def measures(tensor: Tensor) -> Tensor:
    """Return a sum that depends on positions, and the norm, in float64; nonfinite values count as zero."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).flatten()
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in flat.split(_portion(tensor)):
        numbers = part.double().nan_to_num(0.0, 0.0, 0.0)  # a loss that overflows does so on all ranks
        places = torch.arange(len(part), dtype=torch.float64, device=part.device)
        sums += torch.stack([numbers @ places.cos_(), numbers @ numbers])
    sums[1].sqrt_()
    return sums


def _portion(tensor: Tensor) -> int:
    return _AT_ONCE_ON_CPU if tensor.is_cpu else _AT_ONCE


def near(gathered: Tensor, eps: float) -> Tensor:
    """Compare the measures of several ranks, [ranks, tensors, 2]; return which are near, [tensors]. `eps`: of
    the type in which they were computed."""
    sizes, tolerance = gathered[..., 1].amax(0), eps**0.5
    # Tensors that are nothing but rounding may be anything up to that of the largest.
    allowed = tolerance * (sizes + 10 * tolerance * sizes.amax())
    spread = gathered.amax(0) - gathered.amin(0)
    is_near: Tensor = (spread <= allowed[:, None]).all(1)
    return is_near
