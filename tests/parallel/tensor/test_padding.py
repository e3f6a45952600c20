"""A vocabulary that is not divisible by the ranks: padded in memory, and nowhere else."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.launching import Ranks
from echelon.models import ModelConfig, build, cross_entropy
from echelon.nn.wrapping import Wrapping
from echelon.parallel.tensor.split import split_over
from echelon.verify import Case, assert_equal
from tests.cases import adamw

Warm = Callable[[int], Ranks]

VOCAB, SEQUENCE = 61, 12


def language_model(*, tied: bool = False) -> nn.Module:
    return build(ModelConfig("gpt", 2, 12, 6, vocab=VOCAB, sequence=SEQUENCE, tied=tied))


class BiasedHead(nn.Module):
    """Its logits have a bias, and a vocabulary of so few tokens that of three ranks one has only padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 6), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))  # type: ignore[no-any-return]


def tokens(step: int, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(vocab, (2, 5, SEQUENCE), generator=generator)
    inputs[1, 0] = targets[1, 1] = vocab - 1  # the last before the padding
    targets[0, : 3 + step % 3] = -100
    return inputs, targets


def all_logits_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over the columns too: it would see padding. Logits lie in memory as those of one device."""
    losses = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
    return losses + logits.view(-1).square().mean()


@pytest.mark.slow_cases(
    "data=2 tensor=2 zero=3-True",
    "tensor=2 pipeline=2 microbatches=2 schedule=zero-bubble-True",
    "tensor=3 sequence=true-False",
)
@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize(
    ("plan", "tied"),
    [
        ("tensor=2", True),
        ("tensor=3 sequence=true", False),
        ("data=2 tensor=2 zero=3", True),
        ("tensor=2 pipeline=2 microbatches=2 schedule=zero-bubble", True),
        pytest.param("tensor=2 compile=true", True, marks=pytest.mark.slow),
        pytest.param("data=2 tensor=3 zero=3", False, marks=pytest.mark.slow),
        pytest.param("tensor=3 pipeline=2 microbatches=3 schedule=1f1b", True, marks=pytest.mark.slow),
        pytest.param("tensor=2 context=2 data=2 zero=1", False, marks=pytest.mark.slow),
    ],
)
def test_a_padded_vocabulary_is_equal_to_one_device(plan: str, tied: bool) -> None:
    model = partial(language_model, tied=tied)
    assert_equal(Case(model, tokens, cross_entropy, adamw, steps=8, clip=1.0), plan)


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.parametrize("loss", [cross_entropy, all_logits_loss])
def test_a_rank_may_have_nothing_but_padding(loss: Any) -> None:
    table = {"embedding": "vocabulary", "head": "vocabulary"}
    batch = partial(tokens, vocab=4)
    assert_equal(Case(BiasedHead, batch, loss, adamw, steps=4, options={"tensor_table": table}), "tensor=3")


@pytest.mark.usefixtures("warm_contract")
def test_a_loss_of_all_logits_does_not_see_the_padding() -> None:
    assert_equal(Case(language_model, tokens, all_logits_loss, adamw, steps=4), "tensor=2")


def split(rank: int) -> nn.Module:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    split_over(
        model,
        RecordingGroup("tensor", rank, 2),
        {"0": "vocabulary", "1": "vocabulary"},
        Wrapping(),
        sequence=False,
        whole_sequence=[],
        join_logits=False,
    )
    return model


def test_padded_logits_are_minus_infinity_and_have_no_gradient() -> None:
    first, last = split(0)[1], split(1)[1]
    x = torch.randn(2, 4)
    assert first(x).isfinite().all()
    logits = last(x)
    assert logits.isneginf().tolist() == [[False, False, True]] * 2
    logits.backward(torch.ones(2, 3))
    assert not last.weight.grad[2].any()
    assert not last.bias.grad[2:].any()
    assert last.weight.grad[:2].all()


def trained() -> tuple[list[bool], dict[str, list[int]], list[int], bool]:
    """Which rows of the local embedding and head are zero, the shapes of the whole state, and the model after
    the engine is closed: the shape of its logits, and whether its weights are those of the state."""
    model = language_model()
    engine = echelon.parallelize(model, "tensor=2", optimizer=adamw, loss=cross_entropy)
    for step in range(2):
        engine.step(tokens(step))
    with engine._watch.own_work():  # the engine alone may read parts
        ends: list[Any] = [model.embedding.tokens.weight, model.head.projection.weight]
        is_zero = [not bool(row.any()) for weight in ends for row in weight]
    state = engine.full_state_dict()
    moments = {
        f"{name} {key}": list(value.shape)
        for name, states in engine.full_optimizer_state().items()
        for key, value in states.items()
        if isinstance(value, Tensor) and value.ndim
    }
    shapes = {name: list(value.shape) for name, value in state.items()} | moments
    engine.close()
    is_restored = all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    return is_zero, shapes, list(model(tokens(0)[0]).shape), is_restored


def test_padding_stays_zero_and_is_in_no_state(warm_ranks: Warm) -> None:
    whole = {name: list(value.shape) for name, value in language_model().state_dict().items()}
    local_rows = [False] * 31, [*[False] * 30, True]
    for rank, (is_zero, shapes, logits, is_restored) in enumerate(warm_ranks(2).run(trained)):
        assert is_zero == local_rows[rank] * 2
        assert {name: shapes[name] for name in whole} == whole
        for key in ("exp_avg", "exp_avg_sq"):
            assert shapes[f"embedding.tokens.weight {key}"] == [VOCAB, 12]
        assert logits == [5, SEQUENCE, VOCAB]
        assert is_restored
