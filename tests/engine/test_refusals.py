"""Plans that would not be equal to one device: refused with the fix, or fixed. Each was accepted once.

Most need no ranks: `LayerSharding` splits a model for a rank of a mesh that is only pretended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.engine.layer_sharding import LayerSharding
from echelon.engine.stage_split import split_stages
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.mesh import Mesh
from echelon.models import ModelConfig, build, cross_entropy
from echelon.plan import Plan
from echelon.tensor_parallel import Table
from echelon.verify import Case, assert_equal
from echelon.wrapping import Wrapping
from tests.cases import adamw, mean_loss, vectors
from tests.contract_models import token_loss
from tests.tensor_parallel.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]


def layers_of(
    model: nn.Module, plan: str, loss: Any = cross_entropy, tensor_table: Table | None = None
) -> LayerSharding:
    return LayerSharding(model, Mesh.pretend(Plan.parse(plan), 0), loss, tensor_table, Wrapping())


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


# Logits that are not split.

WHOLE_LOGITS = {"head.projection": "replicated"}


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("loss", [cross_entropy, token_loss])
def test_logits_that_are_whole_have_the_loss_of_one_device(loss: Any) -> None:
    """Their parts on two ranks were taken for parts of the vocabulary: the loss was off by log 2."""
    assert_equal(Case(gpt, tokens, loss, adamw, steps=3, options={"tensor_table": WHOLE_LOGITS}), "tensor=2")


def test_only_split_logits_have_a_loss_over_parts() -> None:
    assert layers_of(gpt(), "tensor=2", tensor_table=WHOLE_LOGITS).loss is cross_entropy
    assert layers_of(gpt(), "tensor=2").loss is not cross_entropy
    assert layers_of(gpt(), "tensor=2", token_loss).loss is token_loss


# Hooks and forwards that no stage would run.


class Rows(nn.Module):
    """Keeps its layers in modules that are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))

    def layers(self) -> list[nn.Module]:
        return list(self.trunk)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


def test_hooks_that_would_never_run_are_named() -> None:
    """Only those of the model itself were looked at."""
    model, mesh = Rows(), Mesh.pretend(Plan(), 0)
    model.trunk[0].register_forward_hook(lambda *_: None)
    split_stages(model, mesh, None, by_layers=True)
    model.trunk.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"forward hooks of trunk: .* put the hooks on the layers"):
        split_stages(model, mesh, None, by_layers=True)
    split_stages(model, mesh, None, by_layers=False)


def test_forwards_that_were_replaced_and_would_never_run_are_named() -> None:
    model = Rows()
    model.trunk[0].forward = torch.tanh  # type: ignore[method-assign]
    split_stages(model, Mesh.pretend(Plan(), 0), None, by_layers=True)
    model.trunk.forward = torch.tanh  # type: ignore[method-assign]
    with pytest.raises(UserError, match="trunk had forward replaced"):
        split_stages(model, Mesh.pretend(Plan(), 0), None, by_layers=True)


# What ranks must have in common.


def told(plan: str, make: Callable[[], nn.Module], batch: Any, **options: Any) -> str:
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
        for error in warm_ranks(2).run(told, plan, gpt, batch):
            assert "ranks 0 and 1 are given different batches" in error
            assert "rank=engine.replica" in error


def test_ranks_compare_once(warm_ranks: Warm) -> None:
    assert warm_ranks(2).run(told, "tensor=2", gpt, same_batch) == ["accepted with 2 False"] * 2
    assert warm_ranks(2).run(told, "data=2", gpt, own_batch) == ["accepted with 0 False"] * 2


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


@pytest.mark.usefixtures("warm_contract")
def test_gradients_of_what_is_whole_must_be_the_same(warm_ranks: Warm) -> None:
    """A module inside what is split was called replicated, and each rank trained its own."""
    options = {"loss": mean_loss, "tensor_table": styles("replicated")}
    for error in warm_ranks(2).run(partial(told, **options), "tensor=2", Scaled, rows):
        assert "ranks have different gradients of scale.weight, which" in error
        assert "make them 'heads' or 'inner'" in error
    options = {"tensor_table": styles("inner")}
    assert_equal(Case(Scaled, vectors, mean_loss, adamw, 3, options=options), "tensor=2")


def test_optimizers_over_whole_matrices_are_refused_by_parallelize(warm_ranks: Warm) -> None:
    make = partial(refused, "tensor=2", gpt, optimizer=torch.optim.Adafactor)
    assert all("tensor=2: each rank updates its parts" in error for error in warm_ranks(2).run(make))


def refused(plan: str, make: Callable[[], nn.Module], **options: Any) -> str:
    try:
        echelon.parallelize(make(), plan, **({"optimizer": adamw, "loss": cross_entropy} | options))
    except UserError as error:
        return str(error)
    return "accepted"
