"""The contract in fp16: plans scale losses and skip overflows as one device, PipeDream as its formula."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echelon.engine import Engine
from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.program import Op
from echelon.program.build import continuous_steps
from echelon.update.optim import SM3, Adafactor
from echelon.update.precision.loss_scaling import DynamicScale
from echelon.verify import Case, LowPrecisionVerdict, verify
from echelon.verify.reference import train_on_one_device
from echelon.verify.replay import _made_in, train_by_formula
from tests.cases import adamw, perceptron_case, sgd
from tests.contract_models import token_loss, tokens
from tests.overflows import overflow_case
from tests.verify.test_low_precision import untied_gpt

WarmRanks = Callable[[int], Ranks]


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return Adafactor(parameters, lr=1e-2)


def sm3(parameters: Any) -> torch.optim.Optimizer:
    return SM3(parameters, lr=1e-2)


PIPEDREAM = "pipeline=2 microbatches=2 schedule=pipedream"


def check(case: Case, plan: str, ranks: Ranks) -> LowPrecisionVerdict:
    verdict = verify(case, plan, precision="fp16", ranks=ranks)
    assert verdict.holds, str(verdict)
    assert verdict.plan.precision == "fp16"
    return verdict


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=2 sync=async staleness=1")
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3 microbatches=2",
        "tensor=2 sequence=true",
        "data=2 sync=async staleness=1",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "data=2 zero=1 precision=fp16 gradients=same",
                "data=2 sync=async staleness=0 precision=fp16 gradients=same",
                "data=2 zero=1 recompute=full",
                "pipeline=2 microbatches=2 schedule=pipedream recompute=sqrt",
                "context=2",
                "context=2 attention=all-to-all",
                "pipeline=2 microbatches=2 schedule=zero-bubble",
                PIPEDREAM,
            )
        ),
    ],
)
def test_plans_are_within_rounding_of_one_device(plan: str, warm_ranks: WarmRanks) -> None:
    options = {"loss_scale": 1024.0}  # so that nothing is close to an overflow
    clip = None if "pipedream" in plan else 1.0
    case = Case(untied_gpt, tokens, token_loss, adamw, steps=4, clip=clip, options=options)
    assert check(case, plan, warm_ranks(2)).groups["weights"].rounding > 0


def test_fp16_rounds_less_than_bf16() -> None:
    """What is allowed follows from the type: 2**-11 of a number, and not 2**-8."""
    case = perceptron_case(steps=3, make_optimizer=sgd)
    low, lower = (verify(case, "microbatches=2", precision=each) for each in ("fp16", "bf16"))
    assert low.holds, str(low)
    assert 4 * 2.0**-11 < low.groups["weights"].allowed < lower.groups["weights"].allowed / 4
    assert low.numbers["loss 0"].allowed < lower.numbers["loss 0"].allowed
    assert "within rounding of one device in fp16 after 3 steps" in str(low)


DYNAMIC = {"loss_scale": DynamicScale(start=2.0**14, factor=4.0, interval=2)}


STATIC = pytest.param({"loss_scale": 1024.0}, marks=pytest.mark.slow)


@pytest.mark.quick_cases(1)
@pytest.mark.slow_cases("data=2 sync=async staleness=0-dynamic", "data=2 sync=parameter-server-dynamic")
@pytest.mark.parametrize("options", [STATIC, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=2 microbatches=2",
        "data=2 sync=parameter-server",
        "data=2 sync=async staleness=0",
        "pipeline=2 microbatches=4",
    ],
)
def test_steps_that_overflow_are_skipped_as_on_one_device(
    plan: str, options: dict[str, object], warm_ranks: WarmRanks
) -> None:
    """One sample of one replica, and one layer of one stage, overflow."""
    case = overflow_case(0, "rows", options=options)
    check(case, plan, warm_ranks(2))
    reference = train_on_one_device(case, torch.float16)
    assert reference.skipped == [False, True, True, False, False]


PLACES = [(0, "rows"), (3, "rows"), (3, "weight")]
SCHEDULES = [PIPEDREAM, PIPEDREAM + "-vertical", PIPEDREAM + "-2bw"]
# Each place and each schedule once; the others are slow tests.
SOME = list(zip(PLACES, SCHEDULES, strict=True))
OTHERS = [(place, plan) for place in PLACES for plan in SCHEDULES if (place, plan) not in SOME]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("place", "plan"), [*SOME, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)]
)
def test_a_stage_that_overflows_skips_its_own_update_as_the_formula_says(
    place: tuple[int, str], plan: str, warm_ranks: WarmRanks
) -> None:
    case = overflow_case(place[0], place[1], options=DYNAMIC, sample=2)  # type: ignore[arg-type]
    check(case, plan, warm_ranks(2))
    reference = train_by_formula(case, Plan.parse(plan), [3], torch.float16)
    stages = {stage for _, stage in reference.overflows}
    assert stages == {(0, "rows"): {0}, (3, "rows"): {0, 1}, (3, "weight"): {1}}[place]  # type: ignore[index]
    assert any(reference.skipped)


def test_workers_skip_their_own_steps_and_their_log_tells(warm_ranks: WarmRanks) -> None:
    check(overflow_case(0, "rows", options=DYNAMIC), "data=2 sync=async staleness=2", warm_ranks(2))


@pytest.mark.slow
@pytest.mark.parametrize("make", [adafactor, sm3])
@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2 zero=3 microbatches=2"])
def test_optimizers_that_ranks_call_together_skip_together(
    plan: str, make: Callable[..., torch.optim.Optimizer], warm_ranks: WarmRanks
) -> None:
    check(overflow_case(0, "rows", make_optimizer=make), plan, warm_ranks(2))


def update_anyway(engine: Engine) -> None:
    """An overflow is no reason to skip."""
    step = engine._update.stepper.step
    engine._update.stepper.step = lambda factor, _=False: step(factor, False)


def keep_the_scale(engine: Engine) -> None:
    """The update is of gradients of the scaled loss."""
    norm = engine._update.norm

    def scaled(tally: torch.Tensor, gates: Any, **options: Any) -> None:
        tally[2] *= float(engine._update.loss_scale)
        norm(tally, gates, **options)

    engine._update.norm = scaled  # type: ignore[method-assign]


def skip_every_step(engine: Engine) -> None:
    step = engine._update.stepper.step
    engine._update.stepper.step = lambda factor, _=False: step(factor, True)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("bug", [update_anyway, keep_the_scale, skip_every_step])
def test_bugs_of_loss_scaling_are_found(bug: Callable[[Engine], None], warm_ranks: WarmRanks) -> None:
    case = overflow_case(0, "rows")
    verdict = verify(case, "data=2", precision="fp16", inject_bug=bug, ranks=warm_ranks(2))
    assert not verdict.holds, str(verdict)


def never_halve(engine: Engine) -> None:
    scaling = engine._update.loss_scaling
    assert scaling is not None
    scaling.after_step = lambda **_: None  # type: ignore[method-assign]


def test_a_scale_that_ignores_overflows_is_found(warm_ranks: WarmRanks) -> None:
    """Updates are those of one device, since a power of two rounds nothing: only the scale itself tells."""
    case = overflow_case(0, "rows", options=DYNAMIC)
    verdict = verify(case, "data=2", precision="fp16", inject_bug=never_halve, ranks=warm_ranks(2))
    wrong = {name for name, distance in verdict.distances.items() if not distance.holds}
    assert wrong == {"loss_scale 2", "loss_scale 3", "loss_scale 4"}, str(verdict)


def test_a_plan_of_fp16_is_proven_in_float64_too(warm_ranks: WarmRanks) -> None:
    verdict = verify(overflow_case(0, "rows", steps=()), "data=2 precision=fp16", ranks=warm_ranks(2))
    assert verdict.equal, str(verdict)
    assert verdict.plan.precision == "fp16"


def test_gradients_close_to_the_largest_number_are_skipped_as_the_plan_did() -> None:
    """A plan computes parts of a gradient, and adds them in float32: its sum may be more than fp16 holds."""
    case = perceptron_case(steps=2, make_optimizer=sgd, options={"loss_scale": 2.0**20})
    alone = train_on_one_device(case, torch.float16)
    assert alone.skipped == [True, True]
    followed = train_on_one_device(case, torch.float16, followed=[False, True])
    assert followed.skipped == [False, True]
    far = perceptron_case(steps=2, make_optimizer=sgd, options={"loss_scale": 2.0**30})
    assert train_on_one_device(far, torch.float16, followed=[False, False]).skipped == [True, True]
    low = perceptron_case(steps=2, make_optimizer=sgd, options={"loss_scale": 64.0})
    assert train_on_one_device(low, torch.float16, followed=[True, True]).skipped == [False, False]


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-vertical", "pipedream-2bw"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (3, 3), (4, 5)])
def test_the_formula_knows_which_updates_a_step_makes(schedule: str, stages: int, microbatches: int) -> None:
    if schedule == "pipedream-2bw" and microbatches < stages:
        microbatches = stages
    plan = Plan(pipeline=stages, microbatches=microbatches, schedule=schedule)
    program_of = continuous_steps(plan)
    made = [0] * stages
    for step in range(6):
        program = program_of(step * microbatches, None)
        expected = set()
        for stage, instructions in enumerate(program.ranks):
            count = sum(instruction.op is Op.UPDATE for instruction in instructions)
            expected |= {(made[stage] + number, stage) for number in range(count)}
            made[stage] += count
        assert _made_in(plan, step) == expected
