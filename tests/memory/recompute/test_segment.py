"""Layers that drop what autograd saves: gradients are the same to the bit, and nothing runs too often."""

import gc
import os
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon.engine.step.runtime.flight import get_gradient_edge
from echelon.engine.step.runtime.split_backward import SplitBackward
from echelon.errors import UserError
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.memory.recompute.segment import Run
from echelon.nn.autograd.second_run import once
from tests.memory.recompute.chains import assert_same, recompute, settings, train, vectors


class Block(nn.Module):
    """Counts its calls, in a list that no second run puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 9), nn.Linear(9, 6), nn.LayerNorm(6)
        self.log: list[str] = []

    @property
    def calls(self) -> int:
        return self.log.count("call")

    @property
    def ends(self) -> int:
        return self.log.count("end")

    def forward(self, x: Tensor) -> Tensor:
        self.log.append("call")
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        self.log.append("end")
        return x


def blocks(number: int = 4) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(number)))


@pytest.mark.slow_cases("sizes1", "sizes2", "sizes4")
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2], [4], [3], [1, 2]])
def test_gradients_are_the_same_to_the_last_bit(sizes: list[int]) -> None:
    assert_same(train(blocks, sizes), train(blocks, []))


def test_a_layer_runs_again_once_for_a_backward_pass() -> None:
    model = blocks().double()
    recompute(list(model), [2, 1])
    loss = model(vectors(0)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert [block.calls for block in model] == [2, 2, 2, 1]


def test_a_backward_pass_in_two_halves_runs_a_layer_again_once() -> None:
    results: list[list[Tensor]] = []
    for sizes in ([], [1, 2, 1]):
        torch.manual_seed(0)
        model = blocks().double()
        recompute(list(model), sizes)
        x = vectors(0).requires_grad_()
        entered = x * 1
        loss = model(entered).square().sum()
        split = SplitBackward([get_gradient_edge(loss)], [torch.ones_like(loss)], [x])
        (for_input,) = split.for_inputs()
        assert for_input is not None
        assert all(p.grad is None for p in model.parameters())
        split.for_weights()
        results.append([for_input, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert [block.calls for block in model] == [2, 2, 2, 2]
    assert len(results[0]) == len(results[1]) == 25
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_second_run_ends_when_it_has_all_that_is_asked_for() -> None:
    check = SecondRunCheck()
    model = blocks(1).double()
    recompute(list(model), [1], settings(check))
    model(vectors(0)).sum().backward()
    assert (model[0].calls, model[0].ends) == (2, 2), "the first step compares outputs"
    check.check_first_step()
    model(vectors(1)).sum().backward()
    assert (model[0].calls, model[0].ends) == (4, 3), "the product of the last matrix is not needed"


def test_what_is_not_differentiated_is_not_dropped() -> None:
    model = blocks(1).double()
    recompute(list(model), [1])
    with torch.no_grad():
        model(vectors(0))
    assert model[0].calls == 1


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Of all storages that the graph of an output holds, without those of weights."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            held[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(held.values())


@pytest.mark.parametrize(("sizes", "inputs"), [([1, 1, 1, 1], 4), ([2, 2], 2), ([4], 1), ([3, 1], 2)])
def test_one_input_is_kept_for_each_segment(sizes: list[int], inputs: int) -> None:
    model, x = blocks().double(), vectors(0)
    recompute(list(model), sizes)
    assert saved_bytes(model, x) == inputs * x.nbytes


def test_tensors_are_released_with_their_places() -> None:
    """A matrix's input is gone when its gradient is there: the backward pass needs less and less."""
    model = blocks(1).double()
    recompute(list(model), [1])
    sizes: list[int] = []
    output = model(vectors(0))
    (run,) = alive_runs()
    find = weakref.ref(run)  # a hook that held the run would keep the model alive, and the model the hook
    for matrix in (model[0].up, model[0].down):
        matrix.weight.register_post_accumulate_grad_hook(lambda _: sizes.append(len(find()._filled)))
    output.sum().backward()
    assert sizes[0] > sizes[1] > 0
    assert run._filled == {}


def alive_runs() -> list[Run]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, Run)]


@pytest.mark.parametrize("compares", [True, False])
def test_an_input_is_freed_when_its_layer_has_gone_back(compares: bool) -> None:
    """Without the garbage collector, which a GPU's memory cannot wait for."""
    check = SecondRunCheck()
    model = blocks(3).double()
    recompute(list(model), [1, 1, 1], settings(check))
    check.is_open = compares
    inputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    for block in model:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
        block.norm.bias.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(storage() is not None for storage in inputs))
        )
    gc.disable()
    try:
        model(vectors(0)).sum().backward()
    finally:
        gc.enable()
    assert alive == [2, 1, 0]


def test_a_second_run_uses_up_what_it_was_called_with() -> None:
    class Shift(nn.Module):
        """Autograd does not save its input."""

        def forward(self, x: Tensor) -> Tensor:
            return (x + 1).exp()

    model = nn.Sequential(nn.Linear(6, 6), Shift()).double()
    recompute([model[1]], [1])
    inputs: list[weakref.ref[object]] = []
    model[1].register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    loss = model(vectors(0)).sum()
    assert inputs[0]() is not None
    loss.backward(retain_graph=True)
    assert inputs[0]() is None


def test_a_graph_without_a_backward_pass_is_freed() -> None:
    model = blocks().double()
    recompute(list(model), [2, 2])
    output = model(vectors(0))
    (first, second) = [weakref.ref(run) for run in alive_runs()]
    gc.disable()
    try:
        del output
        assert (first(), second()) == (None, None)
    finally:
        gc.enable()


class Between(nn.Sequential):
    """Does something between its layers, also in place, and hands the same mask to each."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self):
            x = layer(x)
            if index == 1:
                x = x * 2
            if index == 2:
                x.mul_(3)
        return x


def test_what_runs_between_layers_is_not_part_of_a_segment() -> None:
    def make() -> nn.Sequential:
        return Between(*(Block() for _ in range(5)))

    assert_same(train(make, [5]), train(make, []))


def test_a_model_may_differentiate_between_its_layers() -> None:
    """The layers before have run again when the next one is called."""

    class Corrected(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for index, layer in enumerate(self):
                x = layer(x)
                if index == 1:
                    weight = self[0].up.weight
                    (gradient,) = torch.autograd.grad(x.square().mean(), weight, create_graph=True)
                    x = x + gradient.mean()
                if index == 2:
                    torch.autograd.grad(x.sum(), self[2].up.weight, retain_graph=True)
            return x

    def make() -> nn.Sequential:
        return Corrected(*(Block() for _ in range(5)))

    assert_same(train(make, [5]), train(make, []))


def test_a_layer_that_is_called_out_of_turn_runs_by_itself() -> None:
    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](self[0](self[1](self[0](x))))

    def make() -> nn.Sequential:
        return Twice(Block(), Block(), Block())

    assert_same(train(make, [3]), train(make, []))


class InPlace(nn.Module):
    """Overwrites its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(x.detach().sigmoid()).relu_()


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [4], [1, 3]])
def test_a_layer_may_overwrite_its_input(sizes: list[int]) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Linear(6, 6), InPlace(), Block(), nn.ReLU(inplace=True))

    assert_same(train(make, sizes), train(make, []))


def test_an_input_that_somebody_overwrites_later_is_found() -> None:
    model = blocks(1).double()
    recompute(list(model), [1])
    x = vectors(0).requires_grad_() * 1
    loss = model(x).sum()
    x.data.mul_(1)  # leaves no mark
    x.detach().mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after the forward pass"):
        loss.backward()


def test_an_argument_that_is_first_overwritten_later_is_refused() -> None:
    class Sometimes(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * x.detach() if self.calls == 1 else x.mul_(x.detach().clone())

    model = nn.Sequential(nn.Linear(6, 6), Sometimes()).double()
    recompute(list(model), [1, 1])
    model(vectors(0))
    with pytest.raises(UserError, match="Sometimes changes an argument in place that it has not changed"):
        model(vectors(0))


class Mask(nn.Module):
    """Takes several arguments in several forms, the same one twice, and returns a structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, value: tuple[Tensor, Tensor], *, scale: float, other: Tensor) -> dict[str, Tensor]:
        x, mask = value
        is_same = other is x
        return {"x": torch.tanh(self.linear(x)) * mask * scale + is_same * other, "mask": mask}


def test_arguments_of_any_form() -> None:
    class Model(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            value = {"x": x, "mask": (x > 0).double()}
            for index, layer in enumerate(self):
                value = layer((value["x"], value["mask"]), scale=0.5 + index, other=value["x"])
            return value["x"]

    def make() -> nn.Sequential:
        return Model(Mask(), Mask(), Mask(), Mask())

    for sizes in ([1, 1, 1, 1], [2, 2], [4]):
        assert_same(train(make, sizes), train(make, []))


def test_objects_with_tensors_that_torch_cannot_see_are_refused() -> None:
    class Cache:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Layer(nn.Module):
        def forward(self, cache: Cache) -> Tensor:
            return cache.x * 2

    layer = Layer()
    recompute([layer], [1])
    with pytest.raises(UserError, match=r"takes a Cache that holds tensors .* register the class"):
        layer(Cache(torch.ones(2, requires_grad=True)))


def test_a_second_run_that_saves_something_else_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self, again: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.ways = [again, lambda x: x.sin().exp()]

        def forward(self, x: Tensor) -> Tensor:
            return self.ways.pop()(x)

    for again, what in (
        (lambda x: x.sin().exp().exp(), "saved more than 2 tensors"),
        (lambda x: x.sin(), "saved 1 tensors instead of 2"),
        (lambda x: (x.sin().exp(), x), "returned other tensors when it ran again"),
        (lambda x: x.sin() * once(lambda: 1), "asked for more results that are computed once when it ran"),
        (lambda x: x.sin()[:2].exp(), r"saved a tensor of Form\(shape=torch.Size\(\[2, 6\]\)"),
    ):
        layer = Changing(again)
        recompute([layer], [1])
        loss = layer(vectors(0).requires_grad_()).sum()
        with pytest.raises(UserError, match=f"Changing {what}"):
            loss.backward()


def test_a_second_run_that_returns_something_else_is_found_in_the_first_step() -> None:
    class Clock(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().exp() * int.from_bytes(os.urandom(4), "little")

    check = SecondRunCheck()
    model = nn.Sequential(Block().double(), Clock())
    recompute(list(model), [1, 1], settings(check))
    model(vectors(0)).sum().backward()
    with pytest.raises(UserError, match="recompute: Clock returned something else when it ran again"):
        check.check_first_step()
    check.check_first_step()


class Differentiating(nn.Module):
    """Differentiates something in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return x - gradient


@pytest.mark.parametrize("sizes", [[1, 1, 1], [3]])
def test_a_layer_may_differentiate_in_its_forward(sizes: list[int]) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(Block(), Differentiating(), Block())

    assert_same(train(make, sizes), train(make, []))


@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [2, 2]])
def test_gradients_of_gradients(sizes: list[int]) -> None:
    def step(model: nn.Module, number: int) -> None:
        x = vectors(number).requires_grad_()
        output = model(x)
        (gradient,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        (output.mean() + gradient.square().mean()).backward()

    assert_same(train(blocks, sizes, step=step), train(blocks, [], step=step))


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside_of_a_layer(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(checkpoint(self.inner, x, use_reentrant=reentrant) * x)

    def make() -> nn.Sequential:
        return nn.Sequential(Block(), Checkpointed(), Checkpointed())

    for sizes in ([1, 1, 1], [3]):
        assert_same(train(make, sizes), train(make, []))


def test_hooks_of_a_layer_run_once() -> None:
    calls: list[str] = []

    def make() -> nn.Sequential:
        model = blocks(3)
        model[1].register_forward_pre_hook(lambda _, args: (calls.append("before"), (args[0] + 1,))[1])
        model[1].register_forward_hook(lambda _m, _a, output: (calls.append("after"), output * 2)[1])
        return model

    with_segments = train(make, [3], steps=1)
    assert calls == ["before", "after"]
    assert_same(with_segments, train(make, [], steps=1))


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise ValueError("on purpose")
            return x * x

    model = nn.Sequential(Block(), Failing(), Block()).double()
    recompute(list(model), [3])
    with pytest.raises(ValueError, match="on purpose"):
        model(vectors(0))
    model[1].fails = False
    model(vectors(0)).sum().backward()
    assert [model[0].calls, model[2].calls] == [3, 2]


class Scaled(nn.Module):
    """Multiplies by how often it was called."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() * self.calls


def test_a_second_run_counts_from_where_its_first_began() -> None:
    layer, gradients = Scaled(), []
    for is_wrapped in (False, True):
        if is_wrapped:
            layer.calls = 0
            recompute([layer], [1])
        x = vectors(0).requires_grad_()
        outputs = [layer(x) for _ in range(3)]
        (outputs[0] + outputs[1]).sum().backward()
        outputs[2].sum().backward()
        gradients.append(x.grad)
        assert layer.calls == 3
    assert gradients[0] is not None
    assert torch.equal(gradients[0], gradients[1])
