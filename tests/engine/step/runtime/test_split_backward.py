"""A backward pass in two halves leaves what one in a whole does, and each weight hears of it once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon.engine.step.runtime.split_backward import SplitBackward, watch_hooks

X, Y = (3, 4, 6), (3, 4, 6)


class Module(nn.Module):
    """Two inputs to a list of outputs."""

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        raise NotImplementedError


class Perceptron(Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.second(torch.tanh(self.first(x))) + y]


class TransformerBlock(Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.block(x), self.block(y * 2)[:1]]


class Recurrent(Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=2, batch_first=True)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        output, (h, c) = self.lstm(x)
        return [output + y, h, c]


class UsedTwice(Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.last(self.linear(torch.tanh(self.linear(x)))), self.linear(y)]


class SharedWeight(Module):
    """One weight in two modules, transposed in one of them; one also is an output itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [F.linear(self.second(self.first(x)), self.first.weight.t()) + y, self.first.weight * 2]


class OffTheSpine(Module):
    """Outputs, and parts of outputs, that depend on no input; a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale, self.bias = nn.Embedding(4, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.unused = nn.Linear(2, 2)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        positions = self.scale(self.table(torch.arange(4)))
        return [x + positions * self.bias, positions, self.bias.exp(), (y * 3).detach()]


class SeveralOutputs(Module):
    """A node with several outputs, of which not all lead on; an output twice; a weight made from weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 18)
        self.left, self.right = nn.Parameter(torch.randn(6, 2)), nn.Parameter(torch.randn(2, 6))

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        a, b, _ = self.linear(x).chunk(3, -1)
        low = (a + y) @ (self.left @ self.right)
        return [low, low, b.unbind(0)[1]]


class PassedThrough(Module):
    """Inputs that come out as they went in, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.view_as(x), y.view_as(y), self.linear(x)]


MODULES = [
    Perceptron,
    TransformerBlock,
    Recurrent,
    UsedTwice,
    SharedWeight,
    OffTheSpine,
    SeveralOutputs,
    PassedThrough,
]


def training(make: Callable[[], Module], wanting: str = "xy") -> tuple[Module, list[Tensor], list[Tensor]]:
    """A module in float64, the inputs that want gradients, and the outputs that have a way back."""
    torch.manual_seed(0)
    module = make().double()
    x = torch.randn(X, dtype=torch.float64, requires_grad="x" in wanting)
    y = torch.randn(Y, dtype=torch.float64, requires_grad="y" in wanting)
    outputs = [output for output in module.outputs(x, y) if output.requires_grad]
    return module, [tensor for tensor in (x, y) if tensor.requires_grad], outputs


def random_like(tensors: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator) for tensor in tensors]


def gradients(tensors: Any) -> list[Tensor | None]:
    return [tensor.grad for tensor in tensors]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [gradient is None for gradient in found] == [gradient is None for gradient in expected]
    for a, b in zip(found, expected, strict=True):
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("wanting", ["xy", "x", "y", ""])
@pytest.mark.parametrize("make", MODULES)
def test_both_halves_are_the_whole(make: Callable[[], Module], wanting: str) -> None:
    whole, inputs, outputs = training(make, wanting)
    torch.autograd.backward(outputs, random_like(outputs))
    split, its_inputs, other_outputs = training(make, wanting)
    edges = [get_gradient_edge(output) for output in other_outputs]
    backward = SplitBackward(edges, random_like(other_outputs), its_inputs)
    found = backward.for_inputs()
    assert all(gradient is None for gradient in gradients(split.parameters()))
    assert all(gradient is None for gradient in gradients(its_inputs))
    assert_same(found, gradients(inputs))
    backward.for_weights()
    assert_same(gradients(split.parameters()), gradients(whole.parameters()))


@pytest.mark.parametrize("make", MODULES)
def test_every_weight_hears_of_its_gradient_once(make: Callable[[], Module]) -> None:
    module, inputs, outputs = training(make)
    heard: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: heard.__setitem__(name, heard.get(name, 0) + 1)
        )
    backward = SplitBackward([get_gradient_edge(output) for output in outputs], random_like(outputs), inputs)
    backward.for_inputs()
    assert heard == {}
    backward.for_weights()
    used = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert heard == dict.fromkeys(used, 1)
    assert used == {name for name, _ in module.named_parameters() if not name.startswith("unused")}


class Scaled(Module):
    """One weight is used twice, and what hangs beside it needs its values."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.scale = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [torch.tanh(x @ self.matrix) @ (self.matrix * self.scale) + y]


@pytest.mark.parametrize("make", [Perceptron, UsedTwice, Scaled])
def test_weights_may_change_as_soon_as_their_gradient_is_there(make: Callable[[], Module]) -> None:
    whole, _, outputs = training(make)
    torch.autograd.backward(outputs, random_like(outputs))
    split, inputs, outputs = training(make)

    @torch.no_grad()
    def update(parameter: Tensor) -> None:
        parameter.mul_(2)

    for parameter in split.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    backward = SplitBackward([get_gradient_edge(output) for output in outputs], random_like(outputs), inputs)
    backward.for_inputs()
    backward.for_weights()
    assert_same(gradients(split.parameters()), gradients(whole.parameters()))


def test_gradients_add_up_over_microbatches() -> None:
    module, inputs, outputs = training(Perceptron)
    given = random_like(outputs)
    for _ in range(3):
        edges = [get_gradient_edge(output) for output in module.outputs(*inputs)]
        backward = SplitBackward(edges, given, inputs)
        backward.for_inputs()
        backward.for_weights()
    whole, _, other_outputs = training(Perceptron)
    torch.autograd.backward(other_outputs, [3 * gradient for gradient in given])
    assert_same(gradients(module.parameters()), gradients(whole.parameters()))


def test_only_some_outputs_have_a_gradient() -> None:
    """Of the outputs that no one used, no gradient comes: their weights stay without one."""
    module, inputs, outputs = training(SeveralOutputs)
    backward = SplitBackward([get_gradient_edge(outputs[2])], random_like(outputs[2:]), inputs)
    found = backward.for_inputs()
    backward.for_weights()
    assert found[0] is not None
    assert found[1] is None
    assert module.left.grad is None
    assert module.linear.weight.grad is not None


def test_nothing_came_back_at_all() -> None:
    module, inputs, _ = training(Perceptron)
    backward = SplitBackward([], [], inputs)
    assert backward.for_inputs() == [None, None]
    backward.for_weights()
    assert gradients(module.parameters()) == [None] * 4


def test_a_frozen_weight_is_left_alone() -> None:
    module = Perceptron().double()
    module.first.requires_grad_(False)
    x = torch.randn(X, dtype=torch.float64, requires_grad=True)
    (output,) = module.outputs(x, x)
    backward = SplitBackward([get_gradient_edge(output)], random_like([output]), [x])
    assert backward.for_inputs()[0] is not None
    backward.for_weights()
    assert module.first.weight.grad is None
    assert module.second.weight.grad is not None


def test_the_weights_half_does_not_go_through_the_model_again() -> None:
    """It takes the nodes on which weights hang, and none between them: it costs a third, not two."""
    steps: list[str] = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            steps.append("back")
            return gradient

    linear, last = nn.Linear(6, 6), nn.Linear(6, 6)
    x = torch.randn(2, 6, requires_grad=True)
    output = last(Watched.apply(linear(x)))
    backward = SplitBackward([get_gradient_edge(output)], [torch.ones(2, 6)], [x])
    backward.for_inputs()
    assert steps == ["back"]
    backward.for_weights()
    assert steps == ["back"]
    assert linear.weight.grad is not None


Events = list[tuple[str, float]]


def events_of(make: Callable[[Events], Module], *, split: bool) -> tuple[Events, list[Tensor | None]]:
    """What the hooks of a module hear in one backward pass, and the gradients that it leaves."""
    events: Events = []
    with watch_hooks() as watch:
        module, inputs, outputs = training(lambda: make(events))
    given = random_like(outputs)
    if split:
        edges = [get_gradient_edge(output) for output in outputs]
        backward = SplitBackward(edges, given, inputs, is_hooked=watch.is_hooked)
        found = backward.for_inputs()
        backward.for_weights()
    else:
        torch.autograd.backward(outputs, given)
        found = gradients(inputs)
    return events, [*found, *gradients(module.parameters())]


def hear(events: Events, name: str, factor: float | None = None) -> Callable[..., Tensor | None]:
    """A hook on a tensor that says what it hears, and may change it."""

    def hook(gradient: Tensor) -> Tensor | None:
        events.append((name, float(gradient.sum())))
        return None if factor is None else gradient * factor

    return hook


class Hooked(Module):
    """Hooks on the weights, one of which is used twice, and on the node that adds to one."""

    def __init__(self, events: Events) -> None:
        super().__init__()
        self.events = events
        self.first, self.second, self.last = (nn.Linear(6, 6).double() for _ in range(3))
        self.first.weight.register_hook(hear(events, "first", 2))
        self.first.weight.register_post_accumulate_grad_hook(lambda p: hear(events, "added")(p.grad))
        self.second.weight.register_hook(hear(events, "second", -1))
        self.last.bias.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        self.node = self.last.weight.view_as(self.last.weight).grad_fn.next_functions[0][0]
        self.node.register_prehook(lambda gradients: hear(events, "before")(gradients[0]))
        self.node.register_hook(lambda _, gradients: hear(events, "after")(gradients[0]))

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.last(self.second(torch.tanh(self.second(self.first(x))))) + y]


class HookedTensors(Hooked):
    """And on what is computed, beside one that keeps its gradient."""

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        hidden = self.first(x)
        hidden.register_hook(hear(self.events, "hidden", 3))
        self.kept = self.second(hidden)
        self.kept.retain_grad()
        output = self.last(torch.tanh(self.kept))
        output.register_hook(lambda _: hear(self.events, "kept")(self.kept) and None)
        return [output + y]


class HookedNode(Hooked):
    """And on a node on which a weight hangs: what it hears and changes are gradients of both."""

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        hidden = self.second(self.first(x))
        node = hidden.grad_fn
        assert node is not None
        node.register_hook(lambda gradients, _: tuple(g if g is None else 2 * g for g in gradients))
        node.register_prehook(lambda gradients: hear(self.events, "node")(gradients[0]))
        return [self.last(hidden) + y]


class HookedModule(Hooked):
    """And of modules, of which one takes a weight of another."""

    def __init__(self, events: Events) -> None:
        super().__init__(events)
        self.bilinear = nn.Bilinear(6, 6, 6)
        self.bilinear.register_full_backward_hook(lambda _, __, g: hear(events, "module")(g[0]) and None)

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        rows = self.first.weight[:4].expand(3, 4, 6)
        return [self.last(self.second(self.second(self.bilinear(x, rows)))) + y]


class Checkpointed(Hooked):
    """A reentrant checkpoint computes the gradients of its weights itself."""

    def outputs(self, x: Tensor, y: Tensor) -> list[Tensor]:
        return [self.last(checkpoint(lambda x: self.second(self.first(x)), x, use_reentrant=True)) + y]


@pytest.mark.parametrize("make", [Hooked, HookedTensors, HookedNode, HookedModule, Checkpointed])
def test_hooks_run_once_as_in_one_pass(make: Callable[[Events], Module]) -> None:
    """Hooks on weights ran twice: once for the gradient, once when it was added. Those on a node with weights
    saw the two halves of it."""
    expected, whole = events_of(make, split=False)
    found, parts = events_of(make, split=True)
    assert_same(parts, whole)
    assert len(expected) >= 5
    assert [name for name, _ in sorted(found)] == [name for name, _ in sorted(expected)]
    for (_, one), (_, other) in zip(sorted(found), sorted(expected), strict=True):
        assert one == pytest.approx(other, abs=1e-12)


def test_what_is_watched_is_given_back() -> None:
    with watch_hooks() as watch:
        torch.ones(2, requires_grad=True).register_hook(lambda _: None)  # of a weight, which is no matter
        assert not watch.is_hooked
    hooked = torch.ones(2, requires_grad=True) * 2
    hooked.register_hook(lambda _: None)
    hooked.retain_grad()
    assert not watch.is_hooked


def test_both_halves_run_under_the_modes_of_their_caller() -> None:
    """torch.autograd.grad of tensors turns torch.device(…) off, and layers that ran again ran without it."""
    modes: list[int] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Tensor) -> Tensor:
            return 2 * x

        @staticmethod
        def backward(_: Any, *gradients: Tensor) -> Tensor:
            modes.append(len(torch.overrides._get_current_function_mode_stack()))
            return 2 * gradients[0]

    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    with torch.device("cpu"):
        outputs = [get_gradient_edge(Doubled.apply(torch.sin(weight) * Doubled.apply(x)))]
        split = SplitBackward(outputs, [torch.ones(3)], [x])
        (found,) = split.for_inputs()
        split.for_weights()
    assert len(modes) >= 2
    assert set(modes) == {1}
    torch.testing.assert_close(found, 4 * torch.sin(torch.ones(3)))
    torch.testing.assert_close(weight.grad, 4 * torch.cos(torch.ones(3)))
