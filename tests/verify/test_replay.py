"""The replay against the plainest training, where the two must be the same, and where they must differ."""

import torch

from echelon.runtime import Push
from echelon.verify.reference import train_on_one_device
from echelon.verify.replay import replay
from tests.async_training.training import largest_gap
from tests.cases import counted_loss, masked_vectors, perceptron_case

CASE = perceptron_case(masked_vectors, counted_loss, steps=4)


def test_rounds_of_all_workers_are_training_on_one_device() -> None:
    log = [Push(worker, step, step, step + 1) for step in range(4) for worker in range(3)]
    replayed = replay(log, CASE, workers=3)
    plain = train_on_one_device(CASE)
    assert largest_gap(replayed.weights, plain.weights) <= 1e-12
    state = replayed.optimizer
    assert all(largest_gap(state[name], plain.optimizer[name]) <= 1e-12 for name in state)
    assert abs(replayed.evaluation - plain.evaluation) <= 1e-12


def test_a_stale_gradient_is_taken_at_the_version_it_says() -> None:
    """Two plain gradient steps by hand: both at version 0."""
    case = perceptron_case(steps=1, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.5), clip=None)
    weights = replay([Push(0, 0, 0, 1), Push(1, 0, 0, 2)], case, workers=2).weights
    model = case.build()
    inputs, targets = case.batches()[0]
    start = model.first.weight.detach().clone()
    loss = case.loss(model(inputs[:6]), targets[:6]) + case.loss(model(inputs[6:]), targets[6:])
    loss.backward()
    assert torch.allclose(weights["first.weight"], start - 0.5 * model.first.weight.grad, atol=1e-12)
    fresh = replay([Push(0, 0, 0, 1), Push(1, 0, 1, 2)], case, workers=2).weights
    assert largest_gap(weights, fresh) > 1e-4
