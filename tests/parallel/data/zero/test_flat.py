"""The flat memory of one unit: equal parts, whole weights that come and go, gradients that are divided."""

import math

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Group, RecordingGroup, buffer_layout
from echelon.parallel.data.buckets import set_gradient_dtype
from echelon.parallel.data.zero.flat import FlatUnit
from tests.groups import DeferredGroup

pytestmark = pytest.mark.usefixtures("packed")


def flat_unit(group: Group, *sizes: int, resident: bool = False) -> FlatUnit:
    """Parameters whose elements are 0, 1, 2, … over all of them."""
    values = torch.arange(float(sum(sizes))).split(sizes)
    named = [(f"p{number}", nn.Parameter(value.clone())) for number, value in enumerate(values)]
    return FlatUnit("unit", named, group, sharded=not resident)


def values_of(unit: FlatUnit) -> list[list[float]]:
    return [parameter.tolist() for _, parameter in unit.parameters]


# The layout.


@pytest.mark.parametrize(
    ("rank", "shard", "runs"),
    [
        (0, [0.0, 1.0, 2.0], [("p0", 0, [0.0, 1.0, 2.0])]),
        (1, [3.0, 4.0, 5.0], [("p0", 3, [3.0]), ("p1", 0, [4.0, 5.0])]),
        (2, [6.0, 0.0, 0.0], [("p1", 2, [6.0])]),
    ],
)
def test_every_rank_has_an_equal_part_and_no_run_reaches_into_the_padding(
    rank: int, shard: list[float], runs: list[tuple[str, int, list[float]]]
) -> None:
    unit = flat_unit(RecordingGroup("data", rank, 3), 4, 3)
    assert unit.flat.numel() == 9
    assert unit.shard.tolist() == shard
    assert [(run.name, run.begin, run.tensor.tolist()) for run in unit.local_parameters()] == runs


def test_a_part_that_is_only_padding_has_no_runs() -> None:
    assert flat_unit(RecordingGroup("data", 3, 4), 2).local_parameters() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parameters_parts_and_gradients_begin_at_multiples_of_256_bytes(
    dtype: torch.dtype, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In both buffers, though their types differ; and gaps are zeros in all memory."""
    monkeypatch.setattr(buffer_layout, "ALIGNMENT", 256)
    monkeypatch.setattr(torch, "empty", lambda size, **options: torch.full((size,), math.nan, **options))
    sizes = (5, 300, 128, 77, 1)
    named = [(f"p{size}", nn.Parameter(torch.full((size,), 2.0, dtype=dtype))) for size in sizes]
    for _, parameter in named:
        set_gradient_dtype(parameter, in_float32=True)
    unit = FlatUnit("unit", named, RecordingGroup("data", rank, 3), sharded=False)
    gradient = unit.gradient.close()
    for (_, parameter), view in zip(named, unit._views._views, strict=True):
        assert parameter.data_ptr() == view.data_ptr()
        assert parameter.storage_offset() * dtype.itemsize % 256 == 0
        assert parameter.grad is not None
        assert parameter.grad.storage_offset() == parameter.storage_offset(), "one layout for both"
        assert parameter.grad.storage_offset() * gradient.itemsize % 256 == 0
    part = unit.gradient.new_part(in_place=True)
    assert unit.shard.storage_offset() * dtype.itemsize % 256 == 0
    assert part.storage_offset() * part.itemsize % 256 == 0
    assert part.shape == unit.shard.shape
    assert float(unit.flat.double().sum()) == 2 * sum(sizes)
    assert int(gradient.count_nonzero()) == 0


def test_gradients_of_low_precision_are_float32_in_every_memory() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    set_gradient_dtype(weight, in_float32=True)
    unit = FlatUnit("unit", [("w", weight)], RecordingGroup("data", 1, 2), sharded=True)
    weight.sum().backward()
    unit.gradient.accumulate(weight)
    assert unit.gradient.take().dtype == torch.float32
    first, second = unit.gradient.new_part(in_place=False), unit.gradient.new_part(in_place=False)
    first.fill_(1.0)
    second.fill_(2.0**-9)
    unit.gradient.add_part(first)
    unit.gradient.add_part(second)
    (run,) = unit.local_parameters()
    run.tensor.grad = unit.part_of_gradient(run)
    assert run.tensor.dtype == torch.bfloat16
    assert run.tensor.grad.tolist() == [1 + 2.0**-9] * 2


def test_parameters_are_views_of_the_buffer() -> None:
    unit = flat_unit(RecordingGroup("data", 0, 2), 4, 3)
    assert values_of(unit) == [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    unit.flat.add_(1)
    assert values_of(unit) == [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]


@pytest.mark.parametrize("resident", [True, False])
def test_the_shard_of_whole_weights_is_a_part_of_them(resident: bool) -> None:
    unit = flat_unit(RecordingGroup("data", 1, 2), 4, resident=resident)
    unit.local_parameters()[0].tensor.data.fill_(9.0)
    assert unit.shard.tolist() == [9.0, 9.0]
    assert unit.flat.tolist() == ([0.0, 1.0, 9.0, 9.0] if resident else [0.0, 1.0, 2.0, 3.0])


def test_runs_of_frozen_parameters_want_no_gradient() -> None:
    frozen = nn.Parameter(torch.arange(4), requires_grad=False)
    unit = FlatUnit("unit", [("codes", frozen)], RecordingGroup("data", 0, 2), sharded=True)
    assert not unit.trainable
    assert [run.tensor.requires_grad for run in unit.local_parameters()] == [False]


# Weights that come and go.


def test_free_gives_the_memory_back_and_leaves_not_a_number() -> None:
    unit = flat_unit(RecordingGroup("data", 0, 2), 4)
    unit.free()
    assert unit.flat.untyped_storage().nbytes() == 0
    assert not unit.is_gathered
    ((_, parameter),) = unit.parameters
    assert parameter.shape == (4,)
    with torch._C.DisableTorchFunctionSubclass():  # as torch's own code, which asks nobody
        assert all(math.isnan(value) for value in parameter.tolist())
    assert unit.shard.tolist() == [0.0, 1.0]


def test_integers_that_are_freed_are_zero() -> None:
    codes = nn.Parameter(torch.arange(1, 5), requires_grad=False)
    unit = FlatUnit("unit", [("codes", codes)], RecordingGroup("data", 0, 2), sharded=True)
    unit.free()
    with torch._C.DisableTorchFunctionSubclass():
        assert codes.tolist() == [0, 0, 0, 0]


def test_resident_weights_are_never_freed() -> None:
    unit = flat_unit(RecordingGroup("data", 0, 2), 4, resident=True)
    unit.free()
    assert unit.is_gathered
    assert values_of(unit) == [[0.0, 1.0, 2.0, 3.0]]


def test_gather_brings_the_shards_together_by_the_time_it_is_waited_for() -> None:
    group = DeferredGroup()
    unit = flat_unit(group, 4)
    unit.free()
    unit.shard.copy_(torch.tensor([7.0, 8.0]))  # an update
    unit.gather()
    unit.gather()
    assert len(group.pending) == 1, "a second gather changes nothing while the first is on the way"
    unit.synchronize()
    assert values_of(unit) == [[7.0, 8.0, 7.0, 8.0]], "every rank has the same shard here"
    unit.synchronize()
    assert group.pending == []


def test_free_waits_for_what_is_on_the_way() -> None:
    """The all-gather would write to memory that somebody else has got by then."""
    group = DeferredGroup()
    unit = flat_unit(group, 4)
    unit.free()
    unit.gather()
    unit.free()
    assert group.pending == []
    assert unit.flat.untyped_storage().nbytes() == 0


def test_reallocate_moves_the_weights_and_leaves_the_old_memory_to_its_holders() -> None:
    unit = flat_unit(RecordingGroup("data", 1, 2), 3, 3, resident=True)
    ((_, first), (_, second)) = unit.parameters
    old = [first.data, second.data]
    unit.reallocate()
    with torch.no_grad():
        for run in unit.local_parameters():
            run.tensor.add_(10)
    assert [values.tolist() for values in old] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert values_of(unit) == [[0.0, 1.0, 2.0], [13.0, 14.0, 15.0]]
    unit.all_gather()
    assert unit.flat.tolist() == [0.0, 1.0, 2.0, 13.0, 14.0, 15.0]


# Gradients.


def give_gradient(unit: FlatUnit, number: int, value: float) -> Tensor:
    """A gradient as autograd leaves it, moved to its place."""
    parameter = unit.parameters[number][1]
    parameter.grad = torch.full_like(parameter, value)
    unit.gradient.accumulate(parameter)
    return parameter.grad


def test_a_gradient_takes_memory_when_it_comes_and_none_after_it_was_taken() -> None:
    unit = flat_unit(RecordingGroup("data", 0, 3), 2, 2)
    assert unit.gradient.buffer is None
    moved = give_gradient(unit, 0, 3.0)
    assert unit.gradient.buffer is not None
    assert moved.data_ptr() == unit.gradient.buffer.data_ptr()
    taken = unit.gradient.take()
    assert taken.tolist() == [3.0, 3.0, 0.0, 0.0, 0.0, 0.0], "zeros for the other parameter and the padding"
    assert unit.gradient.buffer is None
    assert [parameter.grad for _, parameter in unit.parameters] == [None, None]


def test_an_opened_gradient_keeps_its_memory_and_forgets_its_values() -> None:
    unit = flat_unit(RecordingGroup("data", 0, 2), 4)
    give_gradient(unit, 0, 3.0)
    before = unit.gradient.buffer
    unit.gradient.open()
    assert unit.gradient.buffer is before
    assert unit.gradient.close().tolist() == [0.0, 0.0, 0.0, 0.0]


def test_parts_of_several_microbatches_add_up_in_the_memory_of_the_first() -> None:
    unit = flat_unit(RecordingGroup("data", 1, 2), 4)
    parts = [unit.gradient.new_part(in_place=False) for _ in range(3)]
    assert len({part.data_ptr() for part in parts}) == 3
    for part, value in zip(parts, (1.0, 10.0, 100.0), strict=True):
        part.fill_(value)
    for part in parts:
        unit.gradient.add_part(part)
    assert unit.gradient.part is parts[0]
    assert unit.gradient.part.tolist() == [111.0, 111.0]
    unit.gradient.has_part = False  # the next step
    assert unit.gradient.new_part(in_place=False) is parts[0]


def test_a_part_in_place_is_this_rank_s_part_of_the_whole_gradient() -> None:
    unit = flat_unit(RecordingGroup("data", 1, 2), 4)
    give_gradient(unit, 0, 3.0)
    part = unit.gradient.new_part(in_place=True)
    assert unit.gradient.buffer is not None
    assert part.data_ptr() == unit.gradient.buffer[2:].data_ptr()
    unit.gradient.add_part(part)
    assert part.tolist() == [3.0, 3.0]


def test_every_run_finds_its_own_part_of_the_gradient() -> None:
    unit = flat_unit(RecordingGroup("data", 1, 3), 4, 3)
    unit.gradient.new_part(in_place=False).copy_(torch.tensor([30.0, 40.0, 50.0]))
    found = {run.name: unit.part_of_gradient(run).tolist() for run in unit.local_parameters()}
    assert found == {"p0": [30.0], "p1": [40.0, 50.0]}
    resident = flat_unit(RecordingGroup("data", 1, 3), 4, 3, resident=True)
    resident.gradient.new_part(in_place=False).copy_(torch.tensor([30.0, 40.0, 50.0]))
    found = {run.name: resident.part_of_gradient(run).tolist() for run in resident.local_parameters()}
    assert found == {"p0": [30.0], "p1": [40.0, 50.0]}, "though its shard begins inside the buffer"


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_freed_weights_are_not_a_number(dtype: torch.dtype) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    FlatUnit("unit", [("p", parameter)], RecordingGroup("data"), sharded=True).free()
    with torch._C.DisableTorchFunctionSubclass():
        assert bool(parameter.detach().isnan().all())
