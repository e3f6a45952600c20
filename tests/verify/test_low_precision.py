"""The contract in bf16: it holds for plans, it measures what it says, and it finds bugs of masters."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.engine import Engine
from echelon.errors import UserError
from echelon.models import ModelConfig, build
from echelon.verify import Case, LowPrecisionVerdict, contract, verify
from echelon.verify.low_precision import Distance, compare_low_precision
from echelon.verify.reference import TrainingResult
from echelon.verify.verdict import LOG, ONE_DEVICE, summarize
from tests.cases import adamw, perceptron_case, sgd
from tests.contract_models import SEQUENCE, VOCAB, token_loss, tokens

BF16, ULP = torch.bfloat16, 2.0**-7  # the distance of 1.0 and the next number in bf16

# Three trainings, measured.

START = {"a": torch.zeros(4, dtype=BF16), "frozen": torch.ones(2, dtype=BF16)}


def result(error: float, dtype: torch.dtype = BF16) -> TrainingResult:
    """A training that ends `error` too far, in every weight, state and number that it changes."""
    weights = {"a": torch.full((4,), 1.0 + error, dtype=dtype), "frozen": torch.ones(2, dtype=dtype)}
    state = {"a": {"step": torch.tensor(3.0), "exp_avg": torch.full((4,), 2.0 + 2 * error)}, "frozen": {}}
    numbers = [4.0 + 4 * error]
    masters = {"a": torch.full((4,), 1.0 + error)}
    plan = "data=2 precision=bf16"
    return TrainingResult(weights, state, numbers, list(numbers), numbers[0], plan=plan, masters=masters)


def compare(
    plan: TrainingResult, *others: TrainingResult, against: str = ONE_DEVICE, rounding: float = 2 * ULP
) -> LowPrecisionVerdict:
    rounded, exact = result(0.0), result(rounding, torch.float32)
    return compare_low_precision([plan, *others], rounded, exact, START, 3, against)


def test_what_the_optimizer_rounds_is_allowed_too() -> None:
    """Muon takes bf16, of which four roundings are 1/64, in float16 too."""
    trainings = [
        dataclasses.replace(result(error, dtype), plan="data=2 precision=fp16")
        for error, dtype in ((ULP, torch.float16), (0.0, torch.float16), (ULP / 64, torch.float32))
    ]
    plan, rounded, exact = trainings
    assert not compare_low_precision([plan], rounded, exact, START, 3, ONE_DEVICE).holds
    assert compare_low_precision(
        [plan], rounded, exact, START, 3, ONE_DEVICE, optimizer_rounding=2.0**-8
    ).holds


def changed(change: Callable[[TrainingResult], object]) -> TrainingResult:
    training = result(0.0)
    change(training)
    return training


def test_equal_trainings_have_no_distance_and_nothing_is_left_out() -> None:
    verdict = compare(result(0.0))
    assert verdict.holds
    assert verdict.groups.keys() == {"weights", "step", "exp_avg", "master"}
    assert verdict.tensors.keys() == {"a", "frozen", "a step", "a exp_avg", "a master"}
    assert verdict.numbers.keys() == {"loss 0", "grad_norm 0", "evaluation 0"}
    assert all(distance.plan == 0.0 for distance in verdict.distances.values())


def test_the_distance_is_relative_to_what_training_has_changed() -> None:
    verdict = compare(result(ULP))
    assert verdict.groups["weights"].plan == pytest.approx(ULP / (2 + ULP))
    assert verdict.groups["weights"].rounding == pytest.approx(2 * ULP / (2 + 2 * ULP))
    assert verdict.tensors["a master"].plan == pytest.approx(ULP / (2 + ULP))
    assert verdict.tensors["a exp_avg"].plan == pytest.approx(ULP / (2 + ULP))
    assert verdict.numbers["loss 0"].plan == pytest.approx(ULP / (2 + ULP))
    assert "weights differ by 3.9e-03 (rounding 7.8e-03, allowed 3.9e-02)" in str(verdict)


def test_an_update_of_twice_the_size_is_a_third_away() -> None:
    assert compare(result(1.0)).groups["weights"].plan == pytest.approx(1 / 3)
    assert not compare(result(1.0)).holds


def test_a_plan_may_be_a_few_times_as_far_as_rounding() -> None:
    rounding = ULP / (1 + ULP)  # the distance of 1 and 1 + 2 · ULP
    bound = 3 * rounding + 2.0**-6
    within, beyond = compare(result(7 * ULP)), compare(result(11 * ULP))
    assert within.holds
    assert within.groups["weights"].allowed == pytest.approx(bound)
    assert within.groups["weights"].plan < bound < beyond.groups["weights"].plan
    assert not beyond.holds
    assert not beyond.groups["weights"].holds
    assert beyond.tensors["a"].holds  # one tensor alone would be within its bound
    assert beyond.tensors["a"].allowed == pytest.approx(4 * bound)


def set_weight(name: str, value: Tensor) -> Callable[[TrainingResult], object]:
    return lambda training: training.weights.__setitem__(name, value)


def set_state(key: str, value: Tensor) -> Callable[[TrainingResult], object]:
    return lambda training: training.optimizer["a"].__setitem__(key, value)


CHANGES = {
    "missing weight": (lambda training: training.weights.pop("a"), "a"),
    "missing state": (lambda training: training.optimizer["a"].pop("exp_avg"), "a exp_avg"),
    "missing master": (lambda training: training.masters.pop("a"), "a master"),
    "other master": (lambda training: training.masters["a"].mul_(1.5), "a master"),
    "additional weight": (set_weight("c", torch.ones(1, dtype=BF16)), "c"),
    "additional state": (set_state("exp_avg_sq", torch.zeros(4)), "a exp_avg_sq"),
    "other type of a weight": (set_weight("a", torch.ones(4)), "a"),
    "other type of a state": (set_state("exp_avg", torch.full((4,), 2.0, dtype=BF16)), "a exp_avg"),
    "other shape": (set_weight("a", torch.ones(2, 2, dtype=BF16)), "a"),
    "a frozen weight moved": (set_weight("frozen", torch.full((2,), 1 + ULP, dtype=BF16)), "frozen"),
    "a step too many": (set_state("step", torch.tensor(4.0)), "a step"),
    "NaN": (set_weight("a", torch.tensor([1.0, 1, 1, math.nan], dtype=BF16)), "a"),
    "infinity": (set_weight("a", torch.tensor([1.0, 1, 1, math.inf], dtype=BF16)), "a"),
    "a loss": (lambda training: training.losses.__setitem__(0, 4.8), "loss 0"),
    "a loss that is NaN": (lambda training: training.losses.__setitem__(0, math.nan), "loss 0"),
    "a norm": (lambda training: training.grad_norms.__setitem__(0, 3.2), "grad_norm 0"),
    "an evaluation": (lambda training: setattr(training, "evaluation", 4.8), "evaluation 0"),
    "a loss too few": (lambda training: training.losses.clear(), "loss of all steps"),
}


@pytest.mark.parametrize(("change", "name"), [pytest.param(*row, id=key) for key, row in CHANGES.items()])
def test_a_difference_is_found_and_named(change: Callable[[TrainingResult], object], name: str) -> None:
    verdict = compare(changed(change))
    assert not verdict.holds
    assert not verdict.distances[name].holds
    assert verdict.to_dict()["holds"] is False
    assert "NOT within rounding" in str(verdict)
    assert verdict.worst[1].excess > 1


def test_a_reference_that_is_nan_is_no_proof() -> None:
    rounded = changed(set_weight("a", torch.full((4,), math.nan, dtype=BF16)))
    verdict = compare_low_precision([rounded], rounded, result(0.1, torch.float32), START, 3, ONE_DEVICE)
    assert not verdict.holds


def test_ranks_must_be_the_same_to_the_bit() -> None:
    assert compare(result(0.0), summarize(result(0.0))).holds
    verdict = compare(
        result(0.0), summarize(result(0.0)), summarize(changed(set_state("step", torch.zeros(()))))
    )
    assert verdict.rank_differences == ("a step on rank 2",)
    assert not verdict.holds
    assert "ranks differ in a step on rank 2; 1 of" in str(verdict)
    other_loss = summarize(changed(lambda training: training.losses.__setitem__(0, 4.0001)))
    assert not compare(result(0.0), other_loss).holds
    assert compare(result(0.0), other_loss, against=LOG).holds


def test_what_is_allowed_of_a_number_grows_with_rounding_and_never_shrinks() -> None:
    rounded, exact = result(0.0), result(2 * ULP, torch.float32)
    rounded.losses, exact.losses = [4.0] * 3, [4.0, 5.0, 4.0]
    training = changed(lambda training: setattr(training, "losses", [4.0, 4.0, 4.5]))
    numbers = compare_low_precision([training], rounded, exact, START, 3, ONE_DEVICE).numbers
    assert numbers["loss 0"].allowed == 4 * 2.0**-8
    assert numbers["loss 1"].allowed == numbers["loss 2"].allowed == pytest.approx(4 / 9)
    assert numbers["loss 2"].holds


def test_training_that_rounding_has_driven_apart_is_refused() -> None:
    with pytest.raises(UserError, match=r"one device in bf16 is 0\.33 from float32 .* use fewer steps"):
        compare(result(0.0), rounding=1.0)


def test_the_excess_is_in_units_of_what_is_allowed() -> None:
    assert Distance(0.2, 0.0, 0.1).excess == 2.0
    assert Distance(0.0, 0.0, 0.0).excess == 0.0
    assert Distance(0.1, 0.0, 0.0).excess == math.inf
    assert Distance(math.nan, 0.0, 0.1).excess == Distance(0.1, 0.0, math.nan).excess == math.inf
    assert not Distance(math.nan, 0.0, 0.1).holds
    assert not Distance(0.1, 0.0, math.nan).holds


def test_a_change_that_float32_cannot_resolve_may_differ() -> None:
    """A master of 1 that training moves by 2⁻²³ is equal on one device in bf16 and float32, by chance."""
    quantum = 2.0**-23
    start = {"a": torch.ones(4, dtype=BF16)}
    rounded, exact, plan = result(0.0), result(2 * ULP, torch.float32), result(0.0)
    rounded.masters = exact.masters = {"a": torch.full((4,), 1 + quantum)}
    plan.masters = {"a": torch.full((4,), 1 + 2 * quantum)}
    for trained in (rounded, exact, plan):
        trained.weights = {"a": 2 * trained.weights["a"]}
    assert compare_low_precision([plan], rounded, exact, start, 3, ONE_DEVICE).holds
    plan.masters = {"a": torch.full((4,), 1 + 100 * quantum)}
    assert not compare_low_precision([plan], rounded, exact, start, 3, ONE_DEVICE).holds


def test_json_has_no_numbers_that_json_lacks() -> None:
    assert Distance(math.inf, 0.0, math.nan).to_dict() == {"plan": "inf", "rounding": 0.0, "allowed": "nan"}


# Real trainings.


def untied_gpt() -> nn.Module:
    return build(ModelConfig("gpt", layers=2, width=16, heads=2, vocab=VOCAB + 1, sequence=SEQUENCE))


def gpt_case(**changes: object) -> Case:
    return Case(untied_gpt, tokens, token_loss, adamw, steps=4, **changes)  # type: ignore[arg-type]


@pytest.mark.slow_cases(
    "data=2 sync=async staleness=1",
    "data=2 zero=1 microbatches=2",
    "pipeline=2 microbatches=2 schedule=pipedream",
)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=1 microbatches=2",
        "tensor=2",
        "pipeline=2 microbatches=2 schedule=pipedream",
        "data=2 sync=async staleness=1",
    ],
)
@pytest.mark.usefixtures("warm_contract")
def test_plans_are_within_rounding_of_one_device(plan: str) -> None:
    case = gpt_case(clip=None) if "pipedream" in plan else gpt_case()
    verdict = verify(case, plan, precision="bf16")
    assert verdict.holds, str(verdict)
    assert verdict.plan.precision == "bf16"
    assert verdict.groups["weights"].rounding > 0  # a worker alone may be equal to the bit


def step_twice(engine: Engine) -> None:
    """Masters are updated a second time by the same gradients."""
    step = engine._update.stepper.step

    def step_and_repeat(factor: Tensor, skip: Tensor) -> None:
        step(factor, skip)
        step(factor, skip)

    engine._update.stepper.step = step_and_repeat


def start_from_zero(engine: Engine) -> None:
    """Masters that are not the weights at the start."""
    engine._update.stepper._make_masters()
    engine._update.stepper._fill_masters(None)
    for master in engine._update.stepper._masters.values():
        master.data.mul_(0.5)


def never_round(engine: Engine) -> None:
    """The weights stay what they were: only masters are updated."""
    step = engine._update.stepper.step

    def step_masters_only(factor: Tensor, skip: Tensor) -> None:
        local = engine._update.stepper._local
        weights = [each.tensor.detach().clone() for each in local]
        step(factor, skip)
        for each, weight in zip(local, weights, strict=True):
            each.tensor.detach().copy_(weight)

    engine._update.stepper.step = step_masters_only


@pytest.mark.slow_cases("never_round", "step_twice")
@pytest.mark.parametrize("bug", [step_twice, start_from_zero, never_round])
def test_bugs_of_masters_are_found(bug: Callable[[Engine], None]) -> None:
    case = perceptron_case(steps=3, make_optimizer=sgd)
    verdict = verify(case, "data=2", precision="bf16", inject_bug=bug)
    assert not verdict.holds, str(verdict)


@pytest.mark.slow_cases("divide-twice")
@pytest.mark.parametrize("bug", ["divide-twice", "skip-bucket"])
def test_bugs_of_gradients_are_found(bug: str) -> None:
    verdict = verify(gpt_case(), "data=2", precision="bf16", inject_bug=bug)
    assert not verdict.holds, str(verdict)


def test_other_precisions_are_refused() -> None:
    with pytest.raises(UserError, match="--precision fp8: must be fp64, bf16 or fp16"):
        verify(perceptron_case(), "data=2", precision="fp8")  # type: ignore[call-overload]


def test_a_number_of_twice_the_size_is_never_within_rounding() -> None:
    rounded, exact = result(0.0), result(20 * ULP, torch.float32)  # a drift of 0.07
    rounded.losses = exact.losses = [4.0] * 3
    training = changed(lambda training: setattr(training, "losses", [4.0, 4.0, 8.0]))
    verdict = compare_low_precision([training], rounded, exact, START, 3, ONE_DEVICE)
    assert verdict.numbers["loss 2"].allowed == pytest.approx(0.2)
    assert not verdict.numbers["loss 2"].holds


def test_a_number_may_change_as_much_as_the_training_that_it_comes_from() -> None:
    rounded, exact = result(0.0), result(2 * ULP, torch.float32)
    rounded.losses = exact.losses = [4.0] * 3
    training = changed(lambda training: setattr(training, "losses", [4.0] * 3))
    verdict = compare_low_precision([training], rounded, exact, START, 3, ONE_DEVICE)
    drift = max(verdict.groups[kind].rounding for kind in ("master", "exp_avg"))
    assert 2.0**-8 < drift < 0.05
    assert [verdict.numbers[f"loss {step}"].allowed for step in range(3)] == [4 * 2.0**-8, *[4 * drift] * 2]


def test_further_samples_of_rounding_count_where_one_says_too_little() -> None:
    plan, rounded, exact = result(48 * ULP), result(0.0), result(ULP, torch.float32)
    allowing, refusing = (
        compare_low_precision([plan], rounded, exact, START, 3, ONE_DEVICE, disturbed=[result(0.0), other])
        for other in (result(16 * ULP), result(2 * ULP))
    )
    assert allowing.holds
    assert not refusing.groups["master"].holds
    assert not refusing.tensors["a exp_avg"].holds
    assert not refusing.numbers["loss 0"].holds


def test_a_plan_is_wrong_only_if_other_rounding_does_not_explain_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device is trained again, each time rounded differently, until the plan is within it."""
    case = perceptron_case().round_start(BF16)
    seen: list[list[TrainingResult]] = []

    class Verdict:
        def __init__(self, *, holds: bool) -> None:
            self.holds = holds

    def compare(_results: object, rounded: TrainingResult, *_: object, disturbed: object = (), **__: object):  # type: ignore[no-untyped-def]
        assert isinstance(disturbed, list | tuple)
        seen.append([rounded, *disturbed])
        return Verdict(holds=len(disturbed) == 2)

    monkeypatch.setattr(contract, "compare_low_precision", compare)
    training = dataclasses.replace(result(0.0), plan="data=2 precision=bf16", skipped=[False] * case.steps)
    assert contract.judge_low_precision(case, [training]).holds
    assert [len(each) for each in seen] == [1, 2, 3]
    rounded, first, second = ({n: w.double() for n, w in each.weights.items()} for each in seen[-1])
    for one, other in ((rounded, first), (rounded, second), (first, second)):
        gap = math.hypot(*(float((one[name] - other[name]).norm()) for name in one))
        size = math.hypot(*(float(one[name].norm()) for name in one))
        assert 0 < gap < 0.05 * size
