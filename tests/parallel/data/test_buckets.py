"""Buckets hold gradients where they are reduced."""

import math

import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.collectives import RecordingGroup
from echelon.collectives.buffer_layout import BufferLayout
from echelon.nn.wrapping import Wrapping
from echelon.parallel.data.all_reduce import AllReduce
from echelon.parallel.data.buckets import (
    Bucket,
    GradientKind,
    PreallocatedMemory,
    fill_buckets,
    gradient_dtype,
    move_in,
    point_at,
    restore_gradient_dtype,
    set_gradient_dtype,
    weight_dtype,
    without_gradients,
)
from echelon.parallel.data.parameter_set import ParameterSet, ShardGroups, SharedGradient
from echelon.parallel.data.sharing import SingleReplica
from echelon.parallel.data.zero.flat import FlatUnit
from echelon.parallel.data.zero.gradient_sums import GradientSums, preallocate
from echelon.parallel.data.zero.zero import Zero
from tests.cases import adamw, mean_loss, vectors
from tests.groups import DeferredGroup
from tests.peak_memory import PeakMemory
from tests.sets import set_of


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes]


def test_parameters_fill_buckets_in_order_up_to_the_limit() -> None:
    buckets = fill_buckets(parameters(4, 3, 2, 1), limit=5 * 4)
    assert [[p.numel() for p in bucket.views] for bucket in buckets] == [[4], [3, 2], [1]]


def test_a_parameter_above_the_limit_has_a_bucket_alone() -> None:
    buckets = fill_buckets(parameters(1, 100, 1), limit=8)
    assert [[p.numel() for p in bucket.views] for bucket in buckets] == [[1], [100], [1]]


def test_types_do_not_share_a_bucket() -> None:
    mixed = parameters(2, dtype=torch.float64) + parameters(2)
    assert [bucket.buffer.dtype for bucket in fill_buckets(mixed, 1000)] == [torch.float64, torch.float32]


def test_gradients_of_low_precision_fill_buckets_of_float32() -> None:
    low, high = parameters(3, 3, dtype=torch.bfloat16), parameters(3)
    for parameter in low:
        set_gradient_dtype(parameter, in_float32=True)
    assert [bucket.buffer.dtype for bucket in fill_buckets([*low, *high], 1000)] == [torch.float32]
    assert len(fill_buckets(low, limit=4 * 5)) == 2, "which are filled by the bytes of gradients"
    (weights,) = fill_buckets(low, 1000, weight_dtype)
    assert weights.buffer.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_view_begins_at_a_multiple_of_256_bytes(dtype: torch.dtype) -> None:
    (bucket,) = fill_buckets(parameters(3, 200, 128, 1, dtype=dtype), 100_000)
    starts = [view.storage_offset() * dtype.itemsize for view in bucket.views.values()]
    assert starts[0] == 0
    assert all(start % 256 == 0 for start in starts)
    bucket.reallocate()
    assert [view.storage_offset() * dtype.itemsize for view in bucket.views.values()] == starts


@pytest.mark.usefixtures("packed")
def test_gradients_land_in_the_buffer_and_add_up_there() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    (bucket,) = fill_buckets([weight], 1000)
    weight.register_post_accumulate_grad_hook(bucket.accumulate)
    for _ in range(2):  # steps
        bucket.open()
        for _ in range(2):
            (weight * torch.arange(6.0).view(2, 3)).sum().backward()
        assert torch.equal(bucket.close(), 2 * torch.arange(6.0))
        assert weight.grad is not None
        assert weight.grad.data_ptr() == bucket.buffer.data_ptr()


@pytest.mark.usefixtures("packed")
def test_a_sparse_gradient_lands_too() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    (bucket,) = fill_buckets([table.weight], 1000)
    table.weight.register_post_accumulate_grad_hook(bucket.accumulate)
    for _ in range(2):
        table(torch.tensor([2, 2])).sum().backward()
    assert bucket.close().tolist() == [0, 0, 0, 0, 4, 4]


def test_what_got_no_gradient_is_zero_and_gaps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that somebody had before holds anything."""
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), math.nan, **options))
    weights = parameters(2, 3)
    bucket = Bucket(weights, torch.float32, BufferLayout([(0, 2), (4, 7)], 8))
    for view in bucket.views.values():
        view.fill_(7.0)  # of the step before
    bucket.open()
    weights[0].grad = torch.ones(2)
    bucket.accumulate(weights[0])
    assert bucket.close().tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


def test_no_parameters_no_buckets() -> None:
    assert fill_buckets([], 1000) == []


def test_a_bucket_that_moves_leaves_the_old_memory_to_its_holders() -> None:
    weights = parameters(2, 3)
    bucket = Bucket(weights, torch.float32)
    with torch.no_grad():
        for number, weight in enumerate(weights):
            weight.fill_(number + 1)
    move_in(bucket)
    old = [weight.data for weight in weights]
    bucket.reallocate()
    point_at(bucket)
    with torch.no_grad():
        bucket.buffer.add_(10)
    assert [weight.tolist() for weight in weights] == [[11.0, 11.0], [12.0, 12.0, 12.0]]
    assert [values.tolist() for values in old] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


# Preallocated memory for gradients on their way: one for any unit, free when its sum has been waited for.


FLOAT32 = GradientKind(torch.float32, torch.device("cpu"))


def test_any_buffer_is_as_large_as_the_largest() -> None:
    memory = PreallocatedMemory([(64, FLOAT32), (1024, FLOAT32)])
    small, large = memory.take(64, FLOAT32), memory.take(1024, FLOAT32)
    assert (small.numel(), large.numel()) == (64, 1024)
    memory.give_back(small)
    again = memory.take(1024, FLOAT32)
    assert again.data_ptr() == small.data_ptr()
    assert {buffer.data_ptr() for buffer in memory.storages()} == {small.data_ptr(), large.data_ptr()}


def test_more_buffers_are_made_where_more_gradients_are_open_and_stay() -> None:
    memory = PreallocatedMemory([(8, FLOAT32)])
    taken = [memory.take(8, FLOAT32) for _ in range(3)]
    pointers = {each.data_ptr() for each in taken}
    assert len(pointers) == 3
    for each in taken:
        memory.give_back(each)
    assert {memory.take(8, FLOAT32).data_ptr() for _ in range(3)} == pointers
    memory.give_back(taken[0])
    with pytest.raises(AssertionError, match="twice"):
        memory.give_back(taken[0])


class Sums:
    """Three units whose sums take effect when they are waited for."""

    def __init__(self) -> None:
        self.group = DeferredGroup("shard", rank=1, size=2)
        self.units = [
            FlatUnit(str(size), [("w", nn.Parameter(torch.zeros(size)))], self.group, sharded=False)
            for size in (100, 300, 200)
        ]
        preallocate([unit.gradient for unit in self.units])
        copies = DeferredGroup("copies", size=2)
        self.sums = GradientSums(ShardGroups(self.group, copies), in_place=False)

    def backward(self, value: float, *, last: bool) -> None:
        for number, unit in enumerate(self.units):
            parameter = unit.parameters[0][1]
            parameter.grad = torch.full_like(parameter, (1 + number) * value)
            unit.gradient.accumulate(parameter)
            self.sums.start(unit.gradient, last=last)

    def pointers(self) -> set[int]:
        return {storage.data_ptr() for storage in self.units[0].gradient.preallocated()}

    def finish(self) -> list[float]:
        """What the parts of all units hold: the sum over two ranks of each of two groups."""
        self.sums.complete()
        values = [float(unit.gradient.part[0]) for unit in self.units if unit.gradient.part is not None]
        for unit in self.units:
            unit.gradient.has_part = False
        return values


def test_sums_of_several_microbatches_are_right_and_take_no_new_memory() -> None:
    sums = Sums()
    sums.backward(1.0, last=False)
    sums.backward(2.0, last=True)
    assert sums.finish() == [12.0, 24.0, 36.0]
    before = sums.pointers()
    with PeakMemory() as memory:
        sums.backward(3.0, last=False)
        sums.backward(4.0, last=True)
        assert sums.finish() == [28.0, 56.0, 84.0]
    assert sums.pointers() == before
    # The gradient that autograd makes, and what the group computes; no buffer of a unit beside them.
    assert memory.peak <= 3 * 4 * 320
    assert len(before) == 4, "two gradients, and two parts that are added"


def test_a_step_that_failed_gives_its_memory_back() -> None:
    sums = Sums()
    sums.backward(1.0, last=False)
    sums.sums.drop()
    for unit in sums.units:
        unit.gradient.drop()
        unit.gradient.has_part = False
    before = sums.pointers()
    sums.backward(2.0, last=True)
    assert sums.finish() == [8.0, 16.0, 24.0]
    assert sums.pointers() == before


@pytest.mark.parametrize("level", [2, 3])
def test_the_buffers_of_a_sharing_are_counted_as_gradients(level: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 32, bias=False))
    parameters = set_of(model, DeferredGroup())
    zero = Zero(parameters, level, Wrapping(), contiguous=True)
    assert sum(each.nbytes for each in zero.storages().gradients) == 2 * 4 * 256


# The type of gradients: float32 for weights below it, and the weights' own again after a close.


BF16, FP32 = torch.bfloat16, torch.float32


def single(parameter: nn.Parameter, *, in_float32: bool = True) -> SingleReplica:
    return SingleReplica(
        ParameterSet("dense", {"w": parameter}, RecordingGroup("data"), sum_in_float32=in_float32)
    )


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (BF16, FP32),
        (torch.float16, FP32),
        (FP32, FP32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
)
def test_gradients_are_at_least_float32_unless_they_are_to_be_the_same(
    dtype: torch.dtype, wide: torch.dtype
) -> None:
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    for in_float32, expected in ((True, wide), (False, dtype), (True, wide)):
        set_gradient_dtype(parameter, in_float32=in_float32)
        assert gradient_dtype(parameter) == expected
        parameter.grad = None
        (3 * parameter).abs().sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.dtype == expected


def sum_of_microbatches(*, in_float32: bool) -> float:
    """The gradients of 64 microbatches: 1 first, then 2⁻⁹, of which bf16 can add none to 1."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = single(weight, in_float32=in_float32)
    sharing.start_step()
    for factor in (1.0, *[2.0**-9] * 63):
        sharing.start_backward(last=False)
        (weight * factor).sum().backward()
        sharing.finish_backward()
    sharing.reduce()
    assert weight.grad is not None
    return float(weight.grad)


def test_microbatches_add_up_without_loss() -> None:
    assert sum_of_microbatches(in_float32=True) == 1 + 63 * 2.0**-9
    assert sum_of_microbatches(in_float32=False) == 1.0


def test_two_uses_in_one_backward_pass_add_up_without_loss() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    single(weight)
    (weight.sum() + (weight * 2.0**-9).sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad) == 1 + 2.0**-9


def kept(sharing: SingleReplica, *weights: nn.Parameter) -> SingleReplica:
    """Where a backward pass was seen that uses these weights once."""
    sharing.keep_products(set(weights))
    return sharing


def test_a_gradient_to_which_nothing_is_added_stays_as_it_was_computed() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = kept(single(weight), weight)
    assert gradient_dtype(weight) == FP32, "of sums"
    for _ in range(2):
        sharing.start_step()
        for number, dtype in enumerate((BF16, FP32, FP32)):
            sharing.start_backward(last=False)
            (weight * (2.0**-9 if number else 1.0)).sum().backward()
            sharing.finish_backward()
            assert weight.grad is not None
            assert weight.grad.dtype == dtype
        assert float(weight.grad) == 1 + 2 * 2.0**-9


def test_a_half_of_a_backward_pass_adds_in_float32_too() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = kept(single(weight), weight)
    sharing.start_step()
    for factor in (1.0, 2.0**-9, 2.0**-9):
        sharing.start_early_backward()
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert float(weight.grad) == 1 + 2 * 2.0**-9


def test_products_are_converted_again_where_a_backward_pass_adds_them_up() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = kept(single(weight), weight)
    sharing.start_step()
    weight.sum().backward()
    sharing.convert_products()
    assert weight.grad_dtype == FP32
    ((weight * 2.0**-9).sum() + (weight * 2.0**-9).sum()).backward()
    assert weight.grad is not None
    assert float(weight.grad) == 1 + 2 * 2.0**-9


def test_an_update_that_is_to_get_float32_does() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = single(weight)
    sharing.updates_products = False
    kept(sharing, weight)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == FP32


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_see_the_type_of_the_sum(register: str) -> None:
    seen, weight = set[torch.dtype](), nn.Parameter(torch.ones(1, dtype=BF16))

    def see(tensor: Tensor) -> None:
        seen.add((tensor if tensor.grad is None else tensor.grad).dtype)

    getattr(weight, register)(see)
    kept(single(weight), weight)
    weight.sum().backward()
    assert seen == {FP32}


def test_what_ranks_sum_is_converted_when_it_is_copied() -> None:
    """Autograd then adds the products of further microbatches to the float32 buffer."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    sharing = AllReduce(set_of(nn.ParameterList([weight]), DeferredGroup()))
    sharing.keep_products({weight})
    assert weight.grad_dtype is None
    (buffer,) = sharing.storages().gradients
    sharing.start_step()
    for factor in (1.0, 2.0**-9, 2.0**-9):
        sharing.start_backward(last=False)
        (weight * factor).sum().backward()
    assert weight.grad is not None
    assert weight.grad.data_ptr() == buffer.data_ptr()
    assert float(buffer[0]) == 1 + 2 * 2.0**-9


def test_what_is_summed_with_other_stages_is_float32_from_the_start() -> None:
    tied, other = (nn.Parameter(torch.ones(1, dtype=BF16)) for _ in range(2))
    shared = [SharedGradient(tied, RecordingGroup("tie"))]
    module = nn.ParameterList([tied, other])
    kept(SingleReplica(set_of(module, RecordingGroup("data"), shared_gradients=shared)), tied, other)
    (tied + other).sum().backward()
    assert tied.grad is not None
    assert other.grad is not None
    assert (tied.grad.dtype, other.grad.dtype) == (FP32, BF16)


def test_a_later_engine_does_not_keep_what_an_earlier_one_has_seen() -> None:
    """It has not seen a backward pass."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    kept(single(weight), weight)
    sharing = single(weight)
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    kept(sharing, weight).close()
    assert gradient_dtype(weight) == BF16


def test_a_closed_strategy_leaves_gradients_in_the_weights_own_type() -> None:
    model = nn.Linear(2, 2).bfloat16()
    sharing = SingleReplica(ParameterSet("dense", dict(model.named_parameters()), RecordingGroup("data")))
    model(torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == FP32
    sharing.close()
    model(torch.ones(1, 2, dtype=BF16)).sum().backward()
    assert model.weight.grad.dtype == BF16


def test_after_the_close_a_model_may_change_its_type() -> None:
    """A gradient of the earlier type would be rounded without a word."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    SingleReplica(ParameterSet("dense", dict(model.named_parameters()), RecordingGroup("data"))).close()
    model.double()
    model(torch.full((1, 1), 1 + 2.0**-40, dtype=torch.float64)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype == torch.float64
    assert float(model.weight.grad) == 1 + 2.0**-40


@pytest.mark.parametrize("original", [FP32, torch.float64, None])
@pytest.mark.parametrize("in_float32", [True, False])
def test_a_type_of_the_user_s_own_comes_back(original: torch.dtype | None, in_float32: bool) -> None:
    """It was lost: gradients were of the type that they were computed in."""
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    weight.grad_dtype = original
    single(weight, in_float32=in_float32)  # an engine that was not closed
    sharing = single(weight, in_float32=in_float32)
    assert gradient_dtype(weight) == (FP32 if in_float32 else BF16)
    sharing.close()
    assert weight.grad_dtype == original


def test_a_gradient_of_before_does_not_keep_its_type() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    weight.sum().backward()
    sharing = single(weight)
    sharing.start_step()
    weight.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == FP32
    restore_gradient_dtype(weight)
    assert weight.grad is None


def test_weights_of_float32_are_left_as_they_are() -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    gradient = weight.grad
    single(weight)
    assert weight.grad is gradient


@pytest.mark.parametrize(("choice", "size"), [("", 4), ("gradients=same", 2)])
def test_the_memory_of_gradients_is_in_the_table(choice: str, size: int) -> None:
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5))
    plan = f"precision=bf16 microbatches=2 {choice}"
    with echelon.parallelize(model, plan, optimizer=adamw, loss=mean_loss) as engine:
        engine.step(vectors(0))
        memory = engine.memory().now
    count = sum(p.numel() for p in model.parameters())
    assert (memory["parameters"], memory["gradients"]) == (2 * count, size * count)


def test_gradients_that_were_set_aside_come_back_after_an_error_too() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first.sum().backward()
    gradient = first.grad

    def fail() -> None:
        assert first.grad is None
        raise RuntimeError("failed on purpose")

    with pytest.raises(RuntimeError, match="failed on purpose"), without_gradients([first, second]):
        fail()
    assert first.grad is gradient
    assert second.grad is None
