"""What ranks compare: every difference of a batch is seen, and no rounding of a gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives.mesh import Mesh
from echelon.engine.step.agreement import _fingerprint, check_same_gradients
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.ownership import LocalParameter


def test_every_difference_is_in_the_fingerprint() -> None:
    tokens = torch.arange(12).view(3, 4)
    structures = [
        (tokens, tokens),
        (tokens, tokens + 1),
        (tokens + 1, tokens),
        (tokens.flip(0), tokens),
        (tokens.view(4, 3), tokens),
        (tokens.int(), tokens),
        (tokens.double(), tokens.bool()),
        (tokens.bfloat16(), tokens[:0]),
        (tokens, "name"),
        (tokens, "other"),
    ]
    assert len({tuple(_fingerprint(each)) for each in structures}) == len(structures)
    assert _fingerprint((tokens.t().contiguous().t(), None)) == _fingerprint((tokens.clone(), None))


def compared(of_rank: Callable[[int], list[Tensor]]) -> str:
    group = Mesh.join(Plan(tensor=2)).group("tensor")
    local = []
    for number, gradient in enumerate(of_rank(group.rank)):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        local.append(LocalParameter(str(number), parameter, parameter))
    try:
        check_same_gradients(local, [each.parameter for each in local], group)
    except UserError as error:
        return str(error)
    return "accepted"


def drawn(seed: int, size: float = 1.0) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)) * size


def rounded(rank: int) -> list[Tensor]:
    """The second gradient is nothing but rounding."""
    return [drawn(0) * (1 + 1e-6 * rank), drawn(rank, 1e-7), torch.full((3,), torch.nan)]


def moved(rank: int) -> list[Tensor]:
    return [drawn(0), drawn(1), drawn(2).roll(rank)]


@pytest.mark.parametrize(
    ("of_rank", "says"), [(rounded, "accepted"), (moved, "different gradients of 2, which")]
)
def test_gradients_are_the_same_but_for_rounding(
    warm_ranks: Callable[[int], Ranks], of_rank: Callable[[int], list[Tensor]], says: str
) -> None:
    assert all(says in answer for answer in warm_ranks(2).run(compared, of_rank))
