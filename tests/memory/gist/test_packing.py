"""Small integers in bytes: what comes back, and where it lies."""

import pytest
import torch

from echelon.memory.gist import packing


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("num", [0, 1, 7, 8, 9, 1000])
def test_bits_come_back(width: int, num: int) -> None:
    codes = torch.randint(2**width, (num,), dtype=torch.uint8)
    packed = packing.pack(codes, width)
    assert len(packed) == -(-num * width // 8)
    assert torch.equal(packing.unpack(packed, width, num), codes)


def test_bits_lie_as_documented() -> None:
    assert packing.pack(torch.tensor([0, 1, 1, 0, 0, 0, 0, 1]), 1).tolist() == [0b10000110]
    assert packing.pack(torch.tensor([3, 15, 1]), 4).tolist() == [0b11110011, 1]
