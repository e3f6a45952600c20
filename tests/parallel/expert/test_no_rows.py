"""A rank that gets no row returns none, of the form that the others return theirs in."""

from typing import cast

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import RecordingGroup
from echelon.nn.experts import Experts
from echelon.parallel.expert.modules import Dispatch, Journey, SpreadExperts


class Wider(nn.Module):
    """Experts that return more columns than they get, of another type, and cannot be called without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 2
        self.up_proj = nn.Parameter(torch.randn(2, 4, 6))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert len(hidden_states)
        computed = torch.einsum("tw,two->to", hidden_states, self.up_proj[top_k_index[:, 0]])
        return (computed * top_k_weights).double()


def computed(module: nn.Module, number: int) -> tuple[Tensor, Tensor]:
    """What a rank makes of `number` rows for its second expert, and the rows."""
    group = RecordingGroup("expert", 0, 2)
    counts = torch.tensor([[0, number], [0, 0]])
    rows = torch.randn(number, 4, requires_grad=True)
    spread = SpreadExperts(module, group, 4)
    return spread._compute(rows, Dispatch(cast(Journey, None), 0, number, counts)), rows


@pytest.mark.parametrize("has_autocast", [False, True])
@pytest.mark.parametrize("make", [lambda: Experts(2, 4, 3), Wider])
def test_no_rows_have_the_type_and_width_of_some(make: type[nn.Module], has_autocast: bool) -> None:
    module = make()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_autocast):
        some, _ = computed(module, 3)
        none, rows = computed(module, 0)
    assert some.dtype == (
        torch.float64 if make is Wider else torch.bfloat16 if has_autocast else torch.float32
    )
    assert (none.dtype, none.shape) == (some.dtype, (0, some.shape[1]))
    none.sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == (0, 4)
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
