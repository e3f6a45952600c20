"""Ranks that would not train as one device does: refused with the fix. Each was accepted once."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.parallel.tensor.styles import Table
from echelon.verify import Case, assert_equal
from tests.cases import adamw, mean_loss, vectors
from tests.engine.test_deferred import counted, deferring, empty_batch
from tests.parallel.tensor.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


# What ranks must have in common.


def first_answer(plan: str, make: Callable[[], nn.Module], batch: Any, **options: Any) -> str:
    """What a step on `batch(rank)` is refused with."""
    torch.manual_seed(0)
    engine = echelon.parallelize(make(), plan, **({"optimizer": adamw, "loss": cross_entropy} | options))
    try:
        engine.step(batch(torch.distributed.get_rank()))
    except UserError as error:
        return str(error)
    checks = [move for move in engine.ledger.moves if move.subject == "checks"]
    engine.step(batch(torch.distributed.get_rank()))
    return f"accepted with {len(checks)} {any(m.subject == 'checks' for m in engine.ledger.moves)}"


def own_batch(rank: int) -> tuple[Tensor, Tensor]:
    return tokens(rank)


def own_target(rank: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(0)
    targets[3, 5] = rank
    return inputs, targets


def same_batch(_: int) -> tuple[Tensor, Tensor]:
    return tokens(0)


@pytest.mark.parametrize("plan", ["tensor=2", "context=2", "pipeline=2"])
def test_ranks_that_share_a_replica_are_given_the_same_batch(warm_ranks: Warm, plan: str) -> None:
    """A sampler of as many parts as ranks trained nonsense."""
    for batch in (own_batch, own_target):
        for error in warm_ranks(2).run(first_answer, plan, gpt, batch):
            assert "ranks 0 and 1 are given different batches" in error
            assert "rank=engine.replica" in error


def test_ranks_compare_once(warm_ranks: Warm) -> None:
    answer = partial(first_answer, audit="off", check_every=0)
    assert warm_ranks(2).run(answer, "tensor=2", gpt, same_batch) == ["accepted with 2 False"] * 2
    assert warm_ranks(2).run(answer, "data=2", gpt, own_batch) == ["accepted with 0 False"] * 2


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Scaled(nn.Module):
    """Has a weight of its own for what is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down, self.last = (
            *(nn.Linear(6, 8), Scale()),
            *(nn.Linear(8, 6), nn.Linear(6, 5)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(torch.tanh(self.scale(self.up(x)))))


def styles(of_scale: str) -> Table:
    return {"up": "column", "down": "row", "last": "replicated", "scale": of_scale}


def rows(_: int) -> tuple[Tensor, Tensor]:
    return vectors(0)


def answer_after_an_empty_step(deferred: bool) -> str:
    """What the second step is refused with; no sample of the first one counts."""
    torch.manual_seed(0)
    with deferring() if deferred else nullcontext():
        table = styles("replicated")
        options = {"tensor_table": table, "audit": "off"}
        engine = echelon.parallelize(Scaled(), "tensor=2", optimizer=adamw, loss=counted, **options)
    with nullcontext() if deferred else pytest.raises(UserError, match="no replica had a sample"):
        engine.step(empty_batch())
    try:
        engine.step(rows(0))
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("deferred", [False, True])
def test_a_refused_first_step_leaves_the_comparison_to_the_next(warm_ranks: Warm, deferred: bool) -> None:
    # Where numbers are read late, gradients of an empty step were compared, and never again.
    for error in warm_ranks(2).run(answer_after_an_empty_step, deferred):
        assert "ranks have different gradients of scale.weight, which" in error


@pytest.mark.usefixtures("warm_contract")
def test_gradients_of_what_is_whole_must_be_the_same(warm_ranks: Warm) -> None:
    """A module inside what is split was called replicated, and each rank trained its own."""
    options = {"loss": mean_loss, "tensor_table": styles("replicated"), "audit": "off"}
    for error in warm_ranks(2).run(partial(first_answer, **options), "tensor=2", Scaled, rows):
        assert "ranks have different gradients of scale.weight, which" in error
        assert "make them 'heads' or 'inner'" in error
    options = {"tensor_table": styles("inner")}
    assert_equal(Case(Scaled, vectors, mean_loss, adamw, 3, options=options), "tensor=2")


class Unknown(torch.optim.SGD):
    """Nobody knows what it needs."""


def test_optimizers_that_say_nothing_are_refused_where_ranks_hold_parts(warm_ranks: Warm) -> None:
    make = partial(refused, "tensor=2", gpt, optimizer=Unknown)
    for error in warm_ranks(2).run(make):
        assert "optimizer Unknown with plan 'tensor=2': each rank holds parts of parameters" in error


def refused(plan: str, make: Callable[[], nn.Module], **options: Any) -> str:
    try:
        echelon.parallelize(make(), plan, **({"optimizer": adamw, "loss": cross_entropy} | options))
    except UserError as error:
        return str(error)
    return "accepted"
