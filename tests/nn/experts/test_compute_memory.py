"""What experts keep for the backward pass, and how many rows there are at the same time."""

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from echelon.nn.experts import Experts
from tests.peak_memory import PeakMemory

TOKENS, TOP_K, WIDTH, HIDDEN, EXPERTS = 40, 3, 26, 17, 4
SLOTS = TOKENS * TOP_K


def draw() -> tuple[Experts, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(TOKENS, TOP_K, dtype=torch.float64, requires_grad=True)
    indices = torch.randint(EXPERTS, (TOKENS, TOP_K))
    return Experts(EXPERTS, WIDTH, HIDDEN).double(), x, indices, weights


def test_only_the_input_and_what_the_first_matrices_give_are_kept() -> None:
    experts, x, indices, weights = draw()
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = experts(x, indices, weights)
    shapes = sorted(tuple(tensor.shape) for tensor in saved.values() if tensor.is_floating_point())
    expected = [x.shape, (SLOTS, 2 * HIDDEN), (SLOTS,), experts.first.shape, experts.down_proj.shape]
    assert shapes == sorted(tuple(shape) for shape in expected)
    output.sum().backward()


class LiveRows(PeakMemory):
    """Counts only tensors that have a row for each slot, as wide as a token."""

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.shape == (SLOTS, WIDTH)


def test_dispatch_takes_the_rows_of_all_slots_once() -> None:
    """2 · tokens · top_k · width is what a mixture may take; it takes half of that."""
    experts, x, indices, weights = draw()
    with LiveRows() as live:
        experts(x, indices, weights).sum().backward()
    once = SLOTS * WIDTH * x.element_size()
    assert live.peak == once
