"""One update of weights: in their own type, and through float32 masters."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.state.ownership import MASTER, LocalParameter
from echelon.update.optim import CombinedOptimizer
from echelon.update.optim.local import make_whole
from echelon.update.precision import flat_memory, stepper
from echelon.update.precision.optimizer_call import DeviceCall, HostCall
from echelon.update.precision.stepper import DirectStepper, MasterStepper
from tests.peak_memory import PeakMemory
from tests.update.precision.adam_on_cpu import adam_on_cpu

SIZES = (3, 5, 2)


@pytest.fixture(autouse=True)
def _divides_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_memory, "_SMALLEST_PORTION", 0)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


def weights(dtype: torch.dtype) -> list[LocalParameter]:
    generator = torch.Generator().manual_seed(0)
    values = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in SIZES]
    return [LocalParameter(str(index), value, value) for index, value in enumerate(values)]


def set_gradients(local: list[LocalParameter], step: int, dtype: torch.dtype | None = None) -> None:
    """Of the type of their weights, or of another one, with the same values."""
    generator = torch.Generator().manual_seed(100 + step)
    for each in local:
        gradient = torch.randn(each.tensor.shape, generator=generator)
        each.tensor.grad_dtype = dtype or each.tensor.dtype
        each.tensor.grad = gradient.to(each.tensor.dtype).to(each.tensor.grad_dtype)
    local[step % len(local)].tensor.grad = None  # not used in this step


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW, its updates are as large as the gradients."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def expected_masters(
    dtype: torch.dtype, factor: float, steps: int, make: Callable[..., torch.optim.Optimizer] = adamw
) -> list[Tensor]:
    """The same in plain torch: an optimizer over float32 copies."""
    local = weights(dtype)
    masters = [nn.Parameter(each.tensor.detach().float()) for each in local]
    optimizer = make(masters)
    for step in range(steps):
        set_gradients(local, step)
        for each, master in zip(local, masters, strict=True):
            master.grad = None if each.tensor.grad is None else each.tensor.grad.float() * factor
        optimizer.step()
    return [master.detach() for master in masters]


def deferred_and_not(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("deferred", [False, True], ids=["direct", "deferred"])(test)


@deferred_and_not
@pytest.mark.parametrize("gradients", [torch.bfloat16, torch.float32])
def test_masters_are_updated_once_in_each_step(deferred: bool, gradients: torch.dtype) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw([each.parameter for each in local]), local, deferred=deferred)
    for step in range(4):
        set_gradients(local, step, gradients)
        masters.step(0.5)
    for each, expected in zip(local, expected_masters(torch.bfloat16, 0.5, steps=4), strict=True):
        state = masters.state(each)
        torch.testing.assert_close(state[MASTER], expected, rtol=1e-6 * deferred, atol=1e-6 * deferred)
        assert torch.equal(each.tensor.detach(), state[MASTER].bfloat16())
        assert int(state["step"]) == sum(step % len(local) != int(each.name) for step in range(4))


@deferred_and_not
def test_one_step_is_one_call(deferred: bool) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw([each.parameter for each in local]), local, deferred=deferred)
    calls: list[int] = []
    masters.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    set_gradients(local, 0)
    masters.step(1.0)
    assert calls == [1]


class CountingSGD(torch.optim.SGD):
    """Counts its steps by itself, as optimizers do that change their rate."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_an_optimizer_of_the_user_s_own_is_called_once() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(CountingSGD([each.parameter for each in local]), local)
    set_gradients(local, 0)
    masters.step(1.0)
    assert isinstance(masters.optimizer, CountingSGD)
    assert masters.optimizer.steps == 1


def test_a_step_that_somebody_has_replaced_is_called_once() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw([each.parameter for each in local]), local)
    steps: list[int] = []
    masters.optimizer.step = lambda: steps.append(1)  # type: ignore[method-assign, assignment]
    set_gradients(local, 0)
    masters.step(1.0)
    assert steps == [1]


@deferred_and_not
def test_gradients_in_bf16_and_their_copies_take_no_more_than_float32_gradients(deferred: bool) -> None:
    """All of them were copied at once: 6 bytes per parameter in all, where float32 gradients take 4."""
    local = [LocalParameter(str(size), p, p) for size in (640, 64, 320, 256) for p in [low_weight(size)]]
    masters = MasterStepper(sgd([each.parameter for each in local]), local, deferred=deferred)
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    masters.step(1.0)
    with PeakMemory() as memory:
        masters.step(1.0)
    gradients = sum(each.tensor.numel() for each in local)
    assert 2 * gradients + memory.peak <= 4 * gradients + 64, "and a few numbers"
    assert all(bool((each.tensor == -2).all()) for each in local)


def portioned(make: Callable[..., torch.optim.Optimizer], *, deferred: bool) -> MasterStepper:
    """Four weights with bf16 gradients, which are updated two at a time."""
    local = [LocalParameter(str(number), p, p) for number in range(4) for p in [low_weight(64)]]
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    return MasterStepper(make([each.parameter for each in local]), local, deferred=deferred)


def test_a_flag_that_must_be_read_is_read_once_for_all_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = portioned(partial(torch.optim.SGD, lr=0.1, foreach=True), deferred=True)
    masters.step(1.0)  # the first update of each weight reads it by itself
    reads: list[int] = []
    read = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(1) or read(self))
    masters.step(1.0, torch.tensor(False))
    assert len(reads) == 1


def test_a_scheduler_of_rates_does_not_make_one_portion_of_all() -> None:
    optimizer = portioned(partial(torch.optim.SGD, lr=0.1), deferred=False).optimizer
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert "step" in vars(optimizer)
    assert stepper.takes_portions(optimizer)


def low_weight(size: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))


def test_masters_share_one_memory_and_each_has_a_place_of_its_own() -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw([each.parameter for each in local]), local)
    assert not any(masters.state(each) for each in local), "before an update they are what the weights are"
    masters.step(1.0)
    views = [masters.state(each)[MASTER] for each in local]
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert [view.data_ptr() % 256 for view in views] == [views[0].data_ptr() % 256] * len(views)
    for view, each in zip(views, local, strict=True):
        assert torch.equal(view, each.tensor.detach().float())


@deferred_and_not
def test_a_gradient_that_lies_unlike_its_master_is_copied(deferred: bool) -> None:
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = gradient = torch.arange(6.0).view(3, 2).t()
    local = [LocalParameter("w", weight, weight)]
    masters = MasterStepper(sgd([weight]), local, deferred=deferred)
    masters.step(2.0)
    assert torch.equal(masters.state(local[0])[MASTER], -2 * torch.arange(6.0).view(3, 2).t())
    assert gradient.flatten().tolist() == [0, 2, 4, 1, 3, 5], "the copy was scaled"


@deferred_and_not
def test_a_skipped_step_changes_neither_weights_nor_masters(deferred: bool) -> None:
    local = weights(torch.bfloat16)
    masters = MasterStepper(adamw([each.parameter for each in local]), local, deferred=deferred)
    for step, skip in ((3, False), (4, False), (5, False), (6, True)):
        set_gradients(local, step)
        before = [(each.tensor.detach().clone(), copy.deepcopy(masters.state(each))) for each in local]
        masters.step(torch.tensor(0.5, dtype=torch.float64), torch.tensor(skip))
        same = [
            torch.equal(each.tensor.detach(), weight)
            and masters.state(each).keys() == state.keys()
            and all(torch.equal(value, state[key]) for key, value in masters.state(each).items())
            for each, (weight, state) in zip(local, before, strict=True)
        ]
        assert all(same) == skip


def test_without_masters_the_weights_themselves_are_updated_by_the_scaled_gradient() -> None:
    local = weights(torch.float32)
    direct = DirectStepper(momentum([each.parameter for each in local]), local)
    for step in range(4):
        set_gradients(local, step)
        direct.step(0.5)
    masters = expected_masters(torch.float32, 0.5, steps=4, make=momentum)
    for each, expected in zip(local, masters, strict=True):
        torch.testing.assert_close(each.tensor.detach(), expected, rtol=1e-6, atol=1e-7)
        assert set(direct.state(each)) == {"momentum_buffer"}


def two_weights() -> list[LocalParameter]:
    values = [nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16)) for _ in range(2)]
    return [LocalParameter(str(index), value, value) for index, value in enumerate(values)]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_updates_that_are_too_small_for_the_weight_add_up_in_the_master() -> None:
    """Added to the weight itself, 1e-3 would be lost each time: bf16 has steps of 1/128 there."""
    local = two_weights()[:1]
    masters = MasterStepper(sgd([local[0].parameter]), local)
    for _ in range(10):
        local[0].tensor.grad = torch.full((2,), -1e-3, dtype=torch.bfloat16)
        masters.step(1.0)
    assert masters.state(local[0])[MASTER].tolist() == pytest.approx([1.01, 2.01], rel=1e-5)
    assert local[0].tensor.tolist() == [1.0078125, 2.015625]


def test_a_step_leaves_no_gradient_at_the_masters() -> None:
    """It would keep memory until the next step, a bucket's or that of a float32 copy."""
    local = two_weights()
    masters = MasterStepper(sgd([each.parameter for each in local]), local)
    gradient = torch.tensor([4.0, 8.0], dtype=torch.bfloat16)
    local[0].tensor.grad = gradient
    masters.step(0.25)
    assert local[0].tensor.tolist() == [0.0, 0.0]
    assert local[0].tensor.grad is gradient
    assert [p.grad for group in masters.optimizer.param_groups for p in group["params"]] == [None, None]


def test_a_weight_without_a_gradient_keeps_its_value_and_has_no_state_but_its_master() -> None:
    first, second = local = two_weights()
    masters = MasterStepper(adamw([each.parameter for each in local]), local)
    first.tensor.grad = torch.ones(2, dtype=torch.bfloat16)
    masters.step(1.0)
    assert masters.state(first).keys() == {MASTER, "step", "exp_avg", "exp_avg_sq"}
    assert masters.state(second).keys() == {MASTER}
    assert second.tensor.tolist() == [1.0, 2.0]


def test_runs_of_one_parameter_each_have_their_own_state() -> None:
    whole = nn.Parameter(torch.arange(6.0))
    local = [
        LocalParameter("w", whole, nn.Parameter(whole.detach()[begin:end]), begin)
        for begin, end in ((0, 4), (4, 6))
    ]
    direct = DirectStepper(adamw([whole]), local)
    for each in local:
        each.tensor.grad = torch.ones_like(each.tensor)
    direct.step(1.0)
    assert [direct.state(each)["exp_avg"].shape for each in local] == [(4,), (2,)]


class PlainStepper(stepper.Stepper):
    """What a stepper does that says nothing else."""

    def step(self, *_: object) -> None: ...

    def load(self, *_: object) -> None: ...


def test_a_stepper_without_more_has_no_state_and_nothing_under_way() -> None:
    local = two_weights()
    plain = PlainStepper(adamw([local[0].tensor]), deferred=False)
    assert (plain.by_unit, plain.on_host, plain.loses_change) == (False, False, False)
    assert (plain.state(local[0]), plain.storages(local)) == ({}, [])
    assert (plain.changed(), plain.updated_tensors(), plain.held_whole()) == ([], [], [])
    assert plain.gradients_in_flight() == []
    assert (plain.finish(), plain.finish(temporary=True), plain.undo_finish()) == (False, False, False)
    assert plain.whole_parts == frozenset()
    plain.optimizer.whole_state = frozenset({"rows"})  # type: ignore[attr-defined]
    assert plain.whole_parts == {"rows"}


@pytest.mark.parametrize("kind", [DirectStepper, MasterStepper])
def test_of_a_unit_no_other_weight_is_updated(kind: type[DirectStepper | MasterStepper]) -> None:
    first, second = local = two_weights()
    stepped = kind(sgd([each.parameter for each in local]), local)
    for each in local:
        each.tensor.grad = torch.ones(2, dtype=torch.bfloat16)
    stepped.step(1.0, unit=[first])
    assert [each.tensor.tolist() for each in local] == [[0.0, 1.0], [1.0, 2.0]]
    stepped.step(1.0, unit=[second])
    assert [each.tensor.tolist() for each in local] == [[0.0, 1.0], [0.0, 1.0]]
    (group,) = stepped.optimizer.param_groups
    assert len(group["params"]) == 2
    assert [name for name, _ in stepped.updated_tensors()] == ["0", "1"]


@pytest.mark.parametrize(("by_unit", "made"), [(False, [True, True]), (True, [True, False])])
def test_masters_of_what_is_on_the_device_are_made_in_the_first_update(
    by_unit: bool, made: list[bool]
) -> None:
    local = two_weights()
    masters = MasterStepper(sgd([each.parameter for each in local]), local)
    masters.by_unit = by_unit
    local[0].tensor.grad = torch.ones(2, dtype=torch.bfloat16)
    masters.step(1.0, unit=local[:1])
    assert [MASTER in masters.state(each) for each in local] == made
    local[1].tensor.data.fill_(5)  # as what comes onto the device later
    masters.step(1.0, unit=local[1:])
    assert masters.state(local[1])[MASTER].tolist() == ([5.0, 5.0] if by_unit else [1.0, 2.0])
    assert len(masters.storages(local)) == 2


def test_a_master_follows_the_elements_that_somebody_has_changed() -> None:
    local = two_weights()
    masters = MasterStepper(sgd([each.parameter for each in local]), local)
    masters.take_over(local)  # there are none
    for each in local:
        each.tensor.grad = torch.full((2,), -1e-3, dtype=torch.bfloat16)
    masters.step(1.0)
    before = [masters.state(each)[MASTER].clone() for each in local]
    for each in local:
        each.tensor.data[1] = 3.0
    masters.take_over(local[:1])
    first, second = (masters.state(each)[MASTER] for each in local)
    assert first.tolist() == [before[0][0].item(), 3.0], "what is the same keeps its finer bits"
    assert torch.equal(second, before[1])


class SavedWeight:
    """What a checkpoint has of a weight: `finer`, or nothing that the weight lacks."""

    state_parts = numbers = ()
    finest = "value"

    def __init__(self, finer: Tensor | None) -> None:
        self._finer = finer

    def has_finer(self, dtype: torch.dtype) -> bool:
        return self._finer is not None and self._finer.dtype != dtype

    def fill(self, part: str, out: Tensor) -> None:
        assert (part, self._finer is not None) == ("value", True)
        out.copy_(self._finer)  # type: ignore[arg-type]


def load(masters: MasterStepper, local: LocalParameter, finer: Tensor | None) -> None:
    masters.load(local, SavedWeight(finer))  # type: ignore[arg-type]


@pytest.mark.parametrize("has_masters", [False, True])
def test_a_checkpoint_brings_a_master_or_takes_it_away(has_masters: bool) -> None:
    """One that stayed, with a checkpoint of weights alone, would undo what is loaded."""
    first, second = local = two_weights()
    masters = MasterStepper(momentum([each.parameter for each in local]), local)
    if has_masters:
        for each in local:
            each.tensor.grad = torch.ones(2, dtype=torch.bfloat16)
        masters.step(1.0)
    finer = torch.tensor([1.0001, 2.0001])
    load(masters, first, finer)
    second.tensor.data.fill_(7)
    load(masters, second, None)
    assert torch.equal(masters.state(first)[MASTER], finer)
    assert MASTER not in masters.state(second)
    assert not any("momentum_buffer" in masters.state(each) for each in local)
    for each in local:
        each.tensor.grad = torch.zeros(2, dtype=torch.bfloat16)
    masters.step(1.0)
    assert torch.equal(masters.state(first)[MASTER], finer)
    assert masters.state(second)[MASTER].tolist() == [7.0, 7.0]
    assert second.tensor.tolist() == [7.0, 7.0]


def test_after_a_load_the_fused_kernel_looks_for_memory_again() -> None:
    local = weights(torch.float16)
    with adam_on_cpu():
        masters = MasterStepper(adamw([each.parameter for each in local]), local, deferred=True)
        for _ in range(2):
            for each in local:
                each.tensor.grad = torch.ones_like(each.tensor)
            masters.step(1.0)
        assert masters._fused is not None
        assert len(masters._fused._prepared) == 1
        load(masters, local[0], None)
        assert not masters._fused._prepared


def test_factor_and_skip_are_read_unless_they_are_deferred() -> None:
    local = two_weights()
    for kind in (DirectStepper, MasterStepper):
        kinds = [
            type(kind(sgd([each.parameter for each in local]), local, **options)._call) for options in OPTIONS
        ]
        assert kinds == [HostCall, HostCall, DeviceCall]


OPTIONS: list[dict[str, bool]] = [{}, {"deferred": False}, {"deferred": True}]


def test_masters_share_memory_by_place_and_take_none_before() -> None:
    assert flat_memory.without_memory(torch.ones(3, 4, dtype=torch.bfloat16)).untyped_storage().nbytes() == 4
    assert flat_memory.without_memory(torch.ones(3, 4)).shape == (3, 4)


def test_what_somebody_watches_takes_neither_portions_nor_units() -> None:
    plain, watched, replaced = (adamw([nn.Parameter(torch.ones(1))]) for _ in range(3))
    watched.register_step_pre_hook(lambda *_: None)
    replaced.step = lambda: None  # type: ignore[method-assign, assignment]
    for optimizer, is_free in ((plain, True), (watched, False), (replaced, False)):
        assert stepper.takes_portions(optimizer) is is_free
        assert stepper.takes_units(optimizer) is is_free
        inside = CombinedOptimizer([adamw([nn.Parameter(torch.ones(1))]), optimizer])
        assert stepper.takes_units(inside) is is_free
    assert not stepper.has_other_step(plain)
    assert stepper.has_other_step(replaced)
    stepper.check_takes_units(plain)
    with pytest.raises(UserError, match="optimizer AdamW with updates in the backward pass"):
        stepper.check_takes_units(watched)
    assert not stepper.takes_units(CountingSGD([nn.Parameter(torch.ones(1))])), "nobody knows what it needs"


def test_an_optimizer_is_asked_about_each_gradient_of_a_unit() -> None:
    table = nn.Parameter(torch.ones(3, 2))
    other = nn.Parameter(torch.ones(1))
    local = [LocalParameter("table", table, table), LocalParameter("other", other, other)]
    direct = DirectStepper(adamw([table, other]), local)
    direct.check_gradients(local)
    table.grad = torch.eye(3)[:, :2].to_sparse()
    direct.check_gradients(local[1:])
    with pytest.raises(UserError, match="table has a sparse gradient"):
        direct.check_gradients(local)


class NotedStepper(stepper.Stepper):
    """Notes which units are updated."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, deferred=False)
        self.calls: list[Any] = []

    def step(self, factor: Any, skip: Any = False, unit: Any = None) -> None:
        self.calls.append((factor, skip, unit))

    def load(self, local: Any, saved: Any) -> None:
        raise NotImplementedError


class UnitSharing:
    def __init__(self, *units: str) -> None:
        self._units = units

    def pieces_to_update(self) -> tuple[str, ...]:
        return self._units


def test_weights_in_host_memory_are_updated_unit_by_unit() -> None:
    noted = NotedStepper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    noted.step_all(0.5, True)
    assert noted.calls == [(0.5, True, None)], "all at once, where all are on the device"
    first, second = UnitSharing("a", "b"), UnitSharing("c")
    noted.use_units([first, second, first])  # type: ignore[list-item]
    assert noted.by_unit
    noted.calls.clear()
    noted.step_all(0.5)
    noted.step_all(0.25, True)
    assert noted.calls == [*((0.5, False, each) for each in "abc"), *((0.25, True, each) for each in "abc")]


def test_an_optimizer_that_must_see_all_weights_is_refused_also_later() -> None:
    lbfgs = torch.optim.LBFGS([nn.Parameter(torch.ones(1))])
    with pytest.raises(UserError, match="optimizer LBFGS with offload=parameters"):
        NotedStepper(lbfgs).use_units([])
    noted = NotedStepper(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    noted.use_units([UnitSharing("a")])  # type: ignore[list-item]
    noted.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UserError, match="whose steps nobody watches by a hook"):
        noted.step_all(1.0)
    assert noted.calls == []


@pytest.mark.parametrize("has_triton", [True, False])
def test_on_a_device_the_kernel_of_adam_alone_takes_gradients_of_16_bits_at_no_cost(
    monkeypatch: pytest.MonkeyPatch, has_triton: bool
) -> None:
    """Others get copies in portions, each with a call of the optimizer."""
    monkeypatch.setattr("echelon.update.precision.fused_adam.has_triton", lambda: has_triton)
    local = weights(torch.bfloat16)
    for make, on_device in ((adamw, has_triton), (momentum, False)):
        assert MasterStepper(make_whole(make, []), local, deferred=True).takes_products == on_device
        assert MasterStepper(make_whole(make, []), local, deferred=False).takes_products
