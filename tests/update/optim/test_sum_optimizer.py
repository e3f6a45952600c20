"""What optimizers with sums over whole tensors share: messages, portions, flags, and what they pass over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger, RecordingGroup
from echelon.errors import UserError
from echelon.update.optim import SM3, Adafactor
from echelon.update.optim.sum_optimizer import (
    Entry,
    Exchange,
    Part,
    Round,
    Shape,
    StatisticsBuffer,
    Work,
    in_turns,
    portions,
    rate_of,
    whole_box,
    without_ranks,
)

CPU = torch.device("cpu")


class Noting:
    """A group of which this rank is all, and which notes what is summed."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calls: list[tuple[str, list[float]]] = []

    def all_reduce(self, tensor: Tensor, op: str) -> None:
        self.calls.append((op, tensor.tolist()))


def shared(kind: Any, tensor: nn.Parameter, boxes: list[Any], group: Any = None, **options: Any) -> Any:
    """An optimizer that has `boxes` of a 2 × 3 matrix, in `tensor`."""
    part = Part(0, boxes, lambda values: [values] if boxes else [])
    rounds = [] if group is None else [Round(group, 1)]
    optimizer = kind([tensor], **options)
    optimizer.share(Exchange([(2, 3)], {tensor: part}, rounds, torch.float32, CPU))
    return optimizer


def weight(rows: int = 2) -> nn.Parameter:
    tensor = nn.Parameter(torch.arange(3.0 * rows).reshape(rows, 3))
    tensor.grad = torch.ones(rows, 3)
    return tensor


def test_what_ranks_sum_by_hand() -> None:
    group = Noting()
    shared(Adafactor, weight(1), [(slice(0, 1), slice(None))], group).step()
    (first, second) = group.calls
    # Of the one row that is here: its weights, 0² + 1² + 2²; its gradient; and each column.
    assert first == ("sum", [5, 3, 0, 1, 1, 1])
    assert second[0] == "sum"
    assert len(second[1]) == 1


def test_what_ranks_compare_by_hand() -> None:
    group = Noting()
    shared(SM3, weight(1), [(slice(0, 1), slice(None))], group).step()
    assert group.calls == [("max", [1, 0, 1, 1, 1])]


def test_gradients_of_the_engine_s_own_are_used_up() -> None:
    """In memory of their own type; none is taken for an update of others."""
    everything = [whole_box((2, 3))]
    for dtype, is_used in ((torch.float32, True), (torch.bfloat16, False)):
        tensor = nn.Parameter(torch.ones(2, 3, dtype=dtype))
        tensor.grad = torch.full((2, 3), 4.0, dtype=dtype)
        optimizer = shared(Adafactor, tensor, everything)
        assert optimizer.uses_up_gradients
        optimizer.step()
        assert bool((tensor.grad != 4).all()) is is_used
    assert not Adafactor([weight()]).uses_up_gradients


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_what_is_only_padding_is_passed_over(kind: Any) -> None:
    padding, empty = weight(), nn.Parameter(torch.zeros(0, 3))
    optimizer = shared(kind, padding, [])
    optimizer.step()
    assert optimizer.passes_over(padding)
    assert not optimizer.state
    assert not shared(kind, tensor := weight(), [whole_box((2, 3))]).passes_over(tensor)
    plain = kind([empty])
    empty.grad = torch.zeros(0, 3)
    plain.step()
    assert (plain.passes_over(empty), len(plain.state)) == (True, 0)
    assert kind([weight()]).passes_over(weight()), "of which it has not heard"


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_a_closure_is_called_with_gradients(kind: Any) -> None:
    tensor = weight()
    tensor.grad = None
    optimizer = kind([tensor])

    def closure() -> Tensor:
        loss = (tensor * tensor).sum()
        loss.backward()
        return loss.detach()

    before = tensor.detach().clone()
    assert optimizer.step(closure) == (before * before).sum()
    assert not torch.equal(tensor, before)
    assert optimizer.step() is None


def test_complex_parameters_are_refused() -> None:
    tensor = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    tensor.grad = torch.ones_like(tensor)
    with pytest.raises(UserError, match=r"optimizer SM3: a parameter of shape \(2,\) is complex; use real"):
        SM3([nn.Parameter(torch.ones(1))]).check(tensor, tensor.grad)


def entry(num_bytes: int) -> Entry:
    gradients = [torch.empty(num_bytes // 2, dtype=torch.uint8) for _ in range(2)]
    return Entry(Part(0, [], lambda tensor: [tensor]), (), {}, [], gradients)


def test_portions_have_a_megabyte_of_gradients() -> None:
    half, less, whole = entry(2**19), entry(2**19 - 2), entry(2**20)
    assert [len(each) for each in portions([half, half, half])] == [2, 1]
    assert [len(each) for each in portions([half, less, half])] == [3]
    assert [len(each) for each in portions([half, less, half, half, half])] == [3, 2]
    assert [len(each) for each in portions([whole, whole, less])] == [1, 1, 1]
    assert list(portions([])) == []
    on_device = [entry(0)._replace(gradients=[torch.empty(2**25, dtype=torch.uint8, device="meta")])] * 5
    assert [len(each) for each in portions(on_device)] == [2, 2, 1], "64 MiB on a device"


def test_the_rate_is_a_number_or_stays_on_its_device() -> None:
    assert rate_of({"lr": 0.5}, CPU) == 0.5
    there = rate_of({"lr": torch.tensor([0.5])}, CPU)
    assert isinstance(there, Tensor)
    assert (there.shape, there.dtype, float(there)) == ((), torch.float64, 0.5)
    assert rate_of({"lr": torch.tensor(0.5)}, torch.device("meta")) == 0.5


def test_what_is_kept_of_an_update_that_may_be_refused() -> None:
    work = Work(Exchange([], {}, (), torch.float32, CPU))
    values = [torch.tensor([1.0, float("nan")])]
    assert work.kept(3.0) == 3.0
    assert work.kept(torch.tensor(3.0)).dtype == torch.float64
    work.drop_refused(values)
    assert values[0][0] == 1
    for keep, expected in ((1.0, 3.0), (0.0, 0.0)):
        work.keep = torch.tensor(keep, dtype=torch.float64)
        number = work.kept(3.0, torch.float32)
        assert (float(number), number.dtype) == (expected, torch.float32)
        assert float(work.kept(torch.tensor(3.0))) == expected
        assert float(work.kept(torch.tensor(float("inf")))) == (float("inf") if keep else 0.0)
    work.drop_refused(values)
    assert values[0].tolist() == [0, 0]


@pytest.mark.parametrize("kind", [Adafactor, SM3])
def test_memory_of_statistics_is_that_of_the_update_before(kind: Any) -> None:
    optimizer = kind([weight()])
    optimizer.step()
    (work,) = optimizer._work
    before = dict(work.buffers)
    optimizer.step()
    assert optimizer._work[0] is work
    assert all(work.buffers[name] is buffer for name, buffer in before.items())
    assert work.groups == [], "no gradient is held between updates"


def test_parameters_without_gradients_are_left_alone() -> None:
    one, other = weight(), weight()
    other.grad = None
    optimizer = SM3([{"params": [one]}, {"params": [other], "lr": 0.7}])
    optimizer.step()
    assert torch.equal(other, weight())
    assert list(optimizer.state) == [one]


def rows_and_columns(shape: Shape) -> list[Shape]:
    return [(), (shape[0], 1), (1, shape[1])]


def test_one_message_serves_all_parameters_and_another_those_that_are_split() -> None:
    ledger = Ledger()
    shard, tensor = (RecordingGroup(axis, 0, 2, ledger) for axis in ("shard", "tensor"))
    exchange = Exchange(
        [(2, 3), (4, 5)], {}, [Round(shard, 2), Round(tensor, 1)], torch.float64, torch.device("cpu")
    )
    buffer = StatisticsBuffer(exchange, rows_and_columns)
    buffer.reduce("sum")
    assert [ledger.total(axis).count for axis in ("shard", "tensor")] == [1, 1]
    assert ledger.total("shard").payload == 8 * (1 + 2 + 3 + 1 + 4 + 5), "both parameters"
    assert ledger.total("tensor").payload == 8 * (1 + 2 + 3), "the first"


def test_statistics_are_views_of_one_memory_and_are_cleared_together() -> None:
    exchange = Exchange([(2, 3), (4, 5)], {}, (), torch.float32, torch.device("cpu"))
    buffer = StatisticsBuffer(exchange, rows_and_columns)
    buffer[0][1].fill_(1.0)
    buffer[1][2].fill_(2.0)
    assert [tuple(view.shape) for view in buffer[1]] == [(), (4, 1), (1, 5)]
    assert float(buffer[0][0]) == float(buffer[1][0]) == 0
    buffer.memory.zero_()
    assert not buffer[0][1].any()
    assert not buffer[1][2].any()


def test_boxes_that_share_rows_are_added_one_after_the_other() -> None:
    total = torch.zeros(3)
    targets: list[list[Tensor]] = [[total, total[:2]], [total[2:]]]
    in_turns(torch._foreach_add_, targets, [[torch.ones(3), torch.ones(2)], [torch.ones(1)]])
    assert total.tolist() == [2, 2, 2]


def test_parameters_of_each_device_and_type_have_an_exchange() -> None:
    low, single, double = (torch.zeros(2, 3, dtype=d) for d in (torch.bfloat16, torch.float32, torch.float64))
    first, second = without_ranks([low, single, double])
    assert (first.dtype, list(first.parts)) == (torch.float32, [low, single]), "sums of bf16 are in float32"
    assert (second.dtype, list(second.parts)) == (torch.float64, [double])


def test_a_round_begins_behind_those_that_are_skipped() -> None:
    assert Round(RecordingGroup("shard"), 2).skipped == 0
    ledger = Ledger()
    rounds = [Round(RecordingGroup("shard", 0, 2, ledger), 2, 1)]
    buffer = StatisticsBuffer(
        Exchange([(2, 3), (4, 5), (6, 7)], {}, rounds, torch.float64, torch.device("cpu")), rows_and_columns
    )
    buffer.reduce("sum")
    assert ledger.total("shard").payload == 8 * (1 + 4 + 5), "the second"
    assert buffer.dtype == torch.float64


def test_the_larger_of_boxes_that_share_rows() -> None:
    total = torch.tensor([1.0, 5.0, 0.0])
    targets: list[list[Tensor]] = [[total, total[:2]], [total[2:]]]
    values = [[torch.full((3,), 2.0), torch.full((2,), 3.0)], [torch.full((1,), 9.0)]]
    in_turns(torch._foreach_maximum_, targets, values)
    assert total.tolist() == [3, 5, 9]
