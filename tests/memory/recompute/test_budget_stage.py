"""Training under a budget: what ranks keep is measured, and weights are those of recompute=none."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.memory.recompute.budget_stage import BudgetedStage
from echelon.memory.recompute.segment import RecomputedLayer
from echelon.models import cross_entropy
from echelon.nn.wrapping import find_wrapper
from echelon.verify import assert_equal
from tests.parallel.tensor.models import gpt, language_case, llama, tokens

Warm = Callable[[int], Ranks]
WIDTH = 16


class Block(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, factor * WIDTH), nn.Linear(factor * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def make_model(factors: Sequence[int]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(factor) for factor in factors), nn.Linear(WIDTH, 3)).double()


class Trained(NamedTuple):
    weights: list[Tensor]
    peak: int
    segments: list[Any]  # of each shape
    warnings: int = 0


def train(
    plan: str, factors: Sequence[int], batches: Sequence[int] = (8, 8, 8), loss: Any = F.cross_entropy
) -> Trained:
    model = make_model(factors)
    engine = echelon.parallelize(
        model,
        f"{plan} precision=fp64",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        loss=loss,
        audit="off",  # whose parts of batches have shapes of their own
    )
    for step, samples in enumerate(batches):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(samples, WIDTH, generator=generator, dtype=torch.float64)
        engine.step((x, torch.randint(3, (samples,), generator=generator)))
    peak = engine.memory().peak["activations"]
    stage = budgeted(model)
    chosen = [] if stage is None else list(stage.choices.values())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    engine.close()
    return Trained(weights, peak, chosen)


def budgeted(model: nn.Module) -> BudgetedStage | None:
    layers = [find_wrapper(module, RecomputedLayer) for module in model.modules()]
    stages = [layer._segment for layer in layers if layer is not None]
    return next((stage for stage in stages if isinstance(stage, BudgetedStage)), None)


FACTORS = (4, 4, 2, 6, 4, 4, 1, 4)


def num_recomputed(segments: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in segments)


@pytest.mark.parametrize(
    ("part", "more"),
    [(1.0, ""), (0.7, ""), (0.4, ""), (0.5, "microbatches=2"), (0.5, "contiguous=true")],
)
def test_a_budget_is_kept_and_weights_are_the_same_to_the_last_bit(part: float, more: str) -> None:
    none = train(f"recompute=none {more.replace('contiguous=true', '')}", FACTORS)
    budget = round(none.peak * part)
    trained = train(f"recompute=budget:{budget} {more}", FACTORS)
    assert 0.75 * budget < trained.peak <= budget
    assert all(torch.equal(a, b) for a, b in zip(trained.weights, none.weights, strict=True))
    (segments,) = trained.segments
    assert bool(segments) == (part < 1)
    assert num_recomputed(segments) < len(FACTORS)


def wide_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Saves more than a layer does."""
    return F.cross_entropy(output.repeat(1, 64).exp().log(), targets)


def test_what_the_loss_saves_is_counted() -> None:
    budget = round(0.7 * train("recompute=none", FACTORS, loss=wide_loss).peak)
    assert 0.75 * budget < train(f"recompute=budget:{budget}", FACTORS, loss=wide_loss).peak <= budget


@pytest.mark.slow_cases("sqrt")
@pytest.mark.parametrize("recompute", ["full", "sqrt"])
def test_no_more_is_recomputed_than_by_a_split_that_fits(recompute: str) -> None:
    uniform = train(f"recompute={recompute}", [4] * 16)
    trained = train(f"recompute=budget:{uniform.peak}", [4] * 16)
    assert trained.peak <= uniform.peak
    assert num_recomputed(trained.segments[0]) <= 16


def test_each_shape_has_a_choice_of_its_own() -> None:
    budget = train("recompute=none", FACTORS).peak
    batches = (8, 8, 12, 12, 8, 4)
    trained = train(f"recompute=budget:{budget}", FACTORS, batches)
    small, large, smallest = trained.segments
    assert not small
    assert not smallest
    assert large
    plain = train("recompute=none", FACTORS, batches)
    assert all(torch.equal(a, b) for a, b in zip(trained.weights, plain.weights, strict=True))


def test_smaller_microbatches_of_a_step_take_the_segments_of_larger_ones() -> None:
    trained = train("recompute=budget:20000 microbatches=3", FACTORS, (8, 8, 8))  # of 3, 3 and 2 samples
    assert len(trained.segments) == 1


def test_a_budget_that_is_too_small_is_refused_before_the_first_update() -> None:
    model = make_model([4] * 8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    engine = echelon.parallelize(
        model, "recompute=budget:5000 precision=fp64", optimizer=torch.optim.SGD, loss=F.cross_entropy
    )
    with pytest.raises(UserError, match=r"at least \d+ bytes; set budget:\d+ or more") as caught:
        engine.step((torch.randn(8, WIDTH, dtype=torch.float64), torch.zeros(8, dtype=torch.int64)))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    engine.close()
    least = int(str(caught.value).split("set budget:")[1].split()[0])
    assert train(f"recompute=budget:{least}", [4] * 8).peak <= least


def test_a_budget_that_the_measurement_exceeds_is_refused() -> None:
    """Layers that differ much: a choice would fit, but only who knows them can make it."""
    with pytest.raises(UserError, match="at least 16384 bytes"):
        train("recompute=budget:15400", FACTORS)
    assert train("recompute=budget:16384", FACTORS).peak <= 16384


class Around(nn.Module):
    """Its own forward saves something before, between and behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(4) for _ in range(6)), nn.Linear(WIDTH, 4 * WIDTH)

    def layers(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(torch.tanh(x * 1.1))
        return self.head(x).tanh().exp().cos().sum(-1)


@pytest.mark.slow_cases("microbatches=2 contiguous=true")
@pytest.mark.parametrize("more", ["", "microbatches=2 contiguous=true"])
def test_what_is_saved_around_layers_is_counted(more: str) -> None:
    """It was not, so that twice the budget was taken without an error."""
    kept = 0
    for budget in (22_000, 30_000, 60_000):
        torch.manual_seed(0)
        engine = echelon.parallelize(
            Around(), f"recompute=budget:{budget} {more}", optimizer=torch.optim.SGD, loss=F.mse_loss
        )
        try:
            for _ in range(3):
                engine.step((torch.randn(16, WIDTH), torch.randn(16)))
        except UserError as error:
            assert "is less than what a rank must keep" in str(error)
        else:
            kept += 1
            assert engine.memory().peak["activations"] <= budget
        engine.close()
    assert kept


def test_a_batch_that_turns_out_too_large_is_told_of_and_trained() -> None:
    with pytest.warns(UserWarning, match="this batch takes as little as it can"):
        train("recompute=budget:20000", FACTORS, (8, 8, 80))


def language_peak(plan: str) -> int | str:
    """The peak of this rank, or what it is told."""
    torch.manual_seed(0)
    model = llama() if "pipedream" in plan else gpt()  # which has tied weights
    engine = echelon.parallelize(
        model, f"{plan} precision=fp64", optimizer=torch.optim.SGD, loss=cross_entropy, audit="off"
    )
    try:
        for step in range(3):
            engine.step(engine.local(tokens(step, samples=8)))
        peak: int | str = engine.memory().peak["activations"]
    except UserError as error:
        peak = str(error)
    engine.close(restore=False)
    return peak


PLANS = {
    "tensor=2": 2,
    "pipeline=2 schedule=1f1b microbatches=4": 2,
    "context=2": 2,
    "pipeline=2 schedule=gpipe microbatches=4": 2,
    "pipeline=2 schedule=zero-bubble microbatches=4": 2,
    "pipeline=2 schedule=interleaved chunks=2 microbatches=2": 2,
    "pipeline=2 schedule=pipedream microbatches=2": 2,
    "data=2 zero=3": 2,
    "tensor=2 checkpoints=split": 2,
}
_QUICK = ("tensor=2", "pipeline=2 schedule=1f1b microbatches=4")
plans = pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=() if plan in _QUICK else pytest.mark.slow) for plan in PLANS]
)


@pytest.mark.quick_cases(1)
@plans
def test_no_rank_exceeds_the_budget(warm_ranks: Warm, plan: str) -> None:
    ranks = warm_ranks(PLANS[plan])
    without = plan.replace("checkpoints=split", "")
    none = max(int(peak) for peak in ranks.run(language_peak, f"{without} recompute=none"))
    for part in (0.95, 0.8):
        budget = round(part * none)
        for peak in ranks.run(language_peak, f"{plan} recompute=budget:{budget}"):
            assert isinstance(peak, int), peak
            assert peak <= budget


def test_every_rank_is_told_that_the_budget_is_too_small(warm_ranks: Warm) -> None:
    for told in warm_ranks(2).run(language_peak, "pipeline=2 microbatches=2 recompute=budget:3000"):
        assert "recompute=budget:3000 is less than" in str(told)


def test_every_rank_is_told_where_stages_update_at_times_of_their_own(warm_ranks: Warm) -> None:
    """The rank of the stage that found it raised alone, and the other one waited."""
    plan = "pipeline=2 schedule=pipedream microbatches=1 recompute=budget:3000"
    for told in warm_ranks(2).run(language_peak, plan):
        assert "recompute=budget:3000 is less than" in str(told)


@pytest.mark.usefixtures("warm_contract")
@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_equal_to_one_device(plan: str) -> None:
    is_pipedream = "pipedream" in plan  # which neither clips nor ties weights
    case = language_case("llama" if is_pipedream else "gpt", 20, None if is_pipedream else 1.0)
    assert_equal(case, f"{plan} recompute=budget:{400_000 if is_pipedream else 200_000}")
