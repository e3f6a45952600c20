"""Calls of an optimizer: what the device path computes, what it reads, and what a skipped call leaves."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from echelon.update.optim import SM3
from echelon.update.precision.optimizer_call import (
    DeviceCall,
    HostCall,
    OptimizerCall,
    has_step_hooks,
    make_momentum,
    may_fuse,
    on_device,
    restricted,
)
from tests.reads import HasReadError, no_reads

Make = Callable[..., torch.optim.Optimizer]

FUSED: dict[str, Make] = {
    "adam": partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "chosen": partial(torch.optim.AdamW, lr=0.1, fused=True),
}
OTHER: dict[str, Make] = {
    "dampened": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5),
    "foreach": partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "not fused": partial(torch.optim.AdamW, lr=0.1, fused=False),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.1),
}
MAKES = FUSED | OTHER
NO = torch.tensor(False)
YES = torch.tensor(True)


class Called:
    """Three weights, and steps with gradients of their own, which leave out one weight in turn."""

    def __init__(self, kind: type[OptimizerCall], make: Make, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [
            nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
            for size in (3, 5, 2)
        ]
        self.optimizer = make(self.weights)
        self._call = kind(self.optimizer)

    def step(self, number: int, factor: float = 0.37, skip: Tensor = NO) -> None:
        generator = torch.Generator().manual_seed(100 + number)
        for index, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64).to(weight.dtype)
            weight.grad = None if index == number % 4 else gradient
        used = [weight for weight in self.weights if weight.grad is not None]
        self._call(used, torch.tensor(factor, dtype=torch.float64), skip)

    def state(self) -> list[Tensor]:
        states = [self.optimizer.state.get(weight, {}) for weight in self.weights]
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return copy.deepcopy([*(weight.detach() for weight in self.weights), *values])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", MAKES)
def test_both_calls_compute_the_same(name: str, dtype: torch.dtype) -> None:
    on_host, on_device = Called(HostCall, MAKES[name], dtype), Called(DeviceCall, MAKES[name], dtype)
    for number in range(6):
        on_host.step(number)
        on_device.step(number)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for expected, actual in zip(on_host.state(), on_device.state(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [HostCall, DeviceCall])
@pytest.mark.parametrize("name", MAKES)
def test_a_skipped_call_changes_no_bit_and_leaves_no_trace(name: str, kind: type[OptimizerCall]) -> None:
    """Also where it is the first: what a kernel that is skipped leaves of new state is not initialised."""
    called, undisturbed = Called(kind, MAKES[name]), Called(kind, MAKES[name])
    called.step(7, skip=YES)
    for number in range(6):
        called.step(number)
        undisturbed.step(number)
        before = called.state()
        called.step(40 + number, factor=torch.nan, skip=YES)
        assert all(map(torch.equal, called.state(), before))
    assert all(map(torch.equal, called.state(), undisturbed.state()))


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_call_reads_nothing_after_the_first_update_of_each_weight(name: str) -> None:
    called = Called(DeviceCall, FUSED[name])
    for number in range(2):
        with no_reads(), pytest.raises(HasReadError):
            called.step(number)
        called.step(number)
    with no_reads():
        for number in range(2, 6):
            called.step(number, skip=YES if number == 3 else NO)
    assert not hasattr(called.optimizer, "found_inf")
    assert not hasattr(called.optimizer, "grad_scale")


@pytest.mark.parametrize("name", OTHER)
def test_what_the_user_has_chosen_stays(name: str) -> None:
    chosen = [dict(group, params=None) for group in Called(HostCall, OTHER[name]).optimizer.param_groups]
    called = Called(DeviceCall, OTHER[name])
    called.step(0)
    assert [dict(group, params=None) for group in called.optimizer.param_groups] == chosen


def test_a_subclass_of_torch_s_optimizer_is_the_user_s() -> None:
    class OwnAdamW(torch.optim.AdamW):
        pass

    assert Called(DeviceCall, OwnAdamW).optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_sparse_gradients_are_left_to_torch_s_default(name: str) -> None:
    weights = []
    for kind in (HostCall, DeviceCall):
        table = nn.Embedding(4, 2, sparse=True, dtype=torch.float64)
        nn.init.ones_(table.weight)
        call = kind(MAKES[name]([table.weight]))
        for _ in range(3):
            table.weight.grad = None
            table(torch.tensor([1, 1, 3])).sum().backward()
            call([table.weight], torch.tensor(0.5, dtype=torch.float64), NO)
        weights.append(table.weight.detach())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-12, atol=0.0)


def test_a_dim_of_size_1_may_have_any_stride_in_a_fused_kernel() -> None:
    """The kernel was given up for the gradient of a matrix with one column."""
    weight = nn.Parameter(torch.ones(3, 1))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.arange(3.0).view(1, 3).t()
    assert weight.grad.stride() != weight.stride()
    DeviceCall(optimizer)([weight], torch.tensor(1.0), NO)
    assert optimizer.param_groups[0]["fused"] is True
    assert weight.flatten().tolist() == pytest.approx([0.999, 0.899, 0.899])


@pytest.mark.parametrize("is_global", [False, True], ids=["of one", "of all"])
@pytest.mark.parametrize("kind", [HostCall, DeviceCall])
@pytest.mark.parametrize("name", ["adamw", "chosen", "rmsprop"])
def test_step_hooks_see_the_gradients_of_the_update_and_only_of_updates(
    name: str, kind: type[OptimizerCall], is_global: bool
) -> None:
    """On a device they saw gradients before they were scaled, and were called where nothing is updated."""
    called = Called(kind, MAKES[name], torch.float32)
    called.step(3)  # the first update of each weight
    seen: list[list[Tensor]] = []

    def record(*_: Any) -> None:
        seen.append([weight.grad.clone() for weight in called.weights if weight.grad is not None])

    handles = (
        [register_optimizer_step_pre_hook(record), register_optimizer_step_post_hook(record)]
        if is_global
        else [
            called.optimizer.register_step_pre_hook(record),
            called.optimizer.register_step_post_hook(record),
        ]
    )
    try:
        called.step(7, skip=YES)
        called.step(7, factor=0.5)
    finally:
        for handle in handles:
            handle.remove()
    generator = torch.Generator().manual_seed(107)
    expected = [
        torch.randn(size, generator=generator, dtype=torch.float64).float() * 0.5 for size in (3, 5, 2)
    ]
    assert len(seen) == 2, "before and after the one update"
    for gradients in seen:
        assert all(map(torch.equal, gradients, expected))


def test_a_gradient_that_lies_unlike_its_weight_is_no_kernel_s() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    call = DeviceCall(torch.optim.AdamW([weight], lr=0.1))
    weight.grad = torch.arange(6.0).view(3, 2).t()
    call([weight], torch.tensor(1.0), NO)
    assert weight.flatten().tolist() == pytest.approx([0.999, 0.899, 0.899, 0.899, 0.899, 0.899])


def test_an_optimizer_that_ranks_call_alike_is_called_for_a_step_that_is_refused() -> None:
    """A rank whose parameter is new would leave the others in the middle of their sums."""
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = SM3([weight], lr=0.1, weight_decay=0.1)
    calls: list[int] = []
    optimizer._update = lambda _: calls.append(1)  # type: ignore[method-assign, assignment]
    weight.grad = torch.ones(2, 3)
    DeviceCall(optimizer)([weight], torch.tensor(1.0), YES)
    assert calls == [1]
    del optimizer._update
    weight.grad = torch.full((2, 3), float("inf"))
    DeviceCall(optimizer)([weight], torch.tensor(1.0), YES)
    assert torch.equal(weight, torch.ones(2, 3))
    assert not any(value.any() for value in optimizer.state[weight].values())


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def test_a_host_call_scales_gradients_in_place_unless_the_factor_is_1() -> None:
    weight = parameter(2)
    call = HostCall(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.full((2,), 4.0)
    version = weight.grad._version
    call([weight], 1.0, False)
    assert weight.grad._version == version
    assert weight.tolist() == [-3.0, -3.0]
    call([weight], torch.tensor(0.25), NO)
    assert (weight.grad.tolist(), weight.tolist()) == ([1.0, 1.0], [-4.0, -4.0])
    call([weight], 1.0, True)
    assert weight.tolist() == [-4.0, -4.0]
    call([], 0.5, False)  # no gradients: the optimizer is called all the same


def test_a_flag_is_read_at_once_where_each_call_would_read_it() -> None:
    weight = parameter(2)
    assert HostCall(torch.optim.SGD([weight], lr=1.0)).readable(YES) is True
    fused = DeviceCall(torch.optim.SGD([weight], lr=1.0))
    assert fused.readable(YES) is YES
    fused._optimizer.register_step_pre_hook(lambda *_: None)
    assert fused.readable(YES) is True
    assert DeviceCall(torch.optim.SGD([weight], lr=1.0, foreach=True)).readable(NO) is False


def test_sgd_has_momentum_of_new_weights_alone_and_without_dampening() -> None:
    new, old, dampened, plain = (parameter(2) for _ in range(4))
    groups = [
        {"params": [new, old], "momentum": 0.9},
        {"params": [dampened], "momentum": 0.9, "dampening": 0.5},
        {"params": [plain]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    make_momentum(optimizer, [new, dampened, plain])
    assert list(optimizer.state) == [new]
    assert optimizer.state[new]["momentum_buffer"].tolist() == [0.0, 0.0]
    optimizer.state[new]["momentum_buffer"].fill_(3)
    make_momentum(optimizer, [new])
    assert optimizer.state[new]["momentum_buffer"].tolist() == [3.0, 3.0]
    other = torch.optim.RMSprop([plain], momentum=0.9)
    make_momentum(other, [plain])
    assert not other.state


def test_a_restricted_optimizer_has_all_its_parameters_afterwards() -> None:
    one, two, three = (parameter(1) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [one, two]}, {"params": [three]}], lr=0.1)
    with restricted(optimizer, [two]):
        assert [group["params"] for group in optimizer.param_groups] == [[two], []]
    assert [group["params"] for group in optimizer.param_groups] == [[one, two], [three]]
    with pytest.raises(RuntimeError), restricted(optimizer, [two]):
        raise RuntimeError
    assert [group["params"] for group in optimizer.param_groups] == [[one, two], [three]]


def test_hooks_of_the_engine_do_not_count() -> None:
    def own(*_: object) -> None: ...

    own.__module__ = "echelon.engine.engine"
    optimizer = torch.optim.SGD([parameter(1)], lr=0.1)
    assert not has_step_hooks(optimizer)
    optimizer.register_step_post_hook(own)
    assert not has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    assert not has_step_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    del optimizer._optimizer_step_post_hooks  # as of wrappers that never call Optimizer.__init__
    assert not has_step_hooks(optimizer)


@pytest.mark.parametrize(
    ("make", "fuses"),
    [
        (partial(torch.optim.Adam, lr=0.1), True),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), True),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1), False),
        (partial(torch.optim.Adam, lr=torch.tensor(0.1)), False),
        (partial(torch.optim.Adam, lr=0.1, foreach=False), False),
        (partial(torch.optim.Adam, lr=0.1, fused=False), False),
        (partial(torch.optim.Adam, lr=0.1, fused=True), False),
        (partial(torch.optim.Adam, lr=0.1, differentiable=True), False),
        (torch.optim.Adagrad, False),
    ],
)
def test_what_the_user_left_open_may_be_fused(make: Make, fuses: bool) -> None:
    assert may_fuse(make([parameter(1)])) is fuses


def test_complex_weights_and_what_a_graph_captures_are_not_fused() -> None:
    assert not may_fuse(torch.optim.Adam([parameter(1), parameter(1, dtype=torch.complex64)]))
    capturable = torch.optim.Adam([parameter(1)])
    capturable.param_groups[0]["capturable"] = True
    assert not may_fuse(capturable)


def test_factors_and_flags_are_float64_where_the_parameters_are() -> None:
    given = torch.tensor(0.5, dtype=torch.float32)
    assert (on_device(given, []).dtype, on_device(given, []).item()) == (torch.float64, 0.5)
    made = on_device(0.1, [torch.ones(1, device="meta")])
    assert (made.device.type, made.dtype, made.shape) == ("meta", torch.float64, ())
    assert on_device(True, [torch.ones(1)]).item() == 1.0
    assert on_device(0.1, []).item() == 0.1


class Amplified(torch.optim.SGD):
    """Says that it takes scale and flag, and keeps what it was given."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        self.seen = getattr(self, "grad_scale", None), self.found_inf
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_kernel_is_told_no_scale_of_one(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write all gradients again."""
    told: list[tuple[object, object]] = []
    weights = []
    for factor, skip in ((1.0, False), (torch.tensor(1.0).double(), torch.tensor(False))):
        weight = parameter(2)
        weight.grad = torch.ones(2)
        optimizer = kind([weight], lr=1.0)
        step = kind.step

        def see(self: Any, closure: Any = None, step: Any = step) -> Any:
            told.append((getattr(self, "grad_scale", None), getattr(self, "found_inf", None)))
            return step(self, closure)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "step", see)
            DeviceCall(optimizer)([weight], factor, skip)
        weights.append(weight.detach())
    assert told[0] == (None, None)
    assert None not in told[1]
    assert torch.equal(*weights)


def test_scale_and_flag_reach_an_optimizer_that_takes_them() -> None:
    weight = parameter(2)
    weight.grad = torch.ones(2)
    optimizer = Amplified([weight], lr=1.0, fused=True)
    DeviceCall(optimizer)([weight], 0.25, False)
    scale, flag = optimizer.seen
    assert (scale.dtype, scale.item(), flag.dtype, flag.item()) == (torch.float32, 4.0, torch.float32, 0.0)
    assert weight.tolist() == [0.75, 0.75]
    DeviceCall(Amplified([weight], lr=1.0, fused=True))([weight], 0.25, YES)
    assert weight.tolist() == [0.75, 0.75]
    double = parameter(2, dtype=torch.float64)
    double.grad = torch.ones(2, dtype=torch.float64)
    optimizer = Amplified([double], lr=1.0, fused=True)
    call = DeviceCall(optimizer)
    call([double], 0.1, False)
    assert optimizer.seen[0] is None, "float32 is too coarse for it"
    assert double.tolist() == [0.9, 0.9]
    call([double], 1.0, True)
    assert (optimizer.seen[1].item(), double.tolist()) == (1.0, [0.9, 0.9])


def test_one_that_takes_a_scaler_itself_is_given_none() -> None:
    class Scaled(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, grad_scaler: Any = None) -> Any:
            assert grad_scaler is None
            assert not hasattr(self, "found_inf")
            return super().step(closure)

    weight = parameter(1)
    weight.grad = torch.ones(1)
    DeviceCall(Scaled([weight], lr=1.0, fused=True))([weight], 0.5, False)
    assert weight.tolist() == [0.5]
