"""Parameters that are frozen or trained after the start, and engines that share them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.engine.saving.restore import check_whole
from echelon.errors import UserError
from echelon.launching import Ranks
from tests.cases import adamw, mean_loss, vectors

Warm = Callable[[int], Ranks]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)).double()


@contextmanager
def engine_over(model: nn.Module, plan: str, **options: object) -> Iterator[echelon.Engine]:
    given = {"optimizer": adamw, "loss": mean_loss, "smallest_unit": 0} | options
    with echelon.parallelize(model, f"{plan} precision=fp64", **given) as engine:  # type: ignore[arg-type]
        yield engine


def batch(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs.double(), targets


def test_a_parameter_that_is_trained_later_is_refused_by_name() -> None:
    """It was in no optimizer, and never trained, without a word."""
    model = make_model()
    model[0].requires_grad_(False)
    with engine_over(model, "data=1") as engine:
        engine.step(batch(0))
        model[0].weight.requires_grad_(True)
        with pytest.raises(UserError, match=r"0.weight had requires_grad=False when parallelize was called"):
            engine.step(batch(1))
        model[0].weight.requires_grad_(False)
        engine.step(batch(1))


def freeze_later(plan: str | None) -> dict[str, Tensor]:
    """The weights after two steps, a freeze, and two steps; None: of a plain loop."""
    model = make_model()
    if plan is None:
        optimizer = adamw(model.parameters())
        for step in range(4):
            model[2].requires_grad_(step < 2)
            optimizer.zero_grad()
            mean_loss(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
        return model.state_dict()
    with engine_over(model, plan) as engine:
        for step in range(4):
            model[2].requires_grad_(step < 2)
            engine.step(engine.local(batch(step)))
        weights = engine.full_state_dict()
        assert set(engine.full_optimizer_state()["2.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    return weights


def train_frozen_later() -> list[float]:
    """How far each plan is from a plain loop."""
    expected = freeze_later(None)
    distances = []
    for plan in ("data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3"):
        weights = freeze_later(plan)
        distances.append(max(float((weights[name] - expected[name]).abs().max()) for name in expected))
    return distances


def test_a_parameter_that_is_frozen_later_keeps_its_value_and_its_state(warm_ranks: Warm) -> None:
    for distances in warm_ranks(2).run(train_frozen_later):
        assert max(distances) < 1e-12


def test_an_engine_whose_parameters_a_later_one_trains_says_so() -> None:
    model = make_model()
    with engine_over(model, "data=1") as first:
        first.step(batch(0))
        with engine_over(nn.Sequential(*model[2:]), "data=1") as second:
            with pytest.raises(UserError, match=r"2.weight is trained by a later engine over the same model"):
                first.step(batch(1))
            second.step((torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)))
            first.close()
            assert model[2].weight.grad is not None, "the gradients of the second engine are its own"


def take_parts(plan: str) -> list[str]:
    """What is said of a second engine over one layer of a split model, and of a model around it."""
    model = make_model()
    answers = []
    with engine_over(model, plan):
        for other in (model[2], nn.ModuleDict({"inside": model})):
            with pytest.raises(UserError) as refused:
                check_whole(other)
            answers.append(str(refused.value).split(" by another")[0])
    check_whole(model)
    with engine_over(model[2:], "data=2") as engine:
        engine.step((torch.ones(4, 8, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)))
    return answers


@pytest.mark.parametrize("plan", ["data=2 zero=3", "pipeline=2"])
def test_a_second_engine_over_a_part_of_a_split_model_is_refused(warm_ranks: Warm, plan: str) -> None:
    """It trained not-a-number, or failed deep inside."""
    for answers in warm_ranks(2).run(take_parts, plan):
        assert answers == [f"{name}: the model is split over ranks" for name in ("weight", "inside.0.weight")]


def adversarial_losses(plan: str | None) -> tuple[list[float], list[str]]:
    """A generator and a discriminator take turns; the generator's loss goes through the other. And what the
    generator's audit says."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def fools(made: Tensor, _: Tensor) -> Tensor:
        return F.softplus(-discriminator(made)).mean()

    def tells_apart(scores: Tensor, is_real: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(scores[:, 0], is_real)

    losses = []
    if plan is None:
        optimizers = [adamw(generator.parameters()), adamw(discriminator.parameters())]
        for step in range(3):
            for optimizer, loss in zip(
                optimizers,
                (lambda x, _: fools(generator(x), x), lambda x, y: tells_apart(discriminator(x), y)),
                strict=True,
            ):
                inputs, targets = batch(step)
                value = loss(inputs, (targets > 1).double())
                for each in optimizers:
                    each.zero_grad()
                value.backward()
                optimizer.step()
                losses.append(value.item())
        return losses, []
    with (
        warnings.catch_warnings(),
        engine_over(generator, plan, loss=fools) as first,
        engine_over(discriminator, plan, loss=tells_apart) as second,
    ):
        warnings.simplefilter("ignore", UserWarning)
        for step in range(3):
            for engine in (first, second):
                inputs, targets = batch(step)
                losses.append(float(engine.step(engine.local((inputs, (targets > 1).double()))).loss))
        return losses, [str(result) for result in first.audit]


@pytest.mark.slow_cases("data=2 zero=2")
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=2", "data=2 zero=3"])
def test_a_loss_may_go_through_the_model_of_another_engine(warm_ranks: Warm, plan: str) -> None:
    """With zero=3 one rank has no weights of it to compare with: that was waited for without an end."""
    expected, _ = adversarial_losses(None)
    for losses, (_, audit) in warm_ranks(2).run(adversarial_losses, plan):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert audit == "gradients: held" or ("zero=3" in plan and "needs weights of another engine" in audit)
