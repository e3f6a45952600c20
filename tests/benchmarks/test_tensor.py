"""The bench of split layers: its rows, and that equals are compared."""

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from benchmarks.tensor import Measured, check_equal, differing, measure

from benchmarks import layers, run, tensor
from echelon.launching import Ranks
from echelon.models import ModelConfig
from echelon.plan import Plan

HONEST = tensor.measure
PLANS = ("tensor=2", "tensor=2 sequence=true")


@pytest.fixture(autouse=True)
def _warm(warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "measuring_ranks", lambda count: nullcontext(warm_ranks(count)))


@pytest.mark.slow
def test_rows_compare_each_split_with_torch_and_count_what_is_sent() -> None:
    result = json.loads(json.dumps(run("tensor", quick=True).to_dict()))

    assert [(row["case"], row["contender"], row["baseline"]) for row in result["rows"]] == [
        (f"{family}, {plan}", contender, "torch DTensor")
        for family in ("gpt", "llama")
        for plan in PLANS
        for contender in ("torch DTensor", "echelon")
    ]
    assert [model["family"] for model in result["settings"]["models"]] == ["gpt", "llama"]
    stream = 8 * 16 * 32 * 4  # bytes of the hidden states: samples, sequence, width
    for row in result["rows"]:
        extras = row["extras"]
        if row["contender"] != "echelon":
            assert extras == {}
            continue
        if row["case"].endswith("sequence=true"):
            # Into and out of attention and feed-forward, and once the gradients of norms: two sums.
            assert extras["collectives_per_layer_count"] == 4 * 2 + 2
            assert 4 * stream < extras["sent_per_layer_bytes"] < 4.1 * stream
        else:
            assert extras == {"collectives_per_layer_count": 4, "sent_per_layer_bytes": 4 * stream}


@pytest.mark.slow_cases("tensor=2 sequence=true-gpt", "tensor=2 sequence=true-llama", "tensor=2-gpt")
@pytest.mark.parametrize("config", tensor._SMALL, ids=lambda config: config.family)
@pytest.mark.parametrize("plan", PLANS)
def test_torch_does_the_same_training(
    plan: str, config: ModelConfig, warm_ranks: Callable[[int], Ranks]
) -> None:
    measured = warm_ranks(2).run(measure, Plan.parse(plan), config, 2)

    for rank in measured:
        assert max(rank.differences.values()) < 1e-5
        assert rank.losses["echelon"] == pytest.approx(rank.losses["torch DTensor"], rel=1e-5)
        assert rank.losses["echelon"] == sorted(rank.losses["echelon"], reverse=True)
    assert measured[0].differences.keys() == dict(layers._blocks(config).named_parameters()).keys()


def measure_planted(plan: Plan, config: ModelConfig, rounds: int) -> Measured:
    """Runs in a rank: echelon does not sum the gradients that ranks have parts of."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "sum_within_stage", lambda _: None)
        return HONEST(plan, config, rounds)


def test_contenders_that_train_differently_give_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "measure", measure_planted)
    with pytest.raises(
        RuntimeError, match=r"gpt, tensor=2 sequence=true: the gradients of .* differ: .*(norm|bias).* by "
    ):
        run("tensor", quick=True)


def measured_rank(
    echelon_losses: list[float], torch_losses: list[float], difference: float = 0.0
) -> Measured:
    return Measured(
        {}, {"echelon": echelon_losses, "torch DTensor": torch_losses}, {"0.weight": difference}, 0, 0
    )


def test_losses_of_parts_are_summed_and_others_are_not() -> None:
    parts = [measured_rank([1.0], [3.0]), measured_rank([4.0], [2.0])]
    check_equal("case", parts, in_parts=True)
    with pytest.raises(RuntimeError, match=r"case: the losses of .* differ: \[1.0\], \[3.0\]"):
        check_equal("case", parts, in_parts=False)


@pytest.mark.parametrize("difference", [1e-3, float("nan")])
def test_gradients_that_differ_are_refused(difference: float) -> None:
    with pytest.raises(RuntimeError, match=r"differ: 0\.weight by"):
        check_equal(
            "case", [measured_rank([1.0], [1.0]), measured_rank([1.0], [1.0], difference)], in_parts=False
        )


def test_a_difference_is_of_a_gradients_size_but_of_nothing_smaller_than_a_part_of_the_largest() -> None:
    large, small = torch.tensor([3.0, 4.0]), torch.tensor([1e-6])
    relative = differing({"large": large * 1.1, "small": small * 3}, {"large": large, "small": small})
    assert relative == pytest.approx({"large": 0.1, "small": 2e-6 / 0.05}, rel=1e-3)
