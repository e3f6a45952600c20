"""Averages of weights: those of torch's AveragedModel under every plan; shown and hidden; in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from echelon.launching import Ranks
from echelon.plan import Plan
from echelon.state.ownership import AVERAGE, MASTER, VALUE
from echelon.update.averaging import average_bytes, average_dtype, move, move_on_device
from echelon.update.synchronous_update import SynchronousUpdate
from tests.cases import sgd
from tests.engine.test_deferred import deferring
from tests.reads import no_reads
from tests.update.averaged_training import (
    DECAY,
    STEPS,
    State,
    add,
    gap,
    layers,
    make_engine,
    refusal,
    same,
    train_on_rank,
    train_plain,
    vectors,
)

Warm = Callable[[int], Ranks]
TOLERANCE = 1e-12
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def plain() -> tuple[State, list[float]]:
    return train_plain()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "plan",
    [
        "data=2 zero=3",
        "tensor=2",
        "pipeline=2 microbatches=2",
        "data=2 zero=1 offload=optimizer",
        *(
            pytest.param(plan, marks=slow)
            for plan in (
                "data=2",
                "data=2 zero=1",
                "data=2 zero=2 microbatches=2",
                "data=2 tensor=2 zero=1",
                "data=2 pipeline=2 zero=1 microbatches=2 recompute=full",
                "data=2 zero=3 recompute=full",
                "data=2 sync=parameter-server",
                "data=2 zero=3 offload=parameters",
                "data=2 zero=1 offload=parameters",
                "data=2 zero=3 offload=optimizer,parameters",
                "data=2 update=backward",
                "data=2 zero=3 update=backward",
                "data=2 zero=3 update=backward offload=parameters",
                "data=2 zero=1 update=backward offload=optimizer",
                "pipeline=2 microbatches=4 schedule=zero-bubble",
            )
        ),
    ],
)
def test_averages_are_those_of_torch(warm_ranks: Warm, plan: str, plain: tuple[State, list[float]]) -> None:
    averages, losses = plain
    for result in warm_ranks(Plan.parse(plan).ranks).run(train_on_rank, plan):
        assert gap(result.averages, averages) <= TOLERANCE
        assert result.losses == pytest.approx(losses, abs=TOLERANCE)
        assert result.is_own
        assert result.is_back


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "plan",
    ["data=1", "offload=optimizer", "offload=optimizer,parameters", "offload=parameters update=backward"],
)
@pytest.mark.parametrize("deferred", [False, True])
def test_averages_on_one_device(plan: str, deferred: bool, plain: tuple[State, list[float]]) -> None:
    result = train_on_rank(plan, deferred=deferred)
    assert gap(result.averages, plain[0]) <= TOLERANCE
    assert result.losses == pytest.approx(plain[1], abs=TOLERANCE)
    assert result.is_own
    assert result.is_back


def delayed_on_rank(plan: str) -> tuple[bool, bool, State, State]:
    """An engine whose averages are shown after each step, and one without averages."""
    with make_engine(plan) as engine, make_engine(plan, average=None) as other:
        own: State = {}
        is_back = True
        for step in range(STEPS):
            engine.step(engine.local(vectors(step)))
            other.step(other.local(vectors(step)))
            newest = engine.full_state_dict()
            add(own, newest)
            with engine.averaged():
                engine.evaluate(engine.local(vectors(100)))
            is_back &= same(newest, engine.full_state_dict())
        is_own = same(own, engine.full_state_dict(averaged=True))
        return is_own, is_back, engine.full_state_dict(), other.full_state_dict()


@pytest.mark.parametrize("plan", [pytest.param("data=2 zero=1 offload=optimizer delay=1", marks=slow)])
def test_late_updates_are_averaged_and_training_goes_on_as_without(warm_ranks: Warm, plan: str) -> None:
    for is_own, is_back, weights, others in warm_ranks(2).run(delayed_on_rank, plan):
        assert (is_own, is_back) == (True, True)
        assert same(weights, others)


def test_a_late_update_is_averaged_on_one_device() -> None:
    is_own, is_back, weights, others = delayed_on_rank("offload=optimizer delay=1")
    assert (is_own, is_back) == (True, True)
    assert same(weights, others)


# Schedules without a common update.


def pipedream_on_rank(plan: str) -> tuple[bool, int]:
    """Averages by hand, of all that this rank updates after each of its updates."""
    own: dict[Tensor, Tensor] = {}
    updates = 0
    step = SynchronousUpdate.step

    def step_and_average(update: SynchronousUpdate) -> None:
        nonlocal updates
        step(update)
        updates += 1
        for local in update._stages.local_parameters():
            weight = local.tensor.detach()
            own[local.tensor] = own[local.tensor].lerp(weight, 1 - DECAY) if updates > 1 else weight.clone()

    with mock.patch.object(SynchronousUpdate, "step", step_and_average), make_engine(plan) as engine:
        for number in range(STEPS):
            engine.step(engine.local(vectors(number)))
        averages = engine.full_state_dict(averaged=True)
        with engine.averaged():
            engine.evaluate(engine.local(vectors(100)))
        engine.step(engine.local(vectors(0)))
        engine.synchronize()
        held = engine._update.averages
        assert held is not None
        stages = engine._local.local_parameters()
        is_same = all(torch.equal(held.state(each)[AVERAGE], own[each.tensor]) for each in stages)
        return is_same and len(averages) == len(layers().state_dict()), updates


@pytest.mark.parametrize("schedule", ["pipedream", pytest.param("pipedream-2bw", marks=slow)])
def test_each_stage_averages_after_its_own_updates(warm_ranks: Warm, schedule: str) -> None:
    plan = f"pipeline=2 microbatches=2 schedule={schedule}"
    for is_same, updates in warm_ranks(2).run(pipedream_on_rank, plan):
        assert is_same
        assert updates >= STEPS


# Updates that change nothing.


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("skipped", [(0, 3), (2,)])
def test_a_step_that_is_left_out_is_not_averaged(deferred: bool, skipped: tuple[int, ...]) -> None:
    with deferring() if deferred else mock.MagicMock(), make_engine("data=1", nonfinite="skip") as engine:
        for step in range(STEPS):
            inputs, targets = vectors(step)
            engine.step((inputs * torch.nan if step in skipped else inputs, targets))
        assert engine.skipped_steps == len(skipped)
        assert gap(engine.full_state_dict(averaged=True), train_plain(skipped=skipped)[0]) <= TOLERANCE


def test_a_refused_step_is_not_averaged() -> None:
    def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets >= 0
        losses = nn.functional.cross_entropy(output, targets.clamp(min=0), reduction="none")
        return (losses * counts).sum(), counts.sum()

    engine = make_engine("data=1", loss=counted)
    engine.step(vectors(0))
    engine.step(vectors(1))
    before = engine.full_state_dict(averaged=True)
    inputs, targets = vectors(2)
    assert refusal(lambda: engine.step((inputs, targets * 0 - 1)))
    assert same(engine.full_state_dict(averaged=True), before)


def test_an_average_reads_nothing_from_a_device() -> None:
    with deferring():
        engine = make_engine("data=1", normed(), check_every=0, audit="first")
    engine.step(vectors(0))
    engine.step(vectors(1))
    before = engine.full_state_dict(averaged=True)
    with no_reads(), mock.patch.object(engine._step, "check_earlier"):
        engine.step(vectors(2))
    newest, after = engine.full_state_dict(), engine.full_state_dict(averaged=True)
    for name, _ in normed().named_parameters():
        torch.testing.assert_close(
            after[name], before[name].lerp(newest[name], 1 - DECAY), rtol=0, atol=1e-15
        )


# Below float32.


@pytest.mark.parametrize(
    "plan",
    ["precision=bf16", "precision=fp16", "precision=bf16 masters=false", "precision=bf16 offload=optimizer"],
)
def test_averages_are_of_masters_and_in_float32(plan: str) -> None:
    part = VALUE if "masters" in plan else MASTER
    engine = make_engine(plan, layers().float(), optimizer=sgd)
    own: State = {}
    for step in range(STEPS):
        inputs, targets = vectors(step)
        metrics = engine.step((inputs.float().clamp(max=3), targets))
        assert not metrics.skipped
        engine.synchronize()
        trained = {name for name, p in layers().named_parameters() if p.requires_grad}
        kept = {each.slice: each.tensor.float() for each in engine.owned() if each.slice.part == part}
        add(own, {box.name: value for box, value in kept.items() if box.name in trained})
    averages = {each.slice.name: each.tensor for each in engine.owned() if each.slice.part == AVERAGE}
    assert all(average.dtype == torch.float32 for average in averages.values())
    assert same(averages, own)
    shown = engine.full_state_dict(averaged=True)
    assert all(torch.equal(shown[name], averages[name].to(shown[name].dtype)) for name in averages)
    assert {value.dtype for value in shown.values()} == {
        value.dtype for value in engine.full_state_dict().values()
    }


def test_an_overflow_is_not_averaged() -> None:
    engine = make_engine("precision=fp16", layers().float(), loss_scale=2.0**16)
    engine.step(half(1))
    before = engine.full_state_dict(averaged=True)
    inputs, targets = half(2)
    assert engine.step((inputs * torch.inf, targets)).skipped
    assert same(engine.full_state_dict(averaged=True), before)


def half(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = vectors(step)
    return inputs.float().clamp(max=3), targets


# Checkpoints.


def save_on_rank(plan: str, path: str, average: float | None = DECAY) -> None:
    with make_engine(plan, average=average) as engine:
        for step in range(3):
            engine.step(engine.local(vectors(step)))
        engine.save(path)


def go_on_on_rank(plan: str, path: str, **load: Any) -> tuple[State, State]:
    """The averages as they are loaded, and after the other steps."""
    with make_engine(plan) as engine:
        engine.load(path, **load)
        loaded = engine.full_state_dict(averaged=True)
        for step in range(3, STEPS):
            engine.step(engine.local(vectors(step)))
        return loaded, engine.full_state_dict(averaged=True)


PAIRS = [
    ("data=2 zero=3", "tensor=2"),
    ("pipeline=2 microbatches=2", "data=2 zero=1 offload=optimizer"),
    ("data=2 tensor=2 zero=1", "data=1"),
    ("data=1", "data=2 zero=3 offload=parameters"),
]


@pytest.mark.parametrize(
    ("source", "target"), [PAIRS[0], *(pytest.param(*pair, marks=slow) for pair in PAIRS[1:])]
)
def test_any_plan_loads_averages_into_any_plan(
    warm_ranks: Warm, tmp_path: Path, source: str, target: str, plain: tuple[State, list[float]]
) -> None:
    path = str(tmp_path / "saved")
    warm_ranks(Plan.parse(source).ranks).run(save_on_rank, source, path)
    for loaded, after in warm_ranks(Plan.parse(target).ranks).run(go_on_on_rank, target, path):
        assert gap(loaded, train_plain(3)[0]) <= TOLERANCE
        assert gap(after, plain[0]) <= TOLERANCE


def test_a_checkpoint_without_averages_begins_them_with_the_next_update(tmp_path: Path) -> None:
    save_on_rank("data=1", str(tmp_path), average=None)
    with make_engine("data=1") as engine:
        engine.step(vectors(7))  # averages of before are gone
        engine.load(tmp_path)
        assert same(engine.full_state_dict(averaged=True), engine.full_state_dict())
        engine.step(vectors(3))
        assert same(engine.full_state_dict(averaged=True), engine.full_state_dict())
        engine.step(vectors(4))
        assert not same(engine.full_state_dict(averaged=True), engine.full_state_dict())


def test_an_engine_without_averages_leaves_them_out(tmp_path: Path) -> None:
    save_on_rank("data=1", str(tmp_path))
    with make_engine("data=1", average=None) as engine:
        engine.load(tmp_path)
        assert all(each.slice.part != AVERAGE for each in engine.owned())
        engine.step(vectors(3))


def test_another_optimizer_begins_and_averages_go_on(tmp_path: Path) -> None:
    save_on_rank("data=1", str(tmp_path))
    with make_engine("data=1", optimizer=sgd) as engine:
        engine.load(tmp_path, optimizer=False)
        assert gap(engine.full_state_dict(averaged=True), train_plain(3)[0]) <= TOLERANCE
        assert all(AVERAGE not in state for state in engine.full_optimizer_state().values())


# In the place of the weights.


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()


def test_buffers_are_the_newest(tmp_path: Path) -> None:
    with make_engine("data=1", normed()) as engine:
        for step in range(STEPS):
            engine.step(vectors(step))
        newest, averages = engine.full_state_dict(), engine.full_state_dict(averaged=True)
        assert torch.equal(averages["1.running_mean"], newest["1.running_mean"])
        assert gap(averages, train_plain(make=normed)[0]) <= TOLERANCE
        engine.export(tmp_path, averaged=True)
        written = load_file(tmp_path / "model.safetensors")
        assert all(torch.equal(written[name], averages[name]) for name in written)
        assert same(engine.full_state_dict(), newest)


def test_what_must_not_work_on_averages_is_refused(tmp_path: Path) -> None:
    engine = make_engine("data=1")
    engine.step(vectors(0))
    engine.step(vectors(1))
    before = engine.full_state_dict()
    with engine.averaged():
        inputs = vectors(2)[0]
        for call in (
            lambda: engine.step(vectors(2)),
            lambda: engine.forward_backward(vectors(2)),
            engine.update,
            lambda: engine(inputs),
            lambda: engine.backward(inputs.sum()),
            engine.synchronize,
            lambda: engine.save(tmp_path / "a"),
        ):
            assert "inside `with engine.averaged()` the weights are their averages" in refusal(call)
        with engine.averaged():  # is the same
            pass
        assert same(engine.full_state_dict(), engine.full_state_dict(averaged=True))
    assert same(engine.full_state_dict(), before)
    assert engine.step(vectors(2)).loss > 0


def test_updates_of_a_loop_of_ones_own_are_averaged() -> None:
    with make_engine("data=1") as engine:
        for step in range(STEPS):
            engine.forward_backward(vectors(step))
            assert "engine.averaged(): gradients of" in refusal(lambda: engine.full_state_dict(averaged=True))
            engine.update()
        assert gap(engine.full_state_dict(averaged=True), train_plain()[0]) <= TOLERANCE


def test_a_change_by_hand_inside_is_refused_and_one_before_is_kept() -> None:
    engine = make_engine("precision=fp32", layers().float())
    engine.step(half(0))
    engine.step(half(1))
    weight = engine.module.get_parameter("5.weight")
    with torch.no_grad():
        weight.zero_()

    def change_inside() -> None:
        with engine.averaged(), torch.no_grad():
            engine.evaluate(half(100))
            weight.fill_(7.0)
            engine.evaluate(half(100))

    assert refusal(change_inside).startswith("5.weight: changed by hand inside `with engine.averaged()`")
    assert not weight.any()
    engine.step(half(2))
    assert weight.abs().max() < 1


def test_masters_do_not_follow_averages() -> None:
    engine, other = (make_engine("precision=bf16", layers().float(), average=each) for each in (DECAY, None))
    for step in range(4):
        for each in (engine, other):
            each.step(half(step))
            with torch.no_grad():
                each.module.get_parameter("5.bias").add_(0.5)
        with engine.averaged():
            engine.evaluate(half(100))
            engine.evaluate(half(100))
    assert same(engine.full_state_dict(), other.full_state_dict())


def failing_on_rank(plan: str) -> bool:
    with make_engine(plan) as engine:
        engine.step(engine.local(vectors(0)))
        engine.step(engine.local(vectors(1)))
        before = engine.full_state_dict()
        with pytest.raises(ZeroDivisionError), engine.averaged():
            raise ZeroDivisionError
        return same(engine.full_state_dict(), before)


@pytest.mark.parametrize(
    "plan", [pytest.param("data=2 zero=1", marks=slow), pytest.param("data=2 zero=3", marks=slow)]
)
def test_weights_come_back_after_an_error(warm_ranks: Warm, plan: str) -> None:
    assert all(warm_ranks(2).run(failing_on_rank, plan))


def test_weights_come_back_after_an_error_on_one_device() -> None:
    assert failing_on_rank("data=1")


def test_before_the_first_update_averages_are_the_weights_and_take_no_memory() -> None:
    engine = make_engine("data=1")
    assert engine.memory().now["optimizer"] == 0
    assert same(engine.full_state_dict(averaged=True), layers().state_dict())


@pytest.mark.parametrize("plan", ["data=1", "offload=optimizer"])
def test_averages_count_as_state_of_the_optimizer(plan: str) -> None:
    bytes_of = {}
    for average in (None, DECAY):
        engine = make_engine(plan, average=average)
        engine.step(vectors(0))
        engine.synchronize()
        memory = engine.memory()
        bytes_of[average] = (memory.host if "offload" in plan else memory.now)["optimizer"]
    trained = [p for p in layers().parameters() if p.requires_grad]
    assert bytes_of[DECAY] - bytes_of[None] == sum(p.nbytes for p in trained)


# Refused before anything starts.


@pytest.mark.parametrize("average", [0, 1, 1.5, -0.1, True, "0.9", float("nan")])
def test_a_decay_is_between_0_and_1(average: Any) -> None:
    message = refusal(lambda: make_engine("data=1", average=average))
    assert (
        f"average={average!r}: must be a number above 0 and below 1, as 0.9999, or None for none" in message
    )


def test_plans_without_common_updates_are_refused() -> None:
    message = refusal(lambda: make_engine("data=2 sync=async"))
    assert "average=0.9 sync=async: a server makes versions of the weights" in message


def muon_on_rank() -> str:
    plan = "data=2 zero=1 precision=bf16"
    model = nn.Linear(8, 5, bias=False)
    return refusal(lambda: make_engine(plan, model, optimizer=torch.optim.Muon))


def test_masters_of_whole_parameters_are_refused(warm_ranks: Warm) -> None:
    for message in warm_ranks(2).run(muon_on_rank):
        assert message.startswith("average=0.9 with optimizer Muon and plan 'data=2 zero=1 precision=bf16'")


def test_without_averages_there_is_nothing_to_show() -> None:
    engine = make_engine("data=1", average=None)
    assert refusal(lambda: engine.full_state_dict(averaged=True)) == (
        "this engine keeps no averages; make it with parallelize(…, average=0.9999)"
    )


# The arithmetic.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("is_skipped", [False, True])
def test_a_flag_on_the_device_gives_the_same(dtype: torch.dtype, is_skipped: bool) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(size, dtype=dtype) for size in (3, 70)]
    averages = [torch.randn_like(each, dtype=average_dtype(each)) for each in weights]
    before, copies = ([each.clone() for each in averages] for _ in range(2))
    move(averages, weights, 0.1, is_skipped)
    move(copies, weights, 0.1, torch.tensor(is_skipped))
    for average, copy, old, weight in zip(averages, copies, before, weights, strict=True):
        expected = old if is_skipped else old.lerp(weight.to(old.dtype), 0.1)
        assert torch.equal(average, expected)
        torch.testing.assert_close(copy, expected, rtol=1e-6, atol=0)


def test_one_kernel_for_each_type_and_portions_of_what_is_coarser() -> None:
    with mock.patch.object(torch, "_fused_sgd_") as kernel:
        mixed = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.ones(4)]
        move_on_device(mixed, mixed, 0.1, torch.tensor(False))
    assert [len(call.args[0]) for call in kernel.call_args_list] == [2, 1]
    weights = [torch.ones(3 * 2**20, dtype=torch.bfloat16) for _ in range(3)]
    averages = [torch.zeros(3 * 2**20) for _ in weights]
    with mock.patch.object(torch, "_foreach_lerp_", wraps=torch._foreach_lerp_) as lerp:
        move(averages, weights, 0.25, False)
    assert [len(call.args[0]) for call in lerp.call_args_list] == [1, 1, 1]
    assert all((average == 0.25).all() for average in averages)


def test_bytes_of_averages() -> None:
    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    local: Any = [mock.Mock(tensor=weight) for weight in weights]
    assert average_bytes(local) == 3 * 4 + 3 * 8
