"""Dropout inside of compiled code: operators with the same masks, drawn by the scope that is open outside."""

import bisect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout import modules as compiled
from echelon.nn.dropout.modules import (
    KeyedDropout,
    draw_ahead,
    key_dropout,
    keyed_modules,
    set_global_indices,
    split_features,
)
from echelon.nn.dropout.training_position import current, scope
from echelon.nn.hashing import hash_of, signed
from echelon.nn.wrapping import Wrapping, find_wrapper
from tests.nn.dropout.masks import keep_mask


class Layer(nn.Module):
    """Drops three times, twice by the same module, and channels too."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Dropout(0.5, **options), nn.Dropout(0.3)
        self.channels, self.alpha = nn.Dropout1d(0.4), nn.AlphaDropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha(self.channels(self.first(self.second(self.first(x * 2)))))  # type: ignore[no-any-return]


def wrappers(model: nn.Module) -> list[KeyedDropout]:
    found = [find_wrapper(module, KeyedDropout) for module in keyed_modules(model)]
    return [wrapper for wrapper in found if wrapper is not None]


def compile_layer(model: nn.Module, backend: str = "aot_eager") -> Callable[[Tensor], Tensor]:
    run = torch.compile(model, backend=backend, fullgraph=True)

    def call(x: Tensor) -> Tensor:
        with draw_ahead(wrappers(model)):
            output: Tensor = run(x)
        return output

    return call


def run_steps(call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Outputs and gradients of two calls each, in steps whose first samples differ."""
    results = []
    for step in range(3):
        with scope(seed=0, step=step, first_sample=torch.tensor(7) if step == 2 else 5 * step):
            for _ in range(2):
                output = call(x)
                results += [output, torch.autograd.grad(output.sum(), x)[0]]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_code_draws_what_other_code_draws(inplace: bool) -> None:
    """In one graph: `fullgraph` allows no break."""
    model = Layer(inplace=inplace)
    key_dropout(model, Wrapping())
    x = torch.randn(4, 6, 8, requires_grad=True)
    torch._dynamo.utils.counters.clear()
    expected, results = run_steps(model, x), run_steps(compile_layer(model), x)
    assert all(map(torch.equal, results, expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch.equal(results[0], results[2])  # the second call of a step


def indices_of(size: int) -> Tensor:
    """The second half, by a function that torch.compile cannot look into."""
    return torch.arange(size) + size * bisect.bisect_right([0], 0)


def test_parts_of_the_whole_are_found_outside_of_the_graph() -> None:
    model = Layer()
    key_dropout(model, Wrapping())
    for module in keyed_modules(model):
        set_global_indices(module, indices_of)
    split_features(model.first, 1, 2)
    x = torch.randn(4, 6, 8, requires_grad=True)
    expected, results = run_steps(model, x), run_steps(compile_layer(model), x)
    assert all(map(torch.equal, results, expected))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_parts_of_the_whole_are_found_again_in_the_backward_pass() -> None:
    """With no memory for activations, compiled code computes all of them a second time there."""
    model = Layer()
    key_dropout(model, Wrapping())
    for module in keyed_modules(model):
        set_global_indices(module, indices_of)
    x = torch.randn(4, 6, 8, requires_grad=True)
    expected = run_steps(model, x)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        results = run_steps(compile_layer(model, "aot_eager_decomp_partition"), x)
    assert all(map(torch.equal, results, expected))


def call_and_fail(model: nn.Module) -> None:
    with draw_ahead(wrappers(model)):
        model(torch.randn(2, 3, 4))
        raise KeyError


def test_uses_are_counted_also_when_the_call_fails() -> None:
    model = Layer()
    key_dropout(model, Wrapping())
    first, *_ = wrappers(model)
    with scope(seed=0, step=0, first_sample=0):
        for calls in (1, 2):
            with pytest.raises(KeyError):
                call_and_fail(model)
            position = current()
            assert position is not None
            assert position.uses[first.layer] == 2 * calls
            assert first.ahead is None


def test_outside_every_scope_and_in_eval_mode_nothing_is_drawn() -> None:
    model = Layer()
    key_dropout(model, Wrapping())
    with draw_ahead(wrappers(model)):
        assert all(wrapper.ahead is None for wrapper in wrappers(model))
    model.eval()
    with scope(seed=0, step=0, first_sample=0), draw_ahead(wrappers(model)):
        assert all(wrapper.ahead is None for wrapper in wrappers(model))


SEED, STEP, LAYER, FIRST, USED = 1, 2, 3, 4, 5


KEY = torch.tensor([signed(hash_of(SEED, STEP, LAYER)), USED])


INDICES = torch.tensor([1, 3, 5, 7])


@pytest.mark.parametrize("indices", [None, INDICES])
@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_masks_are_those_of_the_use(indices: torch.Tensor | None, part: tuple[int, int]) -> None:
    """Uses go on from those that the layer has had."""
    x = torch.randn(3, 4, 6, requires_grad=True)
    keep = keep_mask(SEED, STEP, LAYER, FIRST, x.shape, 0.3, "cpu", USED + 2, indices, part)
    draw = KEY, torch.tensor(FIRST), 2, 0.3, indices, *part
    output = compiled.keyed_dropout(x, *draw)
    assert torch.equal(output, x * keep * (1 / (1 - 0.3)))
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, keep * (1 / (1 - 0.3)))
    assert torch.equal(compiled.keep_mask(*draw, x.shape, x.device), keep)


def test_they_are_what_torch_asks_of_operators() -> None:
    x = torch.randn(3, 4, 6, requires_grad=True)
    draw = KEY, torch.tensor(FIRST), 0, 0.3, INDICES, 0, 1
    torch.library.opcheck(compiled.keyed_dropout, (x, *draw))
    torch.library.opcheck(compiled.keep_mask, (*draw, x.shape, x.device))


@pytest.mark.parametrize("shape", [(3, 5), (3, 3, 1)])
def test_masks_of_an_odd_number_of_elements_are_contiguous(shape: tuple[int, ...]) -> None:
    """The second half of the last hash lay between samples: compiled code asserts strides, and failed."""
    draw = KEY, torch.tensor(FIRST), 0, 0.3, None, 0, 1
    torch.library.opcheck(compiled.keep_mask, (*draw, shape, torch.device("cpu")))
    assert compiled.keep_mask(*draw, shape, torch.device("cpu")).is_contiguous()
