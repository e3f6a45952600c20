"""Trainings that once went wrong, each with its story."""

import torch.distributed as dist

from echelon.launching import launch
from tests.cases import perceptron_case, vectors
from tests.update.async_training.training import engine_for


def train_after_a_group_of_some() -> float:
    dist.new_group([0, 1])
    engine = engine_for(perceptron_case(), "data=3 staleness=0")
    return engine.step(engine.local(vectors(0))).loss


def test_workers_find_each_other_though_some_are_in_more_groups() -> None:
    """Torch named the group for messages by how many groups a process was in. After an engine with stages, or
    a group of the user's own, that differs between ranks, and each waited forever under a name of its own.
    Random plans on warm ranks found it."""
    losses = launch(train_after_a_group_of_some, 3, deadline=60.0)
    assert losses == [losses[0]] * 3
