"""Plans that would not be equal to one device: refused with the mend, or mended. Each was accepted once.

Most need no ranks: `Within` splits a model for a rank of a mesh that is only pretended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.dropout import key_dropout
from echelon.engine.cutting import cut
from echelon.engine.within import Within
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.layering import listed_layers
from echelon.mesh import Mesh
from echelon.models import ModelConfig, build, cross_entropy
from echelon.pipeline_parallel import even_boundaries
from echelon.plan import Plan
from echelon.sequence import WHOLE
from echelon.tensor_parallel import Table
from echelon.verify import Case, assert_equal
from echelon.wrapping import Wrapping
from tests.cases import adamw, mean_loss, vectors
from tests.contract_models import token_loss
from tests.tensor_parallel.models import SEQUENCE, VOCAB, tokens

Warm = Callable[[int], Ranks]


def within(model: nn.Module, plan: str, loss: Any = cross_entropy, table: Table | None = None) -> Within:
    return Within(model, Mesh.pretend(Plan.parse(plan), 0), loss, table, Wrapping())


def gpt(**changes: Any) -> nn.Module:
    return build(ModelConfig("gpt", 2, 16, 4, vocab=VOCAB, sequence=SEQUENCE, **changes))


# Logits that are not split.

WHOLE_LOGITS = {"head.projection": "replicated"}


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("loss", [cross_entropy, token_loss])
def test_logits_that_are_whole_have_the_loss_of_one_device(loss: Any) -> None:
    """Their parts on two ranks were taken for parts of the vocabulary: the loss was off by log 2."""
    assert_equal(Case(gpt, tokens, loss, adamw, steps=3, options={"table": WHOLE_LOGITS}), "tensor=2")


def test_only_split_logits_have_a_loss_over_parts() -> None:
    assert within(gpt(), "tensor=2", table=WHOLE_LOGITS).loss is cross_entropy
    assert within(gpt(), "tensor=2").loss is not cross_entropy
    assert within(gpt(), "tensor=2", token_loss).loss is token_loss


# Forwards that no stage would run.


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Listed(Doubling):
    def layers(self) -> list[nn.Module]:
        return list(self)


class Later(type(gpt())):  # type: ignore[misc]
    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * super().forward(tokens)


class Listing:
    """A mixin."""

    def layers(self) -> list[nn.Module]:
        return list(self.children())  # type: ignore[attr-defined]


class Mixed(Listing, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


def test_layers_may_be_listed_by_a_class_that_has_no_forward() -> None:
    assert len(listed_layers(Mixed())) == 2


def test_a_sequential_with_a_forward_of_its_own_is_no_list_of_layers() -> None:
    """It was run as one: the factor of its forward was lost."""
    assert len(listed_layers(nn.Sequential(nn.Linear(2, 2)))) == 1
    assert len(listed_layers(Listed(nn.Linear(2, 2)))) == 1
    assert listed_layers(Doubling(nn.Linear(2, 2))) == []
    with pytest.raises(UserError, match=r"Doubling has a forward of its own.*give Doubling layers\(\)"):
        even_boundaries(Doubling(nn.Linear(2, 2)), 2)


def test_a_forward_that_came_after_the_layers_is_not_theirs() -> None:
    with pytest.raises(UserError, match="Later has a forward of its own"):
        within(Later(gpt().config), "context=2")
    model = nn.Sequential(nn.Linear(2, 2))
    model.forward = torch.tanh  # type: ignore[method-assign]
    with pytest.raises(UserError, match="its forward was replaced"):
        even_boundaries(model, 2)


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
    cut(model, mesh, None, by_layers=True)
    model.trunk.register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match=r"forward hooks of trunk: .* put the hooks on the layers"):
        cut(model, mesh, None, by_layers=True)
    cut(model, mesh, None, by_layers=False)


def test_forwards_that_were_replaced_and_would_never_run_are_named() -> None:
    model = Rows()
    model.trunk[0].forward = torch.tanh  # type: ignore[method-assign]
    cut(model, Mesh.pretend(Plan(), 0), None, by_layers=True)
    model.trunk.forward = torch.tanh  # type: ignore[method-assign]
    with pytest.raises(UserError, match="trunk had forward replaced"):
        cut(model, Mesh.pretend(Plan(), 0), None, by_layers=True)


# Masks that ranks must share.


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0


def test_ranks_that_split_layers_must_drop_the_same() -> None:
    """With seed=None each rank drew its own masks for hidden states that must be equal."""
    with pytest.raises(UserError, match=r"embedding\.dropout, blocks\.0.*give parallelize a seed"):
        within(gpt(dropout=0.1), "tensor=2")
    within(gpt(dropout=0.1), "context=2")
    model = gpt(dropout=0.1)
    key_dropout(model, Wrapping())
    within(model, "tensor=2")
    model.blocks[0].mlp_dropout = OwnDropout(0.1)
    with pytest.raises(UserError, match=r"dropout of blocks\.0\.mlp_dropout is drawn by torch"):
        within(model, "tensor=2")


def test_dropout_inside_torchs_own_modules() -> None:
    model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.LSTM(16, 16, 2, dropout=0.1))
    with pytest.raises(UserError, match=r"1 draw at random inside.*set their rates to 0"):
        within(model, "tensor=2", table={"*": "replicated"})


# Positions that are mixed within a part of the sequence.


class Attends(nn.Module):
    """Attention as everybody writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projection(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)[:, 0]


class Asks(Attends):
    def __init__(self) -> None:
        super().__init__()
        self.view = WHOLE

    def forward(self, x: Tensor) -> Tensor:
        return self.view.attend(*self.projection(x)[:, None].chunk(3, -1))[:, 0]


def between(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCAB, 16), *layers, nn.Linear(16, VOCAB))


def test_attention_that_asks_no_view_is_refused_with_context() -> None:
    """Each rank attended within its own part."""
    with pytest.raises(UserError, match=r"no module .* asks a view, so if Attends .*docs/context.md"):
        within(between(Attends()), "context=2", token_loss)
    within(between(Attends()), "tensor=2", token_loss, {"*": "replicated"})
    within(between(Asks()), "context=2", token_loss)


@pytest.mark.parametrize(
    "mixer",
    [
        nn.MultiheadAttention(16, 2),
        nn.TransformerEncoderLayer(16, 2, 16),
        nn.GRU(16, 16),
        nn.Conv1d(16, 16, 3),
        nn.LayerNorm((16, 16)),
    ],
)
def test_modules_that_mix_positions_by_themselves(mixer: nn.Module) -> None:
    kind = type(mixer).__name__
    with pytest.raises(UserError, match=rf"layer 2 \({kind}\) mixes positions, and with context=2"):
        within(between(Asks(), mixer), "context=2", token_loss)


def by_position() -> nn.Module:
    return between(nn.Sequential(nn.LayerNorm(16), nn.Dropout(0.1), nn.Linear(16, 16)), nn.Tanh())


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("make", [by_position, partial(between, Asks())])
def test_models_that_mix_nothing_or_ask_are_equal_to_one_device(make: Callable[[], nn.Module]) -> None:
    assert_equal(Case(make, tokens, token_loss, adamw, steps=3), "context=2")


def test_a_sequence_that_would_stay_in_parts_is_refused() -> None:
    """The loss was given a part of the positions and all targets."""
    with pytest.raises(UserError, match="make that projection 'vocabulary'"):
        within(gpt(), "tensor=2 sequence=true", table=WHOLE_LOGITS)
    whole = {"blocks.*.attention.*": "replicated"}
    with pytest.raises(UserError, match=r"blocks\.0\.attention \(Attention\) has matrices, of which none"):
        within(gpt(), "tensor=2 sequence=true", table=whole)
    within(gpt(), "tensor=2", table=whole)
    ends = {"0": "vocabulary", "3": "vocabulary", "*": "replicated"}
    within(between(nn.Sequential(nn.Linear(16, 16)), nn.Tanh()), "tensor=2 sequence=true", token_loss, ends)
    with pytest.raises(UserError, match=r"1 \(Attends\) has matrices"):
        within(between(Attends(), nn.Tanh()), "tensor=2 sequence=true", token_loss, ends)


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
    options = {"loss": mean_loss, "table": styles("replicated")}
    for error in warm_ranks(2).run(partial(told, **options), "tensor=2", Scaled, rows):
        assert "ranks have different gradients of scale.weight, which" in error
        assert "make them 'heads' or 'inner'" in error
    assert_equal(Case(Scaled, vectors, mean_loss, adamw, 3, options={"table": styles("inner")}), "tensor=2")


def test_optimizers_over_whole_matrices_are_refused_by_parallelize(warm_ranks: Warm) -> None:
    make = partial(refused, "tensor=2", gpt, optimizer=torch.optim.Adafactor)
    assert all("tensor=2: each rank updates its parts" in error for error in warm_ranks(2).run(make))


def refused(plan: str, make: Callable[[], nn.Module], **options: Any) -> str:
    try:
        echelon.parallelize(make(), plan, **({"optimizer": adamw, "loss": cross_entropy} | options))
    except UserError as error:
        return str(error)
    return "accepted"


# Losses that do not add up over parts of the sequence.


def mean_over_tokens(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def shifting(output: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return token_loss(output[:, :-1], targets[:, 1:])


def mean_with_own_mark(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=0)


def all_count(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(step)
    return inputs, targets.clamp(min=0)


def early_marks(_: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(0)
    targets[:, :4] = 0
    return inputs, targets.clamp(min=0)


def labels(_: int) -> tuple[Tensor, Tensor]:
    inputs, targets = tokens(0)
    return inputs, targets[:, 5]


@pytest.mark.parametrize(
    ("loss", "batch", "says"),
    [
        (mean_over_tokens, same_batch, "the loss is a plain mean, and some targets are -100"),
        (shifting, same_batch, "not that of its parts added up: total and count"),
        (mean_with_own_mark, early_marks, "return (total, count) of the targets that count"),
        (token_loss, labels, "targets have no positions"),
    ],
)
def test_losses_that_do_not_add_up_are_refused(warm_ranks: Warm, loss: Any, batch: Any, says: str) -> None:
    """It was a mean of means, and none where a rank had nothing to count; pairs across a seam were lost."""
    for error in warm_ranks(2).run(partial(told, loss=loss), "context=2", gpt, batch):
        assert says in error


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(("loss", "batch"), [(mean_over_tokens, all_count), (token_loss, tokens)])
@pytest.mark.parametrize("plan", ["context=2", "context=2 tensor=2"])
def test_losses_that_add_up_are_equal_to_one_device(plan: str, loss: Any, batch: Any) -> None:
    assert_equal(Case(gpt, batch, loss, adamw, steps=3), plan)
