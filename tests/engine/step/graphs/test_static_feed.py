"""A recording reads each step's values from memory that stays; what is no tensor is a part of its key."""

from typing import Any

import torch
from torch import Tensor

from echelon.engine.step.graphs.static_feed import LiveFeed, StaticFeed
from echelon.engine.step.normaliser import Counts, StepNormaliser
from echelon.engine.step.runtime.flight import Microbatch
from echelon.parallel.padding import LocalTargets
from tests.engine.step.graphs.fake_recorder import engine_of, network


def feed_of(inputs: Any, scale: Any = 1.0, counted: Any = 4.0) -> dict[int, Microbatch]:
    normaliser = StepNormaliser(4, lambda: (Counts(4, 4, counted), None), is_only=False, local=None)
    normaliser.count()
    targets = LocalTargets(torch.arange(4), 1.0, 4)
    return {
        number: Microbatch(inputs, targets, 1, "", normaliser=normaliser, loss_scale=scale)
        for number in range(2)
    }


def test_equal_forms_have_equal_keys() -> None:
    key = LiveFeed(feed_of(torch.ones(4, 2))).key()
    assert LiveFeed(feed_of(torch.zeros(4, 2))).key() == key
    for other in (
        feed_of(torch.ones(4, 3)),
        feed_of(torch.ones(4, 2).double()),
        feed_of(torch.ones(2, 4).T),
        feed_of((torch.ones(4, 2),)),
        feed_of((torch.ones(4, 2), 3)),
        feed_of(torch.ones(4, 2), scale=2.0),
        feed_of(torch.ones(4, 2), counted=3.0),
        feed_of(torch.ones(4, 2), counted=torch.tensor(4.0)),
    ):
        assert LiveFeed(other).key() != key


def test_values_that_no_recording_holds_are_named() -> None:
    class Own(Tensor): ...

    assert LiveFeed(feed_of(torch.ones(4, 2))).foreign is None
    assert LiveFeed(feed_of((torch.ones(4, 2), object()))).foreign == "object"
    assert LiveFeed(feed_of(torch.ones(4, 2).as_subclass(Own))).foreign == "Own"


def test_microbatches_keep_their_memory_and_get_the_values_of_each_step() -> None:
    engine = engine_of(network(), "data=1")
    first = feed_of(torch.ones(4, 2), torch.tensor(2.0), torch.tensor(3.0))
    live = LiveFeed(first)
    static = StaticFeed(live, first, engine._runner.feed, 3, torch.device("cpu"))
    kept = static.microbatches[1]
    address = kept.inputs.data_ptr()
    other = feed_of(torch.full((4, 2), 5.0), torch.tensor(4.0), torch.tensor(1.0))
    static.load(LiveFeed(other), 4)
    assert kept.inputs.tolist() == [[5.0, 5.0]] * 4
    assert kept.inputs.data_ptr() == address
    assert kept.loss_scale.tolist() == 4.0  # type: ignore[union-attr]
    assert kept.normaliser.numbers()[-1].tolist() == 1.0
    assert kept.normaliser is static.microbatches[0].normaliser
    assert first[0].inputs.tolist() == [[1.0, 1.0]] * 4
    assert kept.targets.num_samples == 4
