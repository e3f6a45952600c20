"""The comparison finds every kind of difference, and the verdict names the worst."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from echelon.plan import Plan
from echelon.verify.reference import TrainingResult
from echelon.verify.verdict import (
    FORMULA,
    LOG,
    ONE_DEVICE,
    Verdict,
    kind_scales,
    number_gaps,
    rank_gaps,
    summarize,
    tensor_gaps,
)


def result() -> TrainingResult:
    """Two weights and a buffer; one of the weights has optimizer state."""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2), "count": torch.tensor(4)}
    state = {"a": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}, "b": {}}
    return TrainingResult(weights, state, losses=[3.0, 2.0], grad_norms=[1.0, 0.5], evaluation=1.5)


NAMES = {"a", "b", "count", "a step", "a exp_avg"}


def changed(change: Callable[[TrainingResult], object]) -> TrainingResult:
    trained = result()
    change(trained)
    return trained


def set_weight(name: str, value: Tensor) -> Callable[[TrainingResult], object]:
    return lambda trained: trained.weights.__setitem__(name, value)


def set_state(key: str, value: Tensor) -> Callable[[TrainingResult], object]:
    return lambda trained: trained.optimizer["a"].__setitem__(key, value)


# A change of a training, the name that it is found under, and the difference.
CHANGES = {
    "missing weight": (lambda trained: trained.weights.pop("b"), "b", math.inf),
    "missing buffer": (lambda trained: trained.weights.pop("count"), "count", math.inf),
    "missing optimizer key": (lambda trained: trained.optimizer["a"].pop("exp_avg"), "a exp_avg", math.inf),
    "additional weight": (set_weight("c", torch.ones(1)), "c", math.inf),
    "additional optimizer key": (
        lambda trained: trained.optimizer["b"].update(step=torch.tensor(1.0)),
        "b step",
        math.inf,
    ),
    "other type of a weight": (set_weight("b", torch.ones(2).double()), "b", math.inf),
    "other type of a state": (set_state("step", torch.tensor(3)), "a step", math.inf),
    "other shape of a weight": (set_weight("a", torch.arange(6.0).view(3, 2)), "a", math.inf),
    "other shape of a state": (set_state("exp_avg", torch.ones(1, 3)), "a exp_avg", math.inf),
    "scalar instead of one element": (set_state("step", torch.tensor([3.0])), "a step", math.inf),
    "other type with the same bits": (
        set_weight("count", torch.tensor(2e-323, dtype=torch.float64)),
        "count",
        math.inf,
    ),
    "weight that is empty": (set_weight("b", torch.ones(0)), "b", math.inf),
    "one element of a weight": (set_weight("b", torch.tensor([1.0, 1.5])), "b", 0.5),
    "negative difference": (set_weight("b", torch.tensor([1.0, 0.25])), "b", 0.75),
    "value of a buffer": (set_weight("count", torch.tensor(6)), "count", 2.0),
    "one element of a state": (
        set_state("exp_avg", torch.tensor([[1.0, 1, 1], [1, 1, 3]])),
        "a exp_avg",
        2.0,
    ),
    "NaN in a weight": (set_weight("b", torch.tensor([1.0, math.nan])), "b", math.nan),
    "NaN in a state": (set_state("step", torch.tensor(math.nan)), "a step", math.nan),
    "infinite weight": (set_weight("b", torch.tensor([1.0, math.inf])), "b", math.inf),
}
each_change = pytest.mark.parametrize(
    ("change", "name", "gap"), [pytest.param(*row, id=key) for key, row in CHANGES.items()]
)


def test_equal_results_have_no_gaps_and_nothing_is_left_out() -> None:
    gaps = tensor_gaps(result(), result())
    assert gaps == dict.fromkeys(NAMES, 0.0)
    assert number_gaps(result(), result(), ONE_DEVICE) == {"evaluation": 0.0, "loss": 0.0, "grad_norm": 0.0}
    assert rank_gaps([result(), summarize(result()), summarize(result())], ONE_DEVICE) == {}


@each_change
def test_a_difference_from_the_reference_is_found_on_either_side(
    change: Callable[[TrainingResult], object], name: str, gap: float
) -> None:
    spoilt = changed(change)
    for gaps in (tensor_gaps(spoilt, result()), tensor_gaps(result(), spoilt)):
        assert gaps.keys() == NAMES | {name}
        assert gaps[name] == pytest.approx(gap, nan_ok=True)
        assert all(other == 0.0 for key, other in gaps.items() if key != name)


@each_change
def test_a_difference_of_another_rank_is_found_and_the_rank_is_named(
    change: Callable[[TrainingResult], object], name: str, gap: float
) -> None:
    results = [result(), summarize(result()), summarize(changed(change))]
    assert rank_gaps(results, ONE_DEVICE) == {f"{name} on rank 2": math.inf}


def test_the_same_nan_on_both_sides_is_no_equality() -> None:
    spoilt = changed(set_weight("b", torch.tensor([1.0, math.nan])))
    assert math.isnan(tensor_gaps(spoilt, spoilt)["b"])


def test_complex_weights_are_compared() -> None:
    first, second = (
        changed(set_weight("b", torch.tensor([1 + 1j]))),
        changed(set_weight("b", torch.tensor([1 + 3j]))),
    )
    assert tensor_gaps(first, second)["b"] == 2.0


NUMBERS = {
    "loss": lambda trained: trained.losses.__setitem__(1, 2.5),
    "grad_norm": lambda trained: trained.grad_norms.__setitem__(0, 1.5),
    "evaluation": lambda trained: setattr(trained, "evaluation", 2.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_differ_are_found_and_named(name: str) -> None:
    spoilt = changed(NUMBERS[name])
    for gaps in (number_gaps(spoilt, result(), ONE_DEVICE), number_gaps(result(), spoilt, ONE_DEVICE)):
        assert {key: gap for key, gap in gaps.items() if gap} == {name: 0.5}
    assert rank_gaps([result(), summarize(spoilt)], ONE_DEVICE) == {"loss or grad_norm on rank 1": math.inf}
    assert rank_gaps([result(), summarize(spoilt)], FORMULA) == {"loss or grad_norm on rank 1": math.inf}


def test_numbers_of_a_step_too_few_are_found() -> None:
    short = changed(lambda trained: trained.losses.pop())
    assert number_gaps(short, result(), ONE_DEVICE)["loss"] == math.inf


def test_only_an_asynchronous_worker_has_losses_of_its_own() -> None:
    spoilt = summarize(changed(NUMBERS["loss"]))
    assert rank_gaps([result(), spoilt], LOG) == {}
    assert number_gaps(result(), result(), LOG).keys() == {"evaluation"}
    assert number_gaps(result(), result(), FORMULA).keys() == {"evaluation", "loss"}


# The verdict.


def verdict_of(tensors: dict[str, float], numbers: dict[str, float] | None = None) -> Verdict:
    return Verdict(Plan(data=2), 20, tensors, numbers or {"loss": 0.0})


def test_nan_is_never_equal() -> None:
    assert not verdict_of({"a": math.nan, "b": 1e-3}).equal
    assert verdict_of({"a": math.nan, "b": 1e-3}).worst[0] == "a"
    assert not verdict_of({"a": 0.0}, {"loss": math.nan}).equal
    assert verdict_of({"a": math.nan, "b": 1e-3}).num_wrong == 2


def test_the_worst_is_that_of_everything_that_was_compared() -> None:
    """A gradient norm off by 0.67 was once reported as 3.7e-09 in `exp_avg`."""
    verdict = verdict_of({"a": 1e-12, "a exp_avg": 3.7e-9}, {"loss": 1e-12, "grad_norm": 0.67})
    assert verdict.worst == ("grad_norm", 0.67)
    assert verdict.worst_tensor == ("a exp_avg", 3.7e-9)
    assert verdict.to_dict()["worst"] == {"name": "grad_norm", "error": 0.67, "relative": None}
    assert verdict.to_dict()["worst_tensor"] == {"name": "a exp_avg", "error": 3.7e-9, "relative": None}
    assert (
        "worst is grad_norm, by 6.7e-01, allowed 1e-09; worst tensor is a exp_avg, by 3.7e-09; 2 of 4"
        in str(verdict)
    )


def test_the_worst_of_each_kind_and_how_large_it_is_among_its_kind() -> None:
    tensors = {"a": 1e-12, "b": 3e-12, "a exp_avg": 2e-9, "a exp_avg on rank 1": math.inf}
    numbers = {"loss": 0.5, "grad_norm": math.nan, "loss or grad_norm on rank 1": math.inf}
    scales = kind_scales(result(), ONE_DEVICE)
    assert scales == {
        "weights": 5.0,
        "step": 3.0,
        "exp_avg": 1.0,
        "loss": 3.0,
        "grad_norm": 1.0,
        "evaluation": 1.5,
    }
    verdict = Verdict(Plan(data=2), 20, tensors, numbers, scales=scales)
    assert verdict.to_dict()["worst_by_kind"] == {
        "weights": {"name": "b", "error": 3e-12, "relative": 3e-12 / 5},
        "exp_avg": {"name": "a exp_avg on rank 1", "error": "inf", "relative": "inf"},
        "loss": {"name": "loss", "error": 0.5, "relative": 0.5 / 3},
        "grad_norm": {"name": "grad_norm", "error": "nan", "relative": "nan"},
        "loss or grad_norm": {"name": "loss or grad_norm on rank 1", "error": "inf", "relative": None},
    }
    lone = Verdict(Plan(data=2), 20, {"a": 0.0}, {"grad_norm": 0.25}, scales=scales)
    assert "worst is grad_norm, by 2.5e-01 (2.5e-01 of the largest grad_norm), allowed 1e-09" in str(lone)


def test_the_scale_of_values_that_are_no_real_numbers() -> None:
    odd = changed(set_weight("b", torch.tensor([3 + 4j])))
    assert kind_scales(odd, ONE_DEVICE)["weights"] == 5.0
    infinite = changed(set_weight("b", torch.tensor([math.inf])))
    assert kind_scales(infinite, ONE_DEVICE)["weights"] == 5.0
    flags = changed(lambda trained: trained.weights.update(a=torch.tensor([True]), count=torch.empty(0)))
    assert kind_scales(flags, ONE_DEVICE)["weights"] == 1.0


def test_a_wrong_loss_alone_is_named() -> None:
    assert verdict_of({"a": 1e-12}, {"loss": 0.5, "grad_norm": 0.0}).worst == ("loss", 0.5)
    assert verdict_of({"a": 1e-12}, {"loss": 1e-12}).equal
    assert verdict_of({"a": 1e-12}, {"loss": 2e-12}).worst == ("loss", 2e-12)


def test_the_tolerance_is_a_bound_on_every_value() -> None:
    assert verdict_of({"a": 1e-9}).equal
    assert not verdict_of({"a": 1.1e-9}).equal
    assert not verdict_of({"a": 0.0}, {"loss": 1.1e-9}).equal


def test_a_verdict_of_no_tensors_is_refused() -> None:
    with pytest.raises(AssertionError, match="no tensor was compared"):
        verdict_of({})
    with pytest.raises(AssertionError, match="no number was compared"):
        Verdict(Plan(data=2), 20, {"a": 0.0}, {})


def test_json_has_no_numbers_that_json_lacks() -> None:
    assert verdict_of({"a": math.inf}).to_dict()["worst"] == {"name": "a", "error": "inf", "relative": None}
    assert verdict_of({"a": math.nan}).to_dict()["worst"] == {"name": "a", "error": "nan", "relative": None}
