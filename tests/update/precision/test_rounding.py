"""Stochastic rounding: unbiased, exact where it can be, and the same however the elements are split."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.errors import UserError
from echelon.launching import Ranks
from echelon.nn.hashing import hash_of
from echelon.state.ownership import LocalParameter, OwnedSlice, Slice, own_run, run_slices, whole_slice
from echelon.update.precision import flat_memory, rounding
from echelon.update.precision.optimizer_call import HostCall
from echelon.update.precision.rounding import (
    ElementRuns,
    KeyedRounding,
    Placement,
    RoundingStepper,
    round_stochastically,
    runs_of,
    whole_run,
)
from tests.peak_memory import PeakMemory

CPU = torch.device("cpu")


def rounded(value: Tensor, key: int = 1) -> Tensor:
    """All of a parameter, rounded."""
    weight = torch.empty(value.shape, dtype=torch.bfloat16)
    whole = OwnedSlice(whole_slice("w", value), torch.empty(value.shape, device="meta"))
    round_stochastically(weight, value, key, runs_of([whole], CPU))
    return weight


def test_the_mean_over_many_keys_is_the_value() -> None:
    """Between two neighbours, each is drawn as often as its distance says: 1024 draws are within 5 sigma."""
    values = torch.randn(64) * torch.logspace(-20, 20, 64)
    total = torch.zeros(64, dtype=torch.float64)
    num_keys = 1024
    for key in range(num_keys):
        total += rounded(values, hash_of(key)).double()
    step = values.abs().double() * 2.0**-7  # at least the distance of two neighbours
    assert ((total / num_keys - values.double()).abs() <= 5 * step / 2 / num_keys**0.5).all()
    nearest = values.bfloat16().double()
    assert ((nearest - values.double()).abs() > 5 * step / 2 / num_keys**0.5).sum() > 32, (
        "which nearest is not"
    )


def test_only_the_two_neighbours_are_drawn() -> None:
    values = torch.randn(1000)
    down = (values.view(torch.int32) >> 16 << 16).view(torch.float32)
    up = ((values.view(torch.int32) >> 16) + 1 << 16).view(torch.float32)
    drawn = rounded(values).float()
    assert ((drawn == down) | (drawn == up)).all()
    assert (drawn == down).any()
    assert (drawn == up).any()


def test_what_bf16_can_hold_stays() -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)  # each bf16 there is
    stays = rounded(every.float())
    assert torch.equal(stays.isnan(), every.isnan())
    is_number = ~every.isnan()
    assert torch.equal(stays[is_number].view(torch.int16), every[is_number].view(torch.int16))


def test_what_is_not_a_number_stays_so() -> None:
    """Also where its bits are in the lower half alone, or a carry would run through all of them."""
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    for key in range(50):
        assert rounded(bits.view(torch.float32), hash_of(key)).isnan().all()


@pytest.mark.parametrize("tile", [1 << 16, 8])
def test_parts_are_rounded_as_the_whole(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, columns, and runs of a flattened parameter that begin anywhere."""
    monkeypatch.setattr(rounding, "_CPU_TILE", tile)
    value = torch.randn(6, 7, 5)
    whole = rounded(value)
    for dim in range(3):
        part = value.narrow(dim, 1, 3).contiguous()
        box = whole_slice("w", value)
        offsets = tuple(int(d == dim) for d in range(3))
        box = box._replace(offsets=offsets, sizes=tuple(part.shape))
        weight = torch.empty(part.shape, dtype=torch.bfloat16)
        runs = runs_of([OwnedSlice(box, torch.empty(part.shape, device="meta"))], CPU)
        round_stochastically(weight, part, 1, runs)
        assert torch.equal(weight, whole.narrow(dim, 1, 3))
    for begin, end in [(0, 210), (3, 4), (17, 101), (34, 36), (1, 209)]:
        part = value.flatten()[begin:end]
        boxes = own_run(torch.empty(end - begin, device="meta"), run_slices("w", (6, 7, 5), begin, end))
        weight = torch.empty(end - begin, dtype=torch.bfloat16)
        round_stochastically(weight, part, 1, runs_of(boxes, CPU))
        assert torch.equal(weight, whole.flatten()[begin:end])


def test_memory_in_another_order_is_rounded_alike() -> None:
    value = torch.randn(4, 3, 2, 2)
    moved = value.contiguous(memory_format=torch.channels_last)
    weight = torch.empty_like(moved, dtype=torch.bfloat16)
    runs = runs_of([OwnedSlice(whole_slice("w", value), torch.empty(value.shape, device="meta"))], CPU)
    round_stochastically(weight, moved, 1, runs)
    assert torch.equal(weight, rounded(value))
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_padding_is_rounded_to_the_nearest() -> None:
    value = torch.randn(10)
    box = whole_slice("w", value[:6])
    weight = torch.empty(10, dtype=torch.bfloat16)
    round_stochastically(weight, value, 1, runs_of([OwnedSlice(box, torch.empty(6, device="meta"))], CPU))
    assert torch.equal(weight[6:], value[6:].bfloat16())
    assert torch.equal(weight[:6], rounded(value[:6]))


def test_keys_draw_different_noise() -> None:
    value = torch.randn(1000)
    first, second = rounded(value, hash_of(1)), rounded(value, hash_of(2))
    changed = (first != second).float().mean()
    assert 0.2 < changed < 0.5, "a third, where the lower half is uniform"


def shown(runs: list[ElementRuns]) -> list[tuple[list[int], list[int], int]]:
    return [(each.in_part.tolist(), each.in_whole.tolist(), each.length) for each in runs]


def box(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> OwnedSlice:
    return OwnedSlice(Slice("w", "value", shape, offsets, sizes), torch.empty(sizes))


def test_columns_are_a_run_of_each_row() -> None:
    assert shown(runs_of([box((3, 8), (0, 4), (3, 4))], CPU)) == [([0, 4, 8], [4, 12, 20], 4)]


def test_rows_are_one_run() -> None:
    assert shown(runs_of([box((3, 8), (1, 0), (2, 8))], CPU)) == [([0], [8], 16)]
    assert shown(runs_of([box((3, 8), (0, 0), (3, 8))], CPU)) == [([0], [0], 24)]
    assert shown(runs_of([box((), (), ())], CPU)) == [([0], [0], 1)]


def test_the_last_dim_that_is_cut_ends_a_run() -> None:
    assert shown(runs_of([box((2, 4, 3), (0, 1, 0), (2, 2, 3))], CPU)) == [([0, 6], [3, 15], 6)]
    assert shown(runs_of([box((2, 2, 4), (1, 0, 1), (1, 2, 2))], CPU)) == [([0, 2], [9, 13], 2)]
    assert shown(runs_of([box((2, 2, 4), (0, 0, 3), (2, 2, 1))], CPU)) == [([0, 1, 2, 3], [3, 7, 11, 15], 1)]


def test_boxes_of_a_flat_part_begin_where_they_lie_and_empty_ones_are_left_out() -> None:
    boxes = own_run(torch.empty(7), run_slices("w", (3, 4), 2, 9))
    assert shown(runs_of(boxes, CPU)) == [([0], [2], 2), ([2], [4], 4), ([6], [8], 1)]
    assert runs_of([box((0, 3), (0, 0), (0, 3))], CPU) == []


def test_a_whole_parameter_is_one_run() -> None:
    assert shown([whole_run(torch.empty(2, 3))]) == [([0], [0], 6)]
    assert whole_run(torch.empty(1)).in_part.dtype == torch.int64


Warm = Callable[[int], Ranks]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SIZES = (3, 5, 2)


def placement(name: str, tensor: Tensor) -> Placement:
    whole = OwnedSlice(whole_slice(name, tensor), torch.empty(tensor.shape, device="meta"))
    return Placement.of(name, runs_of([whole], CPU))


def make_stepper(make: Make, values: list[Tensor], **options: Any) -> RoundingStepper:
    weights = [nn.Parameter(value.bfloat16()) for value in values]
    for weight in weights:
        weight.grad_dtype = torch.float32
    local = [LocalParameter(str(index), weight, weight) for index, weight in enumerate(weights)]
    placements = {each.tensor: placement(each.name, each.tensor) for each in local}
    return RoundingStepper(make(weights), local, placements, KeyedRounding(7), **options)


def run(
    stepper: RoundingStepper, gradients: list[Tensor | None], number: int = 0, **options: Any
) -> list[Tensor]:
    for each, gradient in zip(stepper._local, gradients, strict=True):
        each.tensor.grad = None if gradient is None else gradient.clone()
    stepper.start_update(number)
    stepper.step(1.0, **options)
    return [each.tensor.detach().clone() for each in stepper._local]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("portion", [1, 2**26])
def test_an_update_is_that_of_float32_rounded(
    deferred: bool, portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written out: float32 copies of the weights, the optimizer, and noise for each element."""
    monkeypatch.setattr(rounding, "_PORTION", portion)
    make = partial(torch.optim.AdamW, lr=0.1)
    values = [torch.randn(size) for size in SIZES]
    stepper = make_stepper(make, values, deferred=deferred)
    copies = [nn.Parameter(value.bfloat16().float()) for value in values]
    optimizer = make(copies)
    for step in range(4):
        gradients = [torch.randn(size) if (index + step) % 3 else None for index, size in enumerate(SIZES)]
        weights = run(stepper, gradients, step)
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.grad = gradient
        optimizer.step()
        for index, (copy, weight) in enumerate(zip(copies, weights, strict=True)):
            expected = torch.empty_like(weight)
            key = hash_of(7, step + 1, hash_of(*str(index).encode()))
            round_stochastically(expected, copy.detach(), key, placement("", copy).runs)
            assert torch.equal(weight, expected)
            copy.data = weight.float()
    state = stepper.state(stepper._local[0])
    assert state["exp_avg"].dtype == torch.float32
    assert "master" not in state


@pytest.mark.parametrize("skip", [True, torch.tensor(True)])
def test_a_skipped_update_changes_nothing(skip: Any) -> None:
    stepper = make_stepper(partial(torch.optim.SGD, lr=0.1), [torch.randn(100)], deferred=True)
    before = stepper._local[0].tensor.detach().clone()
    assert torch.equal(run(stepper, [torch.randn(100)], skip=skip)[0], before)


def test_updates_that_are_too_small_for_bf16_add_up() -> None:
    """Rounded to the nearest, a weight of 1 stays where it is if it changes by less than 2⁻⁹."""
    num_steps, rate = 500, 2.0**-11
    make = partial(torch.optim.SGD, lr=rate)
    stepper = make_stepper(make, [torch.ones(256)])
    nearest = torch.ones(256, dtype=torch.bfloat16)
    for step in range(num_steps):
        (weight,) = run(stepper, [torch.ones(256)], step)
        nearest = (nearest.float() - rate).bfloat16()
    assert torch.equal(nearest, torch.ones(256, dtype=torch.bfloat16))
    expected = 1 - num_steps * rate
    assert weight.float().mean() == pytest.approx(expected, abs=0.01)
    assert 0 < weight.float().std() < 0.05


def test_only_a_portion_has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    size, number = 2**18, 8
    monkeypatch.setattr(rounding, "_PORTION", size * 4)
    stepper = make_stepper(partial(torch.optim.SGD, lr=0.1), [torch.randn(size) for _ in range(number)])
    gradients: list[Tensor | None] = [torch.ones(size) for _ in range(number)]
    run(stepper, gradients)
    for each, gradient in zip(stepper._local, gradients, strict=True):
        each.tensor.grad = gradient
    with PeakMemory() as memory:
        stepper.step(1.0)
    assert memory.peak < 4 * size * 4, "a copy of 8, and tiles of noise"


def test_portions_are_as_large_as_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [torch.ones(size) for size in (2, 2, 1, 9, 1, 3)]
    stepper = make_stepper(partial(torch.optim.SGD, lr=1.0), shapes)
    seen: list[list[int]] = []
    monkeypatch.setattr(stepper, "_step", lambda weights, *_: seen.append([each.numel() for each in weights]))

    def sizes(limit: int) -> list[list[int]]:
        monkeypatch.setattr(rounding, "_PORTION", limit)
        seen.clear()
        for each in stepper._local:
            each.tensor.grad = torch.ones(each.tensor.shape)
        stepper.step(1.0)
        return list(seen)

    assert rounding._PORTION == 2**26
    assert sizes(4 * 4) == [[2, 2], [1], [9], [1, 3]], "exactly the limit fits"
    assert sizes(4 * 4 - 1) == [[2], [2, 1], [9], [1], [3]]
    assert sizes(1000) == [[2, 2, 1, 9, 1, 3]]
    assert list(flat_memory.portions([], len, 1)) == []


def test_of_a_unit_no_other_weight_is_updated_and_copies_take_no_memory_between() -> None:
    stepper = make_stepper(partial(torch.optim.SGD, lr=1.0), [torch.ones(2), torch.ones(3)])
    first, second = stepper._local
    for each in (first, second):
        each.tensor.grad = torch.ones(each.tensor.shape)
    stepper.start_update(0)
    stepper.step(1.0, unit=[second])
    assert (first.tensor.tolist(), second.tensor.tolist()) == ([1.0] * 2, [0.0] * 3)
    assert type(stepper._call) is HostCall
    copies = [stepper.updated(each) for each in stepper._local]
    assert [copy.grad for copy in copies] == [None, None]
    assert [copy.untyped_storage().nbytes() for copy in copies] == [4, 4]


def test_an_optimizer_that_somebody_watches_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "_PORTION", 1)
    stepper = make_stepper(partial(torch.optim.SGD, lr=1.0), [torch.ones(2), torch.ones(3)])
    calls: list[int] = []
    stepper.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert [weight.tolist() for weight in run(stepper, [torch.ones(2), torch.ones(3)])] == [
        [0.0] * 2,
        [0.0] * 3,
    ]
    assert calls == [1]


class Layers(nn.Sequential):
    """Gradients of sums over few small integers are exact, in whichever order they are added."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
        for number, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel()) * 5 % 7 - 3 + number
            parameter.data.copy_(values.view_as(parameter) / 4)


def batch() -> tuple[Tensor, Tensor]:
    return (torch.arange(8 * 4).view(8, 4) * 3 % 5 - 2).float(), torch.zeros(8, 3)


def mean_of_sums(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).sum(-1).mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def train(plan: str) -> dict[str, Tensor]:
    engine = echelon.parallelize(
        Layers(), f"precision=bf16 masters=false {plan}", optimizer=sgd, loss=mean_of_sums, smallest_unit=0
    )
    engine.step(engine.local(batch()))  # later gradients are of weights that are no such integers
    weights = engine.full_state_dict()
    engine.close()
    return weights


def test_the_plan_does_not_decide_how_weights_are_rounded(warm_ranks: Warm) -> None:
    """Where gradients are the same to the last bit, weights are."""
    expected = train("")
    assert any(not torch.equal(value, Layers().state_dict()[name]) for name, value in expected.items())
    plans = [f"data=2 zero={zero}" for zero in range(4)]
    plans += ["data=2 zero=1 update=backward", "pipeline=2 microbatches=2 update=last-backward"]
    for plan in plans:
        for weights in warm_ranks(2).run(train, plan):
            for name, value in expected.items():
                assert torch.equal(weights[name], value), (plan, name)


def counted(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sample whose target is -100 does not count."""
    counts = target[:, 0] != -100
    return ((output - target).sum(-1) * counts).sum(), counts.sum()


def test_a_step_that_was_refused_changes_no_noise_of_later_ones() -> None:
    """In a rehearsal nobody drew, and without one a refused step did: the plan decided."""
    results = []
    for update in ("step", "backward"):
        plan = f"precision=bf16 masters=false update={update}"
        with echelon.parallelize(Layers(), plan, optimizer=sgd, loss=counted) as engine:
            with pytest.raises(UserError, match="no replica had a sample"):
                engine.step((batch()[0], torch.full((8, 3), -100.0)))
            engine.step(batch())
            results.append(engine.full_state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name
