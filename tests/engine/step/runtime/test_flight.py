"""What a microbatch keeps between the forward and the backward of a stage."""

from typing import Any

import pytest
import torch
from torch import Tensor

from echelon.engine.step.runtime.flight import (
    Flight,
    LossSums,
    MicrobatchLoss,
    StartGradients,
    Value,
    wanted,
)
from echelon.engine.step.runtime.message import Gradients, Spec
from echelon.nn.autograd.leaves import enter
from tests.cases import stop


def entered(*tensors: Tensor) -> tuple[list[Tensor], Flight]:
    """What a stage sees of inputs that another stage has sent, and its flight."""
    spec, values = Spec.of([tensor.requires_grad_(tensor.is_floating_point()) for tensor in tensors])
    leaves = Value(spec, [value.detach() for value in values]).as_leaves()
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    return [enter(leaf) for leaf in leaves], Flight(inputs, wanted(spec.leaves))


def backward(flight: Flight, *gradients: Tensor | None) -> list[Any]:
    outputs, known = flight.known(Gradients(list(gradients)))
    torch.autograd.backward(outputs, known)
    return [None if gradient is None else gradient.tolist() for gradient in flight.take_gradients()]


def test_gradients_come_back_for_what_wants_one_and_are_taken_once() -> None:
    (x, tokens, y), flight = entered(torch.ones(2), torch.tensor([1, 2]), torch.ones(2))
    value = flight.leave((x * 2 + y * tokens, tokens))
    assert [leaf.dtype for leaf in flight.input_leaves] == [torch.float32, torch.float32]
    assert [leaf.dtype for leaf in flight.output_leaves] == [torch.float32]
    assert all(tensor.grad_fn is None for tensor in value.tensors), "the next stage gets values alone"
    assert backward(flight, torch.ones(2)) == [[2, 2], [1, 2]]
    assert flight.take_gradients() == [None, None]


def test_where_no_gradient_comes_there_is_none_and_not_zeros() -> None:
    (x, y), flight = entered(torch.ones(2), torch.ones(2))
    flight.leave(x + stop(y))
    assert backward(flight, torch.ones(2)) == [[1, 1], None]


def test_outputs_without_a_gradient_are_left_out() -> None:
    (x,), flight = entered(torch.ones(2))
    flight.leave((x * 2, x * 3))
    assert backward(flight, None, torch.ones(2)) == [[3, 3]]


def test_a_stage_may_change_its_input_in_place() -> None:
    (x,), flight = entered(torch.ones(2))
    flight.leave_with_loss(x.mul_(3).sum())
    assert backward(flight, torch.ones(())) == [[3, 3]]


def test_without_gradients_nothing_is_watched() -> None:
    with torch.no_grad():
        (x,), flight = entered(torch.ones(2))
        flight.leave_with_loss(x.sum())
    assert (flight.inputs, flight.outputs) == ([], [])


def test_a_view_of_a_weight_is_passed_on_without_gradients() -> None:
    # torch says that it requires a gradient, and has no way back from it: evaluate ended in an error.
    token = torch.nn.Parameter(torch.ones(1, 2))
    with torch.no_grad():
        flight = Flight()
        value = flight.leave(token.expand(3, 2))
    assert (flight.outputs, flight.output_leaves) == ([], [])
    assert [leaf.wants_gradient for leaf in value.spec.leaves] == [False]
    flight.leave(token.expand(3, 2))
    assert backward(flight, torch.ones(3, 2)) == []
    assert token.grad is not None
    assert token.grad.tolist() == [[3, 3]]


def test_a_backward_pass_starts_from_what_autograd_finds_at_the_root() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for factors, normaliser in (((7,), 49.0), ((3, 0.5), 7.0), ((), 3.0), ((torch.tensor(5.0),), 0.1)):
            root = torch.tensor(0.3, dtype=dtype, requires_grad=True)
            for divisor in (normaliser, torch.tensor(normaliser, dtype=torch.float64)):
                loss = MicrobatchLoss(root, factors, 1, divisor)
                total = loss.total(root)
                (expected,) = torch.autograd.grad(total / loss.divisor(total.dtype), root)
                gradient = StartGradients().of(loss)
                assert (gradient.dtype, gradient.item()) == (dtype, expected.item())


def test_the_gradient_of_a_loss_is_kept_while_it_is_the_same() -> None:
    gradients, root = StartGradients(), torch.tensor(2.0)
    first = gradients.of(MicrobatchLoss(root, (8,), 8, 32.0))
    assert gradients.of(MicrobatchLoss(root * 3, (8,), 8, 32.0)) is first
    assert gradients.of(MicrobatchLoss(root, (8,), 8, 16.0)).item() == 0.5
    assert gradients.of(MicrobatchLoss(root, (4,), 4, 16.0)).item() == 0.25
    gradients.of(MicrobatchLoss(root, (4,), 4, 16.0)).zero_()  # as a hook of the user's may do
    assert gradients.of(MicrobatchLoss(root, (4,), 4, 16.0)).item() == 0.25


@pytest.mark.parametrize("deferred", [False, True])
def test_sums_of_losses_are_those_of_float64(deferred: bool) -> None:
    sums = LossSums(torch.device("cpu"), deferred=deferred)
    sums.add(torch.tensor(0.1), 3, torch.tensor(0.25, dtype=torch.float64))
    sums.add(torch.tensor(0.2), torch.tensor(4), 1.0)
    expected = torch.tensor(0.1).double() + torch.tensor(0.2).double()
    assert sums.row().tolist() == [expected.item(), 7, 1.25]
    sums.add(1.0, 1, 1)
    assert sums.row().tolist() == [expected.item() + 1, 8, 2.25]
