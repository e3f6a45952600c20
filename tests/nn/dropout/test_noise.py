"""Keyed noise: numbers by position in the training, whatever part of it is drawn; torch's outside."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import UserError
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.noise import KeyedNoise, noises
from echelon.nn.dropout.training_position import current, restore, scope
from echelon.nn.hashing import mix_
from echelon.nn.wrapping import Wrapping

DOUBLE = torch.zeros((), dtype=torch.float64)


def keyed(name: str = "gate") -> KeyedNoise:
    noise = KeyedNoise()
    noise.name = name
    return noise


def draw(noise: KeyedNoise, shape: tuple[int, ...], first: int = 0, step: int = 0, seed: int = 0) -> Tensor:
    with scope(seed=seed, step=step, first_sample=first):
        return noise.normal(shape, DOUBLE)


def test_numbers_depend_on_seed_step_name_sample_and_use_alone() -> None:
    noise = keyed()
    drawn = draw(noise, (4, 6, 3))
    assert torch.equal(draw(keyed(), (4, 6, 3)), drawn)
    others = [
        draw(noise, (4, 6, 3), first=1),
        draw(noise, (4, 6, 3), step=1),
        draw(noise, (4, 6, 3), seed=1),
        draw(keyed("other"), (4, 6, 3)),
    ]
    with scope(seed=0, step=0, first_sample=0):
        assert torch.equal(noise.normal((4, 6, 3), DOUBLE), drawn)
        others.append(noise.normal((4, 6, 3), DOUBLE))
    assert not any(torch.isclose(other, drawn).any() for other in others)
    assert drawn.unique().numel() == drawn.numel()


def test_any_part_of_samples_and_positions_has_the_numbers_of_the_whole() -> None:
    noise = keyed()
    whole = draw(noise, (4, 6, 3))
    for samples in (slice(0, 1), slice(2, 4)):
        part = draw(noise, (samples.stop - samples.start, 6, 3), first=samples.start)
        assert torch.equal(part, whole[samples])
    positions = torch.tensor([4, 0, 5])
    with scope(seed=0, step=0, first_sample=torch.tensor(1)):
        part = noise.normal((2, 3, 3), DOUBLE, positions)
    assert torch.equal(part, whole[1:3, positions])


def test_a_large_draw_is_that_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = draw(keyed(), (5, 4, 3))
    monkeypatch.setattr("echelon.nn.dropout.noise._MOST_HASHES", 24)
    assert torch.equal(draw(keyed(), (5, 4, 3)), expected)


@pytest.mark.parametrize("positions", [None, torch.tensor([4, 0, 5, 2])])
def test_a_long_sample_is_drawn_in_parts(positions: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> Tensor:
        with scope(seed=0, step=0, first_sample=0):
            return keyed().uniform((2, 4, 3), DOUBLE, positions)

    sizes: list[int] = []

    def noting(hashes: Tensor) -> Tensor:
        sizes.append(hashes.numel())
        return mix_(hashes)

    expected = drawn()
    monkeypatch.setattr("echelon.nn.dropout.noise._MOST_HASHES", 5)
    monkeypatch.setattr("echelon.nn.dropout.noise.mix_", noting)
    assert torch.equal(drawn(), expected)
    assert max(sizes) <= 5
    assert sum(sizes) == 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_uniform_numbers_are_below_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.randint", lambda *_, **__: torch.tensor([2**32 - 1]))
    drawn = KeyedNoise().uniform((1,), torch.zeros((), dtype=dtype))
    assert drawn.dtype == dtype
    assert 0.99 < float(drawn) < 1


def test_distributions() -> None:
    noise = keyed()
    with scope(seed=0, step=0, first_sample=0):
        normal, uniform = noise.normal((50, 100, 20), DOUBLE), noise.uniform((50, 100, 20), DOUBLE)
    assert abs(float(normal.mean())) < 0.02
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    for bound, part in ((-1.0, 0.1587), (0.0, 0.5), (2.0, 0.9772)):
        assert float((normal < bound).double().mean()) == pytest.approx(part, abs=0.01)
    assert 0 < float(uniform.min()) < 0.001
    assert 0.999 < float(uniform.max()) < 1
    assert float(uniform.var()) == pytest.approx(1 / 12, rel=0.02)


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_rarest_numbers_are_finite(
    bits: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.randint", lambda *_, **__: torch.tensor([bits]))
    drawn = KeyedNoise().normal((1,), torch.zeros((), dtype=dtype))
    assert drawn.isfinite().all()
    assert drawn.dtype == dtype
    assert 6 < abs(float(drawn)) < 6.5


def test_outside_of_every_scope_and_without_a_name_torch_draws() -> None:
    for noise in (keyed(), KeyedNoise()):
        torch.manual_seed(0)
        first = noise.normal((2, 3), DOUBLE)
        assert not torch.equal(noise.normal((2, 3), DOUBLE), first)
        torch.manual_seed(0)
        assert torch.equal(noise.normal((2, 3), DOUBLE), first)
    with scope(seed=0, step=0, first_sample=0):
        assert not torch.equal(KeyedNoise().normal((2, 3), DOUBLE), first)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.noise = KeyedNoise()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.noise.normal(x.shape, x)


def test_a_module_keeps_its_first_name_also_in_a_copy() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Noisy())
    key_dropout(model, Wrapping())
    assert {name: noise.name for name, noise in noises(model).items()} == {"1": "1"}
    copied = nn.Sequential(copy.deepcopy(model)[1])
    key_dropout(copied, Wrapping())
    assert noises(copied)["0"].name == "1"


def test_the_name_is_taken_away_with_the_wrapping() -> None:
    model = nn.Sequential(Noisy())
    with Wrapping() as wrapping:
        key_dropout(model, wrapping)
        with Wrapping() as second:
            key_dropout(model, second)
        assert noises(model)["0"].name == "0"
    assert noises(model)["0"].name is None


def test_a_second_run_draws_the_same_where_the_position_is_restored() -> None:
    noise = keyed()
    with scope(seed=0, step=0, first_sample=0):
        noise.normal((2, 3), DOUBLE)
        position = current()
        first = noise.normal((2, 3), DOUBLE)
    with restore(position):
        assert torch.equal(noise.normal((2, 3), DOUBLE), first)


def test_a_second_run_that_does_not_know_its_position_is_refused() -> None:
    model = Noisy()
    key_dropout(model, Wrapping())
    x = torch.randn(2, 3, requires_grad=True)
    with scope(seed=0, step=0, first_sample=0):
        output = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(UserError, match="drawn again in the backward pass"):
        output.sum().backward()
