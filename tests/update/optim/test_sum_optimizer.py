"""What optimizers with sums over whole tensors share: messages, portions, flags, and what they pass over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.collectives import Ledger
from echelon.errors import UserError
from echelon.update.optim import SM3, Adafactor
from echelon.update.optim.exchange import Exchange, Part, Round, whole_box
from echelon.update.optim.sum_optimizer import Entry, Work, portions, rate_of

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
