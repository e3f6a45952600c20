"""A batch in parts: routing, noise, capacity and sums are those of the whole. And batches at the edges."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import scope
from echelon.nn.experts import (
    ExpertChoiceGate,
    Experts,
    Gate,
    GShardGate,
    HierarchicalGate,
    MixtureOfExperts,
    NoisyTopKGate,
    Positions,
    Routing,
    SigmoidGate,
    SoftmaxGate,
    SwitchGate,
    auxiliary_loss,
    recording,
)
from echelon.nn.wrapping import Wrapping
from tests.nn.experts.statistics import Kept, statistics_of

WIDTH, EXPERTS = 6, 4
GATES: dict[str, Callable[[], Gate]] = {
    "softmax": lambda: SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.3, z_loss=0.2, capacity=1.0),
    "noisy": lambda: NoisyTopKGate(WIDTH, EXPERTS, 2, capacity=1.0),
    "switch": lambda: SwitchGate(WIDTH, EXPERTS, jitter=0.2, capacity=1.0),
    "gshard": lambda: GShardGate(WIDTH, EXPERTS, capacity=1.0),
    "sigmoid": lambda: SigmoidGate(WIDTH, EXPERTS, 2, capacity=1.0),
    "hierarchical": lambda: HierarchicalGate(WIDTH, 2, 2, top_groups=2, top_experts=1, capacity=1.0),
    "expert choice": lambda: ExpertChoiceGate(WIDTH, EXPERTS),
}
every_gate = pytest.mark.parametrize("name", GATES)


def make(name: str) -> Gate:
    torch.manual_seed(0)
    gate = GATES[name]().double()
    for parameter in gate.parameters():
        nn.init.normal_(parameter)
    key_dropout(gate, Wrapping())
    return gate


def route(gate: Gate, x: Tensor, first_sample: int = 0, step: int = 0) -> tuple[Routing, Tensor]:
    kept = Kept()
    with scope(seed=0, step=step, first_sample=first_sample), recording(kept):
        routing = gate(x)
    (statistics,) = kept.passes
    return routing, statistics


class Half(Positions):
    """Every second position; `whole` is what both ranks gather. Those from `true_length` on are padding."""

    def __init__(self, first: int, whole: Tensor | None = None, true_length: int = 8) -> None:
        self._first, self._whole, self._true_length = first, whole, true_length

    def numbers(self, length: int) -> Tensor:
        return torch.arange(length) * 2 + self._first

    def is_true(self, length: int) -> Tensor:
        return self.numbers(length) < self._true_length

    def whole_length(self, length: int) -> int:  # noqa: ARG002
        return self._true_length

    def gather(self, x: Tensor) -> Tensor:
        return x if self._whole is None else self._whole


@every_gate
def test_parts_of_the_samples_are_routed_as_the_whole_and_their_sums_add_up(name: str) -> None:
    gate, x = make(name), torch.randn(5, 8, WIDTH, dtype=torch.float64)
    whole, statistics = route(gate, x)
    parts = [route(gate, x[:2]), route(gate, x[2:], first_sample=2)]
    assert torch.equal(torch.cat([routing.indices for routing, _ in parts]), whole.indices)
    torch.testing.assert_close(torch.cat([routing.weights for routing, _ in parts]), whole.weights)
    torch.testing.assert_close(sum(each for _, each in parts), statistics, rtol=0, atol=1e-12)
    if gate.noise is not None:
        assert not torch.equal(route(gate, x, step=1)[0].weights, whole.weights), "another step"
        assert not torch.equal(route(gate, x, first_sample=1)[0].weights, whole.weights)


@pytest.mark.parametrize("true_length", [8, 7])
@every_gate
def test_parts_of_the_positions_too(name: str, true_length: int) -> None:
    """Two ranks; what they gather is what they would have gathered: of the choices, or of the scores."""
    gate, x = make(name), torch.randn(3, 8, WIDTH, dtype=torch.float64)
    whole, statistics = route(gate, x[:, :true_length])
    by_position = whole.indices.view(3, true_length, -1)
    sums = torch.zeros_like(statistics)
    for first in (0, 1):
        part = copy.deepcopy(gate)
        collected: list[Tensor] = []
        for rank in (0, 1):
            part.positions = Half(rank, true_length=true_length)
            part.positions.gather = _keep(collected)  # type: ignore[method-assign]
            with torch.no_grad(), scope(seed=0, step=0, first_sample=0):
                part(x[:, rank::2])
        both = torch.stack(collected, 2).flatten(1, 2) if collected else None
        part.positions = Half(first, both, true_length)
        routing, statistics_here = route(part, x[:, first::2])
        sums += statistics_here
        length = len(range(first, true_length, 2))
        here = routing.indices.view(3, 4, -1)
        assert torch.equal(here[:, :length], by_position[:, first::2])
        assert (here[:, length:] == gate.num_experts).all(), "padding has no experts"
    torch.testing.assert_close(sums, statistics, rtol=0, atol=1e-12)


def _keep(gathered: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def gather(x: Tensor) -> Tensor:
        gathered.append(x)
        return torch.cat([x, x], 1)  # as long as the whole

    return gather


@every_gate
@pytest.mark.parametrize("shape", [(1, 1), (0, 3), (4, 1)], ids=str)
def test_one_token_and_none(name: str, shape: tuple[int, int]) -> None:
    gate = make(name)
    layer = MixtureOfExperts(gate, Experts(EXPERTS, WIDTH, 5)).double()
    x = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    assert output.shape == x.shape
    loss = output.sum() + (auxiliary_loss(layer) if shape[0] else 0.0)
    loss.backward()
    assert loss.isfinite()
    assert x.grad is not None
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_all_tokens_to_one_expert() -> None:
    gate = SoftmaxGate(WIDTH, EXPERTS, 1, normalize=False, balance=1.0)
    nn.init.zeros_(gate.weight)
    gate.weight.data[2] = 100.0
    layer = MixtureOfExperts(gate, Experts(EXPERTS, WIDTH, 5))
    x = torch.rand(3, 4, WIDTH) + 1
    output = layer(x)
    assert gate.pending[0][0].tolist() == [0, 0, 12, 0]
    loss = auxiliary_loss(layer)
    assert isinstance(loss, Tensor)
    assert loss.item() == pytest.approx(EXPERTS)
    (output.sum() + loss).backward()
    assert layer.experts.down_proj.grad is not None
    assert layer.experts.down_proj.grad[2].any()
    assert not layer.experts.down_proj.grad[[0, 1, 3]].any()


def test_the_router_computes_in_float32_at_least_also_inside_autocast() -> None:
    gate, x = SoftmaxGate(WIDTH, EXPERTS, 2), torch.randn(2, 3, WIDTH)
    exact = gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = gate(x)
    assert torch.equal(cast.weights, exact.weights)
    low = gate.bfloat16()(x.bfloat16())
    assert low.weights.dtype == torch.bfloat16
    assert statistics_of(gate, x.bfloat16()).dtype == torch.float32


def test_a_copy_has_no_pending_statistics() -> None:
    gate = SoftmaxGate(WIDTH, EXPERTS, 2, balance=0.1)
    gate(torch.randn(2, 3, WIDTH))
    assert len(gate.pending) == 1
    assert copy.deepcopy(gate).pending == []
