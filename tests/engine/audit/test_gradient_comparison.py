"""Gradients against references: by the norm of each tensor, in any number of boxes."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.collectives.mesh import Mesh
from echelon.engine.audit.gradient_comparison import Comparison, Difference, KeptGradients, share_gradients
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.ownership import OwnedSlice, own_run, run_slices, whole_slice

CPU = torch.device("cpu")


def compare_gradients(
    owned: list[OwnedSlice], reference: dict[str, Tensor], likes: dict[str, Tensor], factor: float
) -> list[Difference]:
    comparison = Comparison(owned, factor)
    share_gradients(reference, likes, None, CPU, comparison.take)
    return comparison.differences(None)


def compare(own: Tensor | None, reference: Tensor | None, factor: float = 1.0) -> Difference:
    like = torch.empty(2, 3, dtype=torch.float64, device="meta")
    owned = [] if own is None else [OwnedSlice(whole_slice("w", own), own)]
    given = {} if reference is None else {"w": reference}
    (difference,) = compare_gradients(owned, given, {"w": like}, factor)
    return difference


def numbers(value: float = 1.0) -> Tensor:
    return torch.full((2, 3), value, dtype=torch.float64)


def test_a_difference_is_relative_to_the_norm_of_its_tensor() -> None:
    tiny = numbers(1e-12)
    assert compare(tiny * 1.5, tiny).relative == pytest.approx(0.5)
    assert compare(numbers(3.0), numbers(3.0))[:3] == ("w", 0.0, pytest.approx(3 * 6**0.5))
    assert compare(numbers(4.0), numbers(2.0), factor=0.5).relative == 0


def test_not_a_number_is_like_another_and_unlike_any_number() -> None:
    wrong = numbers()
    wrong[0, 0] = math.nan
    assert compare(wrong, wrong.clone()).relative == 0
    assert compare(wrong, numbers()).relative == math.inf
    assert compare(numbers(), wrong).relative == math.inf
    assert compare(wrong, numbers())[3:] == (False, True)
    assert compare(numbers(), wrong)[3:] == (True, False)
    infinite = numbers()
    infinite[1, 2] = math.inf
    assert compare(infinite, infinite.clone()).relative == 0
    assert compare(infinite, infinite.clone())[3:] == (True, True)
    assert compare(infinite, numbers()).relative == math.inf


def test_a_gradient_that_only_one_side_has() -> None:
    assert compare(None, numbers()).relative == 1
    assert compare(numbers(), None).relative == math.inf
    assert compare(None, None).relative == compare(numbers(0.0), None).relative == 0


def test_boxes_are_compared_where_they_lie() -> None:
    whole = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    part = own_run(whole.flatten()[1:5].clone(), run_slices("w", (2, 3), 1, 5))
    like = {"w": whole.to("meta")}
    (difference,) = compare_gradients(part, {"w": whole}, like, 1.0)
    assert difference.distance == 0
    part[0].tensor.add_(1)
    (difference,) = compare_gradients(part, {"w": whole}, like, 1.0)
    assert difference.distance == pytest.approx(part[0].tensor.numel() ** 0.5)


def test_complex_gradients() -> None:
    like = torch.empty(2, dtype=torch.complex128, device="meta")
    own = torch.tensor([1 + 1j, 2.0], dtype=torch.complex128)
    owned = [OwnedSlice(whole_slice("w", own), own)]
    (difference,) = compare_gradients(owned, {"w": own + 1j}, {"w": like}, 1.0)
    assert difference.distance == pytest.approx(2**0.5)


def kept_distances(ranks: int) -> list[tuple[str, float, float]]:
    """In a rank: of gradients that were kept, as the sum of two, from others."""
    group = None if ranks == 1 else Mesh.join(Plan(data=ranks)).group("all")
    shapes = {"matrix": (3, 3), "number": (), "none": (0, 2)}
    kept = KeptGradients(group)
    for part in (1.0, 2.0):
        for name, shape in shapes.items():
            kept.take(name, torch.full(shape, part, dtype=torch.float64))
    comparison = kept.comparison(factor=0.5)
    for name, shape in shapes.items():
        comparison.take(name, torch.full(shape, 4.0, dtype=torch.float64))
    return [each[:3] for each in comparison.differences(group)]


def test_gradients_that_ranks_keep_in_parts(warm_ranks: Callable[[int], Ranks]) -> None:
    expected = [("matrix", 7.5, 12.0), ("number", 2.5, 4.0), ("none", 0.0, 0.0)]
    assert kept_distances(1) == expected
    assert warm_ranks(2).run(kept_distances, 2) == [expected, expected]
