"""Functions of torch that draw: the same numbers for a sample in every part of a batch, of the right law."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.nn.draws.sample_draws import SampleDraws
from echelon.nn.dropout.training_position import scope

Draw = Callable[[Tensor], Tensor]

FUNCTIONS: dict[str, Draw] = {
    "rand": lambda x: torch.rand(len(x), 3),
    "randn": lambda x: torch.randn((len(x), 3)),
    "complex": lambda x: torch.randn(len(x), dtype=torch.complex128),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(1000, (len(x), 2)),
    "randint, both bounds": lambda x: torch.randint(low=-9, high=1000, size=(len(x),)),
    "randint_like": lambda x: torch.randint_like(x, 5, 1000),
    "normal": lambda x: torch.normal(x, 0.5),
    "normal, with a size": lambda x: torch.normal(0.0, 1.0, (len(x), 2)),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.new_empty(len(x), 9).bernoulli_(0.4),
    "multinomial": lambda x: torch.multinomial(x[:, 0].softmax(-1), 4),
    "multinomial, replaced": lambda x: x[:, 0].softmax(-1).multinomial(9, replacement=True),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, std=2.0),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 4),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(0.0, 0.5),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.1),
    "random_": lambda x: torch.empty(len(x), 3, dtype=torch.int64).random_(),
    "random_, both bounds": lambda x: torch.empty(len(x), 3).random_(7, 1000),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x[:, None], 2, output_size=(2, 5)),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True),
    "poisson": lambda x: torch.poisson(x.abs() * 9),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 90), x.sigmoid()),
    "gamma": lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).rsample(),
    "dirichlet": lambda x: torch.distributions.Dirichlet(x.abs() + 1).rsample(),
    "categorical": lambda x: torch.distributions.Categorical(logits=x).sample(),
    "rows of samples": lambda x: torch.randn_like(x.flatten(0, 1)).view(x.shape),
    "positions first": lambda x: torch.rand_like(x.transpose(0, 1)).transpose(0, 1),
}


class Drawing(nn.Module):
    def __init__(self, function: Draw) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def run(model: nn.Module, begin: int, end: int, step: int = 0, width: int = 8) -> Tensor:
    x = torch.linspace(-2, 2, 7 * 5 * width, dtype=torch.float64).sin().view(7, 5, width)
    with scope(seed=3, step=step, first_sample=begin, samples=end - begin, draws=SampleDraws(model)):
        drawn: Tensor = model(x[begin:end])
    return drawn


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sample_has_the_same_numbers_in_every_part_of_a_batch(name: str) -> None:
    model = Drawing(FUNCTIONS[name])
    before = torch.get_rng_state()
    whole = run(model, 0, 7)
    parts = torch.cat([run(model, 0, 3), run(model, 3, 7)])
    assert torch.equal(torch.get_rng_state(), before)  # torch has drawn nothing
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    assert not torch.equal(run(model, 0, 7, step=1), whole)
    assert len({row.numpy().tobytes() for row in torch.view_as_real(whole) if True} if whole.is_complex()
               else {row.numpy().tobytes() for row in whole}) == 7  # fmt: skip


def classes(number: int) -> Tensor:
    """Rows of which the second class is never drawn."""
    return torch.tensor([[1.0, 0, 3]]).expand(number, 3)


@pytest.mark.parametrize(
    ("draw", "mean", "variance"),
    [
        (lambda x: torch.rand(len(x), 20000), 1 / 2, 1 / 12),
        (lambda x: torch.randn(len(x), 20000), 0, 1),
        (lambda x: torch.randint(0, 10, (len(x), 20000)).double(), 4.5, 99 / 12),
        (lambda x: x.new_empty(len(x), 20000).bernoulli_(0.3), 0.3, 0.21),
        (lambda x: x.new_empty(len(x), 20000).exponential_(2.0), 1 / 2, 1 / 4),
        (lambda x: x.new_empty(len(x), 20000).geometric_(0.25), 4, 12),
        (lambda x: F.dropout(x.new_ones(len(x), 20000), 0.2), 1, 1 / 4),
        (lambda _: torch.multinomial(classes(7), 20000, True).double(), 1.5, 0.75),
        (lambda _: torch.multinomial(classes(14000), 1).double(), 1.5, 0.75),
    ],
)  # fmt: skip
def test_numbers_have_the_law_of_the_function(draw: Draw, mean: float, variance: float) -> None:
    drawn = run(Drawing(draw), 0, 7)
    tolerance = 6 * (variance / drawn.numel()) ** 0.5
    assert abs(float(drawn.mean()) - mean) < tolerance
    assert float(drawn.var()) == pytest.approx(variance, rel=0.05)


def test_no_number_of_a_small_type_is_one() -> None:
    drawn = run(Drawing(lambda x: torch.rand(len(x), 30000, dtype=torch.bfloat16)), 0, 7)
    assert float(drawn.max()) < 1


def test_gradients_end_at_a_tensor_that_is_written() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    model = Drawing(lambda x: (x * 2).normal_() + x)
    with scope(seed=0, step=0, first_sample=0, samples=4, draws=SampleDraws(model)):
        model(x).sum().backward()
    assert x.grad is not None
    assert bool((x.grad == 1).all())


def test_what_draws_nothing_is_torchs_own() -> None:
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    draws = SampleDraws(
        model := Drawing(lambda x: F.scaled_dot_product_attention(F.dropout(x, 0.5, False), x, x))
    )
    with scope(seed=0, step=0, first_sample=0, samples=4, draws=draws):
        drawn = model(x)
    assert torch.equal(drawn, F.scaled_dot_product_attention(x, x, x))
    assert not draws.is_used


def test_attention_is_that_of_torch_where_nothing_is_dropped() -> None:
    """The plain operations, with a probability that keeps all elements."""
    query = torch.randn(2, 4, 5, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 5, 8, dtype=torch.float64)
    bias = torch.randn(5, 5, dtype=torch.float64)
    for options in ({"is_causal": True}, {"attn_mask": bias}, {"attn_mask": bias > -1}, {"scale": 0.3}):
        model = Drawing(lambda x: F.scaled_dot_product_attention(x, key, value, dropout_p=1e-12, enable_gqa=True, **options))  # fmt: skip  # noqa: B023, E501
        with scope(seed=0, step=0, first_sample=0, samples=2, draws=SampleDraws(model)):
            drawn = model(query)
        expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **options)  # type: ignore[arg-type]
        torch.testing.assert_close(drawn, expected, rtol=1e-9, atol=1e-9)
