"""offload=optimizer and delay=1 on real ranks, equal to one device; the bytes of each rank."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.update.offload.host_twins import HostTwins
from echelon.update.optim import SM3, Adafactor
from echelon.verify import assert_equal, verify
from tests.cases import adamw, mean_loss, perceptron_case, sgd, vectors
from tests.contract_models import CASES

pytestmark = pytest.mark.usefixtures("warm_contract")

ZEROS = ("", "zero=1", "zero=2", "zero=3")
UPDATES = ("", "update=backward", "delay=1")


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return Adafactor(parameters)


def sm3(parameters: Any) -> torch.optim.Optimizer:
    return SM3(parameters, lr=1e-2)


def check(plan: str, make: Callable[[Any], Any] = adamw, model: str = "") -> None:
    clip = None if "update=" in plan else 1.0
    case = perceptron_case(make_optimizer=make, clip=clip, steps=6)
    if model:
        case = dataclasses.replace(CASES[model], make_optimizer=make, clip=clip, steps=5)
    assert_equal(case, f"offload=optimizer {plan}")


@pytest.mark.parametrize(
    "plan", ["data=2 zero=1 delay=1", "data=2 zero=3 update=backward", "data=2 microbatches=2"]
)
def test_replicas_are_equal(plan: str) -> None:
    check(plan)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("plan", ["pipeline=2 microbatches=2 delay=1", "tensor=2 sequence=true"])
def test_parts_of_a_model_are_equal(plan: str) -> None:
    check(plan, model="gpt")


def test_weights_without_a_gradient_are_not_changed_by_hand() -> None:
    # The update of their unit gave them another version, as a user's hand does.
    check("data=2 zero=1 update=backward", model="twice")


def test_ranks_add_up_sums_on_the_host() -> None:
    check("data=2 zero=2", adafactor)


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "update"), list(product(ZEROS, UPDATES)))
def test_every_level_with_every_update(zero: str, update: str) -> None:
    check(f"data=2 {zero} {update}")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [sgd, adafactor, sm3])
@pytest.mark.parametrize("plan", ["data=2 zero=3 update=backward", "data=2 zero=1 delay=1"])
def test_other_optimizers(plan: str, optimizer: Callable[[Any], Any]) -> None:
    check(plan, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["", "delay=1"])
@pytest.mark.parametrize(
    "plan",
    [
        "pipeline=2 microbatches=2",
        "pipeline=2 microbatches=2 schedule=zero-bubble",
        "pipeline=2 microbatches=2 schedule=interleaved chunks=2",
        "tensor=2",
        "context=2",
        "recompute=full",
        "data=4 zero=3 shard=2",
    ],
)
def test_it_goes_with_other_strategies(plan: str, update: str) -> None:
    check(f"{plan} {update}", model="gpt")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["data=2 zero=2", "data=2 zero=3 delay=1", "data=2 gradients=same"])
def test_it_stays_within_rounding(plan: str, precision: Literal["bf16", "fp16"]) -> None:
    case = perceptron_case(steps=6)
    verdict = verify(case, f"precision={precision} offload=optimizer {plan}", precision=precision)
    assert verdict.holds, str(verdict)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2 zero=3 update=backward", "data=2 delay=1"])
def test_weights_without_masters_stay_within_rounding(plan: str) -> None:
    case = perceptron_case(clip=None, steps=6)
    verdict = verify(case, f"precision=bf16 masters=false offload=optimizer {plan}", precision="bf16")
    assert verdict.holds, str(verdict)


def _bytes(plan: str) -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 5))
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss) as engine:
        for step in range(2):
            engine.step(engine.local(vectors(step)))
        engine.synchronize()
        memory, ledger = engine.memory(), engine.ledger
        before = ledger.total("host", "store").sent, ledger.total("host", "fetch").received
        engine.step(engine.local(vectors(2)))
        engine.synchronize()
        after = ledger.total("host", "store").sent, ledger.total("host", "fetch").received
        numel = sum(each.tensor.numel() for each in engine._local.local_parameters())
        return {
            "device": memory.now["optimizer"],
            "host": memory.host["optimizer"],
            "down": after[0] - before[0],
            "up": after[1] - before[1],
            "numel": numel,
        }


def test_a_rank_moves_and_keeps_its_part(warm_ranks: Callable[[int], Ranks]) -> None:
    for rank in warm_ranks(2).run(_bytes, "data=2 zero=2 offload=optimizer"):
        assert rank["device"] == 0
        assert 2 * 4 * rank["numel"] <= rank["host"] < 2.2 * 4 * rank["numel"]
        assert rank["down"] == rank["up"] == 4 * rank["numel"]


def _losses_around_a_refused_step(plan: str, refused: int, *, is_left_out: bool = False) -> list[float]:
    """The losses of six steps but for the one that is refused, or is left out; then one of an evaluation. A
    late update is on time for the step after it."""
    torch.manual_seed(0)
    sizes = (6, 16, 16, 5)
    layers = [each for a, b in pairwise(sizes) for each in (nn.Linear(a, b), nn.Tanh())]
    losses = []
    with echelon.parallelize(
        nn.Sequential(*layers), f"precision=fp64 {plan}", optimizer=adamw, loss=counting_loss, smallest_unit=1
    ) as engine:
        for step in range(6):
            inputs, targets = vectors(step)
            if step == refused and is_left_out:
                engine.synchronize()
            elif step == refused:
                with pytest.raises(UserError, match="no replica had a sample"):
                    engine.step(engine.local((inputs, torch.full_like(targets, -100))))
            else:
                losses.append(engine.step(engine.local((inputs, targets))).loss)
        losses.append(engine.evaluate(engine.local(vectors(6))).loss)
    return losses


def counting_loss(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.cross_entropy(output, targets, reduction="sum"), (targets >= 0).sum()


def _check_a_refused_step(plan: str, warm_ranks: Callable[[int], Ranks], *, refused: int = 2) -> None:
    reference = "offload=optimizer delay=1" if "delay=1" in plan else "data=1"
    expected = _losses_around_a_refused_step(reference, refused, is_left_out=True)
    for losses in warm_ranks(2).run(_losses_around_a_refused_step, plan, refused):
        assert losses == pytest.approx(expected, rel=1e-9), plan


@pytest.mark.parametrize("update", ["", "delay=1", "update=backward"])
def test_a_refused_step_changes_nothing(update: str, warm_ranks: Callable[[int], Ranks]) -> None:
    _check_a_refused_step(f"data=2 zero=1 offload=optimizer {update}", warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("refused", [0, 2])
@pytest.mark.parametrize("offload", ["optimizer", "optimizer,parameters"])
@pytest.mark.parametrize(("zero", "update"), list(product(ZEROS, UPDATES)))
def test_a_refused_step_changes_nothing_at_any_level(
    zero: str, update: str, offload: str, refused: int, warm_ranks: Callable[[int], Ranks]
) -> None:
    _check_a_refused_step(f"data=2 {zero} offload={offload} {update}", warm_ranks, refused=refused)


def _change_a_weight(plan: str) -> list[str]:
    """Which calls raise, when all ranks change a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    raised = []
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss, smallest_unit=1) as engine:
        for name in ("step", "evaluate", "step"):
            for step in range(2):
                engine.step(engine.local(vectors(step)))
            with torch.no_grad():
                model[-1].bias.add_(0.1)  # type: ignore[operator]
            try:
                getattr(engine, name)(engine.local(vectors(2)))
            except UserError as error:
                raised.append(f"{name}: {error}")
        engine.evaluate(engine.local(vectors(2)))
    return raised


@pytest.mark.parametrize("plan", ["data=2 zero=1", "data=2"])
def test_a_change_that_is_lost_is_an_error_on_every_rank(
    plan: str, warm_ranks: Callable[[int], Ranks]
) -> None:
    for raised in warm_ranks(2).run(_change_a_weight, f"{plan} offload=optimizer delay=1"):
        assert [each.split(":")[0] for each in raised] == ["step", "evaluate", "step"]
        assert all("a weight was changed between two steps" in each for each in raised)


def _change_in_a_pipeline(*, changes: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    plan, losses = "pipeline=2 microbatches=2 offload=optimizer delay=1", []
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss, smallest_unit=1) as engine:
        for step in range(4):
            losses.append(engine.step(engine.local(vectors(step))).loss)
            with torch.no_grad():
                if changes and engine.mesh.position.pipeline == 1:
                    with pytest.raises(UserError, match=r"4\.bias: with pipeline=2 this rank has"):
                        model[-1].bias.add_(0.1)  # type: ignore[operator]
    return losses


def test_a_change_in_a_pipeline_is_refused_and_changes_nothing(warm_ranks: Callable[[int], Ranks]) -> None:
    expected = warm_ranks(2).run(partial(_change_in_a_pipeline, changes=False))
    assert warm_ranks(2).run(partial(_change_in_a_pipeline, changes=True)) == expected


def _losses_with_looks(plan: str, *, looks: bool = True, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5))
    with echelon.parallelize(
        model, f"precision=fp64 {plan}", optimizer=adamw, loss=mean_loss, smallest_unit=1, **options
    ) as engine:
        losses = []
        for step in range(6):
            losses.append(engine.step(engine.local(vectors(step))).loss)
            if looks and step % 3:
                engine.evaluate(engine.local(vectors(step)))
                engine.full_state_dict()
        return [*losses, engine.evaluate(engine.local(vectors(6))).loss]


def _check_looks(plan: str, warm_ranks: Callable[[int], Ranks], **options: Any) -> None:
    expected = _losses_with_looks("offload=optimizer delay=1", looks=False)
    for losses in warm_ranks(2).run(partial(_losses_with_looks, **options), f"{plan} delay=1"):
        assert losses == pytest.approx(expected, rel=1e-9), plan


def test_a_look_changes_no_training(warm_ranks: Callable[[int], Ranks]) -> None:
    _check_looks("data=2 zero=1 offload=optimizer", warm_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*(f"data=2 {zero}" for zero in ZEROS), "pipeline=2 microbatches=2"])
@pytest.mark.parametrize(
    ("offload", "options"),
    [("optimizer", {}), ("optimizer,parameters", {}), ("optimizer,parameters", {"resident_bytes": 2000})],
)
def test_a_look_changes_no_training_at_any_level(
    plan: str, offload: str, options: dict[str, int], warm_ranks: Callable[[int], Ranks]
) -> None:
    _check_looks(f"{plan} offload={offload}", warm_ranks, **options)


def _reads_after_a_failure(plan: str) -> list[str]:
    """What reads of weights raise after an update has failed on every rank."""
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))
    engine = echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss)
    engine.step(engine.local(vectors(0)))
    engine.synchronize()

    def fail(*_: Any) -> None:
        raise RuntimeError("no more memory")

    raised = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostTwins, "update", fail)
        with pytest.raises(UserError, match="no more memory"):
            engine.step(engine.local(vectors(1)))
    for parameter in model.parameters():
        try:
            parameter.sum()
        except UserError as error:
            raised.append(str(error))
    with contextlib.suppress(UserError):
        engine.close()
    return raised


def test_nobody_reads_a_weight_after_a_failure(warm_ranks: Callable[[int], Ranks]) -> None:
    for raised in warm_ranks(2).run(_reads_after_a_failure, "data=2 zero=1 offload=optimizer"):
        assert len(raised) == 4
        assert all("no more memory" in each for each in raised)
