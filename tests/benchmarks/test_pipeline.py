"""The bench of pipelines: its rows, that equals are compared, and the two bubbles."""

import json
from collections.abc import Callable
from contextlib import nullcontext

import pytest
from benchmarks.pipeline import bubbles, check_equal, plan_of
from torch.optim import AdamW

from benchmarks import pipeline, run, stages
from echelon.launching import Ranks
from echelon.models import ModelConfig
from echelon.plan import Plan
from echelon.program import Costs, build, simulate

TORCH = {
    "gpipe": "torch ScheduleGPipe",
    "1f1b": "torch Schedule1F1B",
    "interleaved": "torch ScheduleInterleaved1F1B",
}
HONEST = pipeline.measure
BASELINES = TORCH | {"naive": "echelon, 1f1b", "zero-bubble": "echelon, 1f1b"}


@pytest.fixture(autouse=True)
def _warm(warm_ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "measuring_ranks", lambda count: nullcontext(warm_ranks(count)))


@pytest.mark.slow
def test_rows_compare_each_schedule_with_its_peer_and_have_two_bubbles() -> None:
    result = json.loads(json.dumps(run("pipeline", quick=True).to_dict()))

    assert [(row["case"], row["contender"], row["baseline"]) for row in result["rows"]] == [
        (case, contender, baseline)
        for case, baseline in BASELINES.items()
        for contender in (baseline, "echelon")
    ] + [("backward of 3 layers of 192, 64 tokens", way, "in one") for way in ("in one", "in halves")]
    assert result["settings"]["microbatches"] == 8
    assert result["settings"]["parameters"] == pipeline._SMALL.num_parameters
    for row in result["rows"]:
        extras = row["extras"]
        if row["contender"] != "echelon":
            assert extras == {}
            continue
        assert 0 < extras["bubble_measured"] < 1
        assert 0 < extras["bubble_simulated"] < 1
        points = 100 * (extras["bubble_measured"] - extras["bubble_simulated"])
        assert extras["bubble_difference_points"] == pytest.approx(points)
        assert extras["transfer_seconds"] > 0


def measure_planted(plan: Plan, config: ModelConfig, rounds: int) -> pipeline.Measured:
    """Runs in a rank: torch's side learns at twice the rate."""
    honest = pipeline.torch_step

    def planted(config: ModelConfig, plan: Plan) -> stages.Step:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stages, "fused_adamw", lambda parameters: AdamW(parameters, lr=6e-4))
            return honest(config, plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "torch_step", planted)
        return HONEST(plan, config, rounds)


@pytest.mark.slow
def test_contenders_that_train_differently_give_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "measure", measure_planted)
    with pytest.raises(RuntimeError, match="gpipe: the losses of echelon and torch ScheduleGPipe differ"):
        run("pipeline", quick=True)


def test_a_loss_that_nobody_knows_is_no_equal() -> None:
    equal = {"echelon": [1.0] * 4, TORCH["gpipe"]: [1.0001] * 4}
    check_equal(plan_of("gpipe"), [{"echelon": [1.0] * 4, TORCH["gpipe"]: [None] * 4}, equal])
    with pytest.raises(RuntimeError, match="differ: "):
        check_equal(plan_of("gpipe"), [equal, {"echelon": [1.0] * 4, TORCH["gpipe"]: [None] * 4}])


def test_bubbles_of_literal_steps() -> None:
    """Costs that do not vary explain the measured bubble; one slow step of three is not the median."""
    program = build("1f1b", (1, 1), 2)
    step = list(simulate(program, Costs(forward=1.0, backward=2.0)).spans())
    late = [
        span._replace(start=span.start + 6, end=span.end + 6) if span.rank == 1 else span for span in step
    ]

    assert bubbles([step, late, step], program) == {
        "bubble_measured": pytest.approx(1 / 3),
        "bubble_simulated": pytest.approx(1 / 3),
        "bubble_difference_points": pytest.approx(0, abs=1e-9),
        "transfer_seconds": 0.0,
    }
    assert bubbles([late], program)["bubble_difference_points"] > 10
