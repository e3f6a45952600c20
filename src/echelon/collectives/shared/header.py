"""The header of a slot: what the slot holds, so that ranks that call different operations find out."""

from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import torch

from echelon.collectives.group import Reduction
from echelon.collectives.shared.tensor_memory import TensorMemory

HEADER_BYTES = 64  # one cache line, so that slots stay aligned for every type


class OperationKind(IntEnum):
    """The operations that go through shared memory."""

    ALL_REDUCE = 1
    REDUCE_SCATTER = 2
    ALL_GATHER = 3
    BROADCAST = 4
    SEND = 5


_REDUCTIONS: list[Reduction | None] = [None, "sum", "mean", "min", "max"]
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_DTYPE_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Header(NamedTuple):
    """All integers, so that it can be packed into the slot."""

    number: int  # of the operation in its queue, so that no rank reads the slot of another operation
    kind: int
    payload: int
    dtype: int
    reduction: int
    source: int  # of a broadcast, else −1
    is_direct: int  # 1: readers copy from `address`, not from the slot
    address: int  # of the writer's tensor

    @classmethod
    def of(
        cls,
        kind: OperationKind,
        payload: TensorMemory,
        number: int,
        *,
        op: Reduction | None = None,
        source: int = -1,
        readable: TensorMemory | None = None,
    ) -> "Header":
        """For operation `number` of its queue on `payload`; the others read `readable` directly, if given."""
        return cls(
            number,
            kind,
            payload.length,
            _DTYPE_CODES[payload.dtype],
            _REDUCTIONS.index(op),
            source,
            readable is not None,
            0 if readable is None else readable.address,
        )

    def matches(self, other: "Header") -> bool:
        """Whether both describe the same operation; each rank's tensor has an address of its own."""
        return self[:-1] == other[:-1]

    def __str__(self) -> str:
        name = OperationKind(self.kind).name.lower()
        dtype = str(_DTYPES[self.dtype]).removeprefix("torch.")
        reduction = f", {_REDUCTIONS[self.reduction]}" if self.reduction else ""
        source = f", from rank {self.source}" if self.source >= 0 else ""
        in_place = ", read in place" if self.is_direct else ""
        details = reduction + source + in_place
        return f"{name} of {self.payload} bytes of {dtype}{details} (number {self.number})"


PACKED_HEADER = Struct(f"{len(Header._fields)}q")
assert PACKED_HEADER.size <= HEADER_BYTES
