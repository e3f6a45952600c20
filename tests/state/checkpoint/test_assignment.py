"""Who writes what, and how it is known that this has changed."""

import torch

from echelon.state.checkpoint.assignment import signature
from echelon.state.ownership import OwnedSlice, Slice


def owned(name: str = "w", begin: int = 0, size: int = 2, dtype: torch.dtype = torch.float32) -> OwnedSlice:
    return OwnedSlice(Slice(name, "value", (4,), (begin,), (size,)), torch.zeros(size, dtype=dtype))


def test_what_is_owned_has_one_signature() -> None:
    assert signature([owned()]) == signature([owned()])
    others = [
        [],
        [owned(name="v")],
        [owned(begin=1)],
        [owned(size=3)],
        [owned(dtype=torch.float64)],
        [owned(), owned()],
    ]
    assert len({signature(each) for each in ([owned()], *others)}) == len(others) + 1
