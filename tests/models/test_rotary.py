import math

import torch

from echelon.models import RopeScaling
from echelon.models.rotary import Rotary, rotate

PLAIN = Rotary(head_width=4, theta=100.0, scaling=None)


def test_angles_by_hand():
    cos, sin = PLAIN.angles(torch.tensor([0, 3]), torch.float64)
    turns = torch.tensor([[0.0, 0.0], [3.0, 3.0 / math.sqrt(100.0)]], dtype=torch.float64)
    torch.testing.assert_close(cos, turns.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(sin, turns.sin(), rtol=0, atol=1e-15)


def test_angles_are_never_below_float32_and_stay_float64():
    positions = torch.arange(3)
    kinds = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}
    for dtype, computed in kinds.items():
        assert {t.dtype for t in PLAIN.angles(positions, dtype)} == {computed}


def test_a_part_of_a_sequence_turns_as_it_does_within_the_whole():
    angles = PLAIN.angles(torch.arange(10), torch.float64)
    part = PLAIN.angles(torch.arange(6, 10), torch.float64)
    x = torch.randn(1, 2, 10, 4, dtype=torch.float64)
    assert torch.equal(rotate(x, angles)[:, :, 6:], rotate(x[:, :, 6:], part))


def test_scores_depend_on_the_distance_alone():
    x, y = torch.randn(2, 1, 1, 1, 4, dtype=torch.float64)

    def score(at: int, other: int) -> torch.Tensor:
        turned = [rotate(t, PLAIN.angles(torch.tensor([p]), torch.float64)) for t, p in ((x, at), (y, other))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=0, atol=1e-12)
    assert (score(7, 3) - score(7, 4)).abs() > 1e-3


def test_rotation_keeps_type_and_pairs_the_halves():
    quarter = (torch.zeros(1, 2), torch.ones(1, 2))
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.bfloat16)
    turned = rotate(x, quarter)
    assert turned.dtype == torch.bfloat16
    assert turned.flatten().tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_stretching_keeps_fast_pairs_and_slows_slow_ones():
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_sequence=64)
    one = torch.tensor([1])
    turns = torch.asin(Rotary(16, 10000.0, None).angles(one, torch.float64)[1])
    stretched = torch.asin(Rotary(16, 10000.0, scaling).angles(one, torch.float64)[1])
    ratio = stretched[0, 1:] / turns[0, 1:]
    # Turns within 64 positions: 3.2, 1.0, 0.32, …; between 4 and 1 is blended, below 1 is slowed in full.
    blend = (64 * 10 ** (-0.5) / (2 * math.pi) - 1) / 3
    expected = [blend + (1 - blend) / 8, (b := (6.4 / (2 * math.pi) - 1) / 3) + (1 - b) / 8, *[1 / 8] * 5]
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    fast = Rotary(16, 10000.0, RopeScaling(8.0, 1.0, 4.0, 10**9)).angles(one, torch.float64)[1]
    assert torch.equal(torch.asin(fast)[0, :6], turns[0, :6])
