"""Small chains of layers, with and without segments around them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from echelon.memory.recompute.saved_inputs import SavedInputs
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.memory.recompute.segment import Segment, SegmentSettings
from echelon.nn.sequence import View
from echelon.nn.wrapping import Wrapping

Gradients = list[Tensor]


def settings(check: SecondRunCheck | None = None, view: View | None = None) -> SegmentSettings:
    return SegmentSettings(
        torch.device("cpu"),
        view or View(),
        check or SecondRunCheck(),
        SavedInputs(),
        lambda _: nullcontext(),
    )


def recompute(
    layers: Sequence[nn.Module], sizes: Sequence[int], shared: SegmentSettings | None = None
) -> Wrapping:
    """Make segments of so many layers each."""
    wrapping, shared, rest = Wrapping(), shared or settings(), list(layers)
    for size in sizes:
        segment, rest = rest[:size], rest[size:]
        Segment(segment, [type(layer).__name__ for layer in segment], shared).wrap(wrapping)
    return wrapping


def train(
    make: Callable[[], nn.Sequential],
    sizes: Sequence[int],
    *,
    steps: int = 3,
    shared: SegmentSettings | None = None,
    step: Callable[[nn.Module, int], None] | None = None,
) -> dict[str, Tensor]:
    """Weights and buffers after a few steps of SGD; `sizes`: those of segments."""
    torch.manual_seed(0)
    model = make().double()
    recompute(list(model), sizes, shared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(steps):
        optimizer.zero_grad()
        (step or run_step)(model, number)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def run_step(model: nn.Module, number: int) -> None:
    model(vectors(number)).square().mean().backward()


def vectors(number: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.isfinite().all(), name
        assert torch.equal(tensor, other[name]), name
