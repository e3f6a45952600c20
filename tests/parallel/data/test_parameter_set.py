"""What a parameter set knows of its parameters beyond their replicas."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.engine.saving.restore import check_whole
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups, SharedGradient, named_subset
from tests.cases import adamw, mean_loss, vectors

GROUP = RecordingGroup("tied")


def make_set() -> tuple[ParameterSet, nn.ParameterDict]:
    module = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in "abcd"})
    module["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
    shared = [
        SharedGradient(module["a"], GROUP, tie=0, counts_norm=False),
        SharedGradient(module["b"], GROUP, tie=1),
        SharedGradient(module["c"], GROUP, counts_norm=False),
    ]
    norm_elsewhere = frozenset({module["d"]})
    return ParameterSet("dense", named_subset(module), GROUP, (), shared, norm_elsewhere), module


def test_trained_parameters_are_those_that_get_gradients() -> None:
    parameter_set, _ = make_set()
    assert [name for name, _ in parameter_set.trained] == ["a", "b", "c", "d"]
    assert parameter_set.numel == 11


def test_the_norm_leaves_out_what_other_stages_or_ranks_count() -> None:
    parameter_set, module = make_set()
    assert parameter_set.uncounted == {module["a"], module["c"], module["d"]}


def test_by_default_all_ranks_of_the_set_shard_one_copy() -> None:
    parameter_set, _ = make_set()
    shard, copies = parameter_set.shard_groups
    assert shard is GROUP
    assert copies.size == 1
    assert copies.ledger is GROUP.ledger
    assert parameter_set.shard_groups.copies is copies


def test_a_set_says_over_how_many_ranks_each_copy_is_sharded() -> None:
    module, data = nn.Linear(2, 3), RecordingGroup("data", 5, 8)
    groups = ShardGroups(RecordingGroup("shard", 1, 4), RecordingGroup("copies", 1, 2))
    whole = ParameterSet("dense", named_subset(module), data)
    assert whole.describe() == "dense 9 parameters over data (8)"
    hybrid = ParameterSet("dense", named_subset(module), data, shards=groups)
    assert hybrid.shard_groups is groups
    assert hybrid.describe() == "dense 9 parameters over data (8), sharded over 4"


def test_a_subset_has_the_first_names() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    assert list(named_subset(module)) == ["0.weight", "0.bias", "1.bias"]
    assert list(named_subset(module, {module[1].weight})) == ["0.weight"]


# Parameters that are frozen or trained after the start, and engines that share them.


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
