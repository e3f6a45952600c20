"""Numbers of samples: however replicas and microbatches cut a batch, each sample has its own."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import echelon
from echelon.engine import Engine
from echelon.engine.step.samples import Scopes, first_sample, samples_before
from echelon.launching import Ranks
from echelon.nn.batch import microbatches
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import current
from echelon.nn.experts import NoisyTopKGate
from echelon.nn.wrapping import Wrapping
from tests.cases import adamw, vectors

Warm = Callable[[int], Ranks]


@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=5), parts=st.integers(1, 5))
def test_every_sample_of_the_global_batch_has_its_place(counts: list[int], parts: int) -> None:
    whole = torch.arange(sum(counts))
    for replica, part_of_batch in enumerate(whole.split(counts)):
        cut = microbatches((part_of_batch, part_of_batch), parts, always=False)
        for index, ((part, _), weight) in enumerate(cut):
            assert weight == 1
            assert int(part[0]) == first_sample(
                samples_before(counts, replica), counts[replica], index, parts
            )


def test_the_example_of_the_docstring() -> None:
    assert first_sample(7, samples=6, microbatch=1, microbatches=3) == 7 + 2


def test_counts_are_asked_for_only_where_something_is_dropped() -> None:
    asked: list[int] = []

    def counts(samples: int) -> list[int]:
        asked.append(samples)
        return [samples, 3]

    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2))
    key_dropout(model, Wrapping())
    scopes = Scopes(model, 5, counts, replica=1, microbatches=2)
    with scopes.of_step(7, 4)(1):
        assert current() is None
    assert asked == []
    model[0].p = 0.5
    with scopes.of_step(7, 4)(1):
        place = current()
    assert asked == [4]
    assert place is not None
    assert (place.seed, place.step, place.first_sample) == (5, 7, 4 + 2)
    with Scopes(model, None, counts, replica=1, microbatches=2).of_step(7, 4)(1):
        assert current() is None


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(6, 5), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.dropout(self.layer(x))
        return output


def square(output: Tensor, targets: Tensor) -> Tensor:
    return (output**2).mean()


def train(p: float = 0.5, seed: int | None = 0, plan: str = "data=2 microbatches=2") -> tuple[bytes, int]:
    """The weights after five steps, and how many messages exchanged counts of samples."""
    torch.manual_seed(0)
    engine: Engine = echelon.parallelize(Dropping(p), plan, optimizer=adamw, loss=square, seed=seed)
    messages = 0
    for step in range(5):
        engine.step(engine.local(vectors(step, samples=9)))
        messages += sum(move.subject == "samples" for move in engine.ledger.moves)
    return engine.full_state_dict()["layer.weight"].numpy().tobytes(), messages


def test_training_with_dropout_is_deterministic_to_the_bit(warm_ranks: Warm) -> None:
    first, second = warm_ranks(2).run(train), warm_ranks(2).run(train)
    assert first == second
    assert first[0] == first[1]
    assert first[0][1] == 5 + 1  # and whether functions of torch draw
    assert warm_ranks(2).run(train, 0.5, 1)[0][0] != first[0][0], "another seed"


def test_where_nothing_is_drawn_replicas_do_not_talk_of_it_after_two_steps(warm_ranks: Warm) -> None:
    assert [messages for _, messages in warm_ranks(2).run(train, 0.0)] == [2 + 1 + 2] * 2


def test_one_replica_and_asynchronous_workers_do_not_talk_of_it() -> None:
    assert train(plan="microbatches=2")[1] == 0
    plan = "data=2 sync=async staleness=2"
    assert [messages for _, messages in echelon.launch(train, 2, 0.5, 0, plan)] == [0, 0]


def test_without_a_seed_torch_draws() -> None:
    keyed, again = train(plan="data=1"), train(plan="data=1")
    assert keyed == again
    plain = train(seed=None, plan="data=1")
    assert plain != keyed


def test_evaluation_drops_nothing() -> None:
    torch.manual_seed(0)
    engine = echelon.parallelize(Dropping(0.5), "data=1", optimizer=adamw, loss=square)
    inputs, targets = vectors(0)
    expected = square(engine.module.layer(inputs), targets)
    assert engine.evaluate((inputs, targets)).loss == pytest.approx(float(expected.detach()), rel=1e-6)


def test_noise_of_gates_needs_a_scope() -> None:
    model = nn.Sequential(NoisyTopKGate(6, 4, 2))
    key_dropout(model, Wrapping())
    with Scopes(model, 5, lambda samples: [samples], replica=0, microbatches=1).of_step(7, 4)(0):
        assert current() is not None
    with Scopes(model, None, lambda samples: [samples], replica=0, microbatches=1).of_step(7, 4)(0):
        assert current() is None
