"""SavedInputs in parts over tensor ranks: 1/t of the bytes, and the same training."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.collectives import Ledger, group_over
from echelon.launching import Ranks
from echelon.memory import Meter
from echelon.memory.recompute.saved_inputs import (
    ArgumentName,
    ContiguousInputs,
    SavedInputs,
    SplitInputs,
)
from echelon.verify import assert_equal
from tests.memory.recompute.chains import recompute, settings
from tests.parallel.tensor.models import language_case

Warm = Callable[[int], Ranks]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def checkpoint_bytes(kind: str, samples: int) -> tuple[int, int, list[Tensor]]:
    """What four layers keep after a forward pass, what they gather for the backward pass, and gradients."""
    group = group_over("tensor", torch.distributed.group.WORLD, Ledger())
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).double()
    inputs = SavedInputs()
    if "contiguous" in kind:
        inputs = ContiguousInputs(torch.device("cpu"), inputs)
    if "split" in kind:
        inputs = SplitInputs(group, inputs)
    recompute(list(model), [1, 1, 1, 1], settings()._replace(inputs=inputs))
    meter = Meter(model, lambda: {key: [] for key in ("parameters", "gradients", "optimizer", "buffers")})
    x = torch.randn(samples, 8, dtype=torch.float64, requires_grad=True)
    with meter.activations():
        loss = model(x.transpose(0, 1).contiguous().transpose(0, 1)).sum()
    kept = meter.read().now["activations"]
    group.ledger.start_step()
    loss.backward()
    moved = sum(move.traffic.received for move in group.ledger.moves if move.subject == "checkpoints")
    return kept, moved, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("samples", [6, 5])
def test_each_rank_keeps_its_part_and_gathers_the_rest(warm_ranks: Warm, samples: int) -> None:
    whole = warm_ranks(2).run(checkpoint_bytes, "whole", samples)
    assert [kept for kept, _, _ in whole] == [4 * samples * 8 * 8] * 2
    for kind in ("split", "split contiguous"):
        for kept, moved, gradients in warm_ranks(2).run(checkpoint_bytes, kind, samples):
            assert kept == 4 * samples * 8 * 8 // 2
            assert moved == kept, "the other rank's parts, once for each layer"
            assert all(torch.equal(a, b) for a, b in zip(gradients, whole[0][2], strict=True))


def taken_of_different() -> tuple[Tensor, bool]:
    """What a rank gets back of a tensor that other ranks do not have."""
    group = group_over("tensor", torch.distributed.group.WORLD, Ledger())
    inputs = SplitInputs(group, SavedInputs())
    tensor = torch.full((4,), float(group.rank), requires_grad=True)
    argument = ArgumentName("layer 0", 0)
    is_whole = inputs.keeps_memory(tensor, argument)
    return inputs.keep(tensor, None, argument).take(), is_whole


def test_what_ranks_do_not_hold_alike_stays_whole(warm_ranks: Warm) -> None:
    for rank, (taken, is_whole) in enumerate(warm_ranks(2).run(taken_of_different)):
        assert is_whole
        assert taken.tolist() == [float(rank)] * 4


def taken_after_zeros(*, is_own: bool) -> list[tuple[Tensor, bool]]:
    """Zeros on all ranks in the first call; then other values, which are each rank's own or the same."""
    group = group_over("tensor", torch.distributed.group.WORLD, Ledger())
    inputs, argument = SplitInputs(group, SavedInputs()), ArgumentName("layer 0", 0)
    values = torch.arange(1.0, 5.0) * (1 + group.rank * is_own)
    tensors = [each.requires_grad_() for each in (torch.zeros(4), values)]
    return [(inputs.keep(t, None, argument).take(), inputs.keeps_memory(t, argument)) for t in tensors]


@pytest.mark.parametrize("is_own", [True, False])
def test_equal_elements_say_nothing_about_later_calls(warm_ranks: Warm, is_own: bool) -> None:
    """An activation that is zero at the start, as behind a ReLU, is the same on all ranks by chance."""
    for rank, taken in enumerate(warm_ranks(2).run(partial(taken_after_zeros, is_own=is_own))):
        (first, first_is_whole), (second, second_is_whole) = taken
        assert first.tolist() == [0.0] * 4
        assert second.tolist() == [n * (1 + rank * is_own) for n in (1.0, 2.0, 3.0, 4.0)]
        assert first_is_whole
        assert second_is_whole == is_own


@pytest.mark.slow_cases("tensor=2 recompute=full")
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2 recompute=full",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in [
                "tensor=2 recompute=sqrt microbatches=2",
                "tensor=2 recompute=full contiguous=true",
                "tensor=2 pipeline=2 schedule=1f1b microbatches=4 recompute=sqrt",
                "tensor=2 pipeline=2 schedule=zero-bubble microbatches=3 recompute=full contiguous=true",
                "tensor=2 data=2 zero=3 recompute=full",
                "tensor=2 data=2 zero=2 recompute=sqrt contiguous=true microbatches=2",
                "tensor=2 context=2 recompute=full",
            ]
        ),
    ],
)
def test_training_is_equal_to_one_device(plan: str) -> None:
    is_slow = plan != "tensor=2 recompute=full"
    assert_equal(language_case("gpt", steps=20 if is_slow else 3), f"{plan} checkpoints=split")
