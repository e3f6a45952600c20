"""Side effects of forward passes are undone, draws are seen, and casts of weights are those of one use."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.engine import parallelize
from echelon.engine.step.side_effects import Ways, without_side_effects
from echelon.nn.autograd.generators import GeneratorStates
from tests.cases import mean_loss, sgd, vectors

HOST = torch.device("cpu")


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.calls, self.removed = 0, "there"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        self.added = x
        del self.removed
        self.training = False
        return x


def test_modes_attributes_and_buffers_come_back() -> None:
    module = Changing()
    count = module.count
    with without_side_effects([module], [module], HOST):
        module(torch.ones(1))
        assert module.calls == 1
    assert (module.calls, module.removed, module.training) == (0, "there", True)
    assert not hasattr(module, "added")
    assert module.count is count
    assert count.tolist() == [0, 0]


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), random.random, lambda: numpy.random.rand(), lambda: numpy.random.randn()],
)
def test_draws_are_seen_and_undone(draw: object) -> None:
    assert callable(draw)
    before = GeneratorStates(HOST)
    assert not before.moved()
    with without_side_effects([], [], HOST):
        draw()
        assert before.moved()
    assert not before.moved()


@pytest.mark.parametrize(
    ("generator", "draw"),
    [
        (torch.Generator(), lambda own: torch.rand(1, generator=own)),
        (random.Random(0), lambda own: own.random()),
        (numpy.random.RandomState(0), lambda own: own.rand()),
        (numpy.random.default_rng(0), lambda own: own.random()),
        ([numpy.random.Generator(numpy.random.MT19937(0))], lambda own: own[0].random()),
    ],
)
def test_draws_from_a_generator_of_a_module_are_seen_and_undone(
    generator: Any, draw: Callable[[Any], object]
) -> None:
    # They went on, so that the audit changed what training drew.
    module = nn.Module()
    module.own = generator
    before = GeneratorStates(HOST, [module])
    with without_side_effects([module], [module], HOST):
        draw(generator)
        assert before.moved()
    assert not before.moved()


def test_plain_state_that_is_changed_in_place_comes_back() -> None:
    module = nn.Module()
    module.tensor, module.array, module.names = torch.zeros(2), numpy.zeros(2), {"a"}
    module.seen, module.last = [1, torch.zeros(1)], deque([1, 2], maxlen=2)
    module.cache = {"inside": {"deep": (torch.zeros(1),)}}
    tensor, seen, cache = module.tensor, module.seen, module.cache
    with without_side_effects([module], [module], HOST):
        module.tensor.add_(1)
        module.array[0] = 1
        module.names.add("b")
        module.seen[1].add_(1)
        module.seen.append(2)
        module.last.append(3)
        module.cache["inside"]["deep"][0].add_(1)
        module.cache["more"] = 1
    assert (tensor.tolist(), module.array.tolist(), module.names) == ([0, 0], [0, 0], {"a"})
    assert (seen, list(module.last)) == ([1, torch.zeros(1)], [1, 2])
    assert cache == {"inside": {"deep": (torch.zeros(1),)}}
    assert module.tensor is tensor
    assert module.seen is seen


def test_a_large_attribute_does_not_hide_the_small_ones_behind_it() -> None:
    module = nn.Module()
    module.table, module.names = torch.empty(65 * 2**20, dtype=torch.uint8), [0] * 100_001
    module.count, module.seen = torch.zeros(1), [1]
    with without_side_effects([module], [module], HOST):
        module.count.add_(1)
        module.seen.append(2)
    assert (module.count.tolist(), module.seen) == ([0], [1])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def plain_weights() -> dict[str, torch.Tensor]:
    trained = model()
    optimizer = sgd(trained.parameters())
    for step in range(3):
        inputs, targets = vectors(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean_loss(trained(inputs), targets)
        loss.backward()
        optimizer.step()
    return trained.state_dict()


@pytest.mark.parametrize(
    ("plan", "tolerance"),
    [("data=1", 0.0), ("offload=parameters", 0.0), ("offload=parameters microbatches=2", 1e-3)],
)
def test_a_loop_inside_of_autocast_is_equal_to_a_forward_inside_of_it(plan: str, tolerance: float) -> None:
    """Its cache outlived updates, and with it weights were used while they were not gathered."""
    with (
        parallelize(model(), plan, optimizer=sgd, loss=mean_loss, smallest_unit=1) as engine,
        torch.autocast("cpu", torch.bfloat16),
    ):
        for step in range(3):
            engine.step(vectors(step))
        assert torch.is_autocast_cache_enabled()
        weights = engine.full_state_dict()
    for name, expected in plain_weights().items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=tolerance)


def test_another_number_of_operations_is_new_once() -> None:
    ways, layer = Ways(), nn.Linear(2, 2)

    def is_new(*, centred: bool, samples: int = 3) -> bool:
        ways.start()
        output = layer(torch.ones(samples, 2))
        loss = (output - output.mean(0) if centred else output).sum()
        with torch.no_grad():
            layer(torch.ones(1, 2))
        loss.backward()
        return ways.is_new()

    assert [is_new(centred=False), is_new(centred=False), is_new(centred=False, samples=9)] == [
        True,
        False,
        False,
    ]
    assert [is_new(centred=True), is_new(centred=False), is_new(centred=True)] == [True, False, False]


def test_operations_that_a_backward_pass_runs_again_count() -> None:
    ways, layer, has_branch = Ways(), nn.Linear(2, 2), False

    def forward(values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = layer(values)
        return output - output.mean(0) if has_branch else output

    def is_new() -> bool:
        ways.start()
        loss = checkpoint(forward, torch.ones(3, 2, requires_grad=True), use_reentrant=True)
        loss.sum().backward()
        return ways.is_new()

    found = [is_new(), is_new()]
    has_branch = True
    assert [*found, is_new()] == [True, False, True]
