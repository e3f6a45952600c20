"""The mask: fair, independent of everything it should be independent of, and a function of the sample."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.errors import UserError
from echelon.nn.dropout.mask import Draw, KeyedNoise, Runs, drop, mask_of, noises, runs_of
from echelon.nn.dropout.modules import key_dropout
from echelon.nn.dropout.training_position import current, restore, scope
from echelon.nn.hashing import hash_of, mix, mix_
from echelon.nn.wrapping import Wrapping
from tests.nn.dropout.masks import keep_mask
from tests.nn.dropout.triton_stand_in import kernel_on_cpu

SHAPE = (64, 32, 128)
COUNT = math.prod(SHAPE)
FIRST_RELEASE = ["1001101111000011", "1100000011001110"]


def mask(
    seed: int = 1, step: int = 2, layer: int = 3, first: int = 0, p: float = 0.5, use: int = 0
) -> Tensor:
    return keep_mask(seed, step, layer, first, SHAPE, p, use=use)


def sigmas(kept: Tensor, p: float) -> float:
    """How many standard deviations the mean is from 1 - p."""
    n = kept.numel()
    return float((kept.double().mean() - (1 - p)) / math.sqrt(p * (1 - p) / n))


def agreement(one: Tensor, other: Tensor) -> float:
    """Of two fair masks: how many standard deviations from agreeing in half of all elements."""
    return sigmas(one == other, 0.5)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63 - 1])
def test_the_mean_is_right(p: float, seed: int) -> None:
    assert abs(sigmas(mask(seed, p=p), p)) < 4


def test_neighbours_agree_by_chance_alone() -> None:
    kept = mask().flatten(1)
    for distance in (1, 2, 3, 4, 8, 64, 128):
        assert abs(agreement(kept[:, distance:], kept[:, :-distance])) < 4, distance
        if distance < 64:
            assert abs(agreement(kept[distance:], kept[:-distance])) < 4, distance


def test_seeds_steps_layers_samples_and_uses_are_independent() -> None:
    base = mask()
    others = [mask(seed=2), mask(step=3), mask(layer=4), mask(first=64), mask(use=1)]
    others += [mask(step=3, layer=2), mask(seed=2, step=1), mask(layer=3 + 2**40)]
    for index, one in enumerate([base, *others]):
        for other in others[index:]:
            assert abs(agreement(one, other)) < 4


def chi_square(counts: Tensor, expected: float) -> float:
    """How many standard deviations chi-square is from its mean."""
    freedom = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def test_every_pattern_of_eight_neighbours_is_as_frequent() -> None:
    for kept in (mask().view(-1, 8), mask().flatten(1).T.reshape(-1, 8)):
        patterns = (kept.long() << torch.arange(8)).sum(1)
        assert abs(chi_square(torch.bincount(patterns, minlength=256).double(), COUNT / 8 / 256)) < 4


def test_samples_and_positions_keep_as_many_as_chance_would() -> None:
    kept = mask(p=0.1).flatten(1).double()
    for dim, each in ((0, kept.shape[0]), (1, kept.shape[1])):
        variance = each * 0.1 * 0.9
        spread = ((kept.sum(dim) - each * 0.9) ** 2 / variance).mean()
        assert abs(float(spread) - 1) < 4 * math.sqrt(2 / kept.shape[1 - dim])


def test_patterns_over_steps_are_as_frequent() -> None:
    """One element over many steps and layers: short counters must not show."""
    kept = torch.cat(
        [keep_mask(0, step, layer, 0, (1, 1), 0.5) for step in range(128) for layer in range(32)]
    )
    assert abs(sigmas(kept, 0.5)) < 4
    assert abs(agreement(kept[1:], kept[:-1])) < 4
    assert abs(agreement(kept[32:], kept[:-32])) < 4


def test_p_of_nothing_and_of_everything() -> None:
    assert mask(p=0.0).all()
    assert not mask(p=1.0).any()
    assert mask(p=1e-12).all()


@pytest.mark.parametrize("shape", [(12,), (12, 7), (12, 5, 3), (12, 0), (0, 4), (12, 1, 1)])
def test_however_a_batch_is_cut_its_samples_keep_the_same(shape: tuple[int, ...]) -> None:
    whole = keep_mask(1, 2, 3, 100, shape, 0.3)
    assert whole.shape == shape
    assert whole.dtype == torch.bool
    begin = 0
    parts = []
    for size in (5, 1, 0, 6) if shape[0] else (0,):
        parts.append(keep_mask(1, 2, 3, 100 + begin, (size, *shape[1:]), 0.3))
        begin += size
    assert torch.equal(torch.cat(parts), whole)


def test_tiles_are_one_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mask()
    for tile in (1000, 2048 * 7 + 1, COUNT):  # parts of one sample, some samples, all of them
        monkeypatch.setattr("echelon.nn.dropout.mask._CPU_TILE", tile)
        assert torch.equal(mask(), whole)


def test_the_bits_are_those_of_the_first_release() -> None:
    """A change of the hash changes every training that goes on from a checkpoint."""
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # splitmix64's first number from seed 0
    kept = keep_mask(1, 2, 3, 4, (2, 16), 0.5)
    assert ["".join("01"[bit] for bit in row) for row in kept.int().tolist()] == FIRST_RELEASE


@pytest.mark.parametrize("shape", [(5, 12), (5, 6), (5, 4, 12), (5, 4, 6), (5, 4, 3, 6)])
@pytest.mark.parametrize("some", [False, True])
def test_a_part_of_the_last_dim_keeps_what_the_whole_does(shape: tuple[int, ...], some: bool) -> None:
    """Also when it is of some positions alone, and when one hash decides for two parts."""
    indices = torch.tensor([1, 3]) if some and len(shape) > 2 else None
    whole = keep_mask(1, 2, 3, 100, shape, 0.3)
    seen = whole if indices is None else whole[:, indices]
    for parts in (1, 2, 3):
        shape_here = (*seen.shape[:-1], shape[-1] // parts)
        found = [
            keep_mask(1, 2, 3, 100, shape_here, 0.3, indices=indices, feature_part=(n, parts))
            for n in range(parts)
        ]
        assert torch.equal(torch.cat(found, -1), seen)


DRAW = Draw(hash_of(1, 2, 3, 0), 4, 0.3)


def expected(x: Tensor) -> Tensor:
    return x * mask_of(DRAW, x.shape, "cpu") * DRAW.scale


def test_the_gradient_is_that_of_the_same_mask_and_nothing_is_kept() -> None:
    x = torch.randn(6, 50, dtype=torch.float64, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        output = drop(x, DRAW)
    assert torch.equal(output, expected(x))
    weights = torch.randn_like(output, requires_grad=True)
    (gradient,) = torch.autograd.grad(output, x, weights, create_graph=True)
    assert torch.equal(gradient, expected(weights))
    assert torch.equal(torch.autograd.grad(gradient.sum(), weights)[0], expected(torch.ones_like(x)))
    assert saved == []


def test_inplace_is_in_place() -> None:
    x = torch.randn(4, 6)
    result = expected(x)
    assert drop(x, DRAW, inplace=True) is x
    assert torch.equal(x, result)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_kernel_sees_contiguous_memory_and_strides_stay(
    inplace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.nn.dropout.mask.has_kernel", lambda _: True)
    x = torch.randn(5, 4, 6).transpose(1, 2)
    result = expected(x)
    with kernel_on_cpu():
        output = drop(x, DRAW, inplace=inplace)
    assert output.stride() == x.stride()
    assert torch.equal(output, result)


def test_nothing_of_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.nn.dropout.mask.has_kernel", lambda _: True)
    assert drop(torch.empty(0, 4), DRAW).shape == (0, 4)


@pytest.mark.parametrize(
    ("shape", "has_indices", "part", "expected"),
    [
        ((8,), False, None, Runs(1, 1)),
        ((8, 5, 6), False, None, Runs(1, 30)),
        ((8, 5, 6), True, None, Runs(5, 6)),
        ((8, 5), True, None, Runs(5, 1)),
        ((8, 6), False, (1, 2), Runs(1, 6, 1, 1, 2)),
        ((8, 5, 6), True, (1, 2), Runs(5, 6, 1, 1, 2)),
        ((8, 5, 3, 6), False, (2, 4), Runs(15, 6, 3, 2, 4)),
    ],
)
def test_runs_of_a_shape(
    shape: tuple[int, ...], has_indices: bool, part: tuple[int, int] | None, expected: Runs
) -> None:
    assert runs_of(shape, has_indices=has_indices, feature_part=part) == expected


def test_runs_of_an_odd_length_share_words() -> None:
    assert Runs(5, 6).has_whole_words
    assert not Runs(5, 3).has_whole_words


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
    monkeypatch.setattr("echelon.nn.dropout.mask._MOST_HASHES", 24)
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
    monkeypatch.setattr("echelon.nn.dropout.mask._MOST_HASHES", 5)
    monkeypatch.setattr("echelon.nn.dropout.mask.mix_", noting)
    assert torch.equal(drawn(), expected)
    assert max(sizes) <= 5
    assert sum(sizes) == 2 + 24, "the keys of two samples, and their elements"


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
