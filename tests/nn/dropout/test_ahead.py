"""Draws ahead of compiled code: one graph, the same masks, and uses that go on."""

import bisect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from echelon.nn.dropout import (
    KeyedDropout,
    current,
    draw_ahead,
    key_dropout,
    keyed_modules,
    scope,
    set_global_indices,
    split_features,
)
from echelon.nn.wrapping import Wrapping, find_wrapper


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


def compiled(model: nn.Module, backend: str = "aot_eager") -> Callable[[Tensor], Tensor]:
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


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("inplace", [False, True])
def test_compiled_code_draws_what_other_code_draws(inplace: bool) -> None:
    """In one graph: `fullgraph` allows no break."""
    model = Layer(inplace=inplace)
    key_dropout(model, Wrapping())
    x = torch.randn(4, 6, 8, requires_grad=True)
    torch._dynamo.utils.counters.clear()
    expected, results = run_steps(model, x), run_steps(compiled(model), x)
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
    expected, results = run_steps(model, x), run_steps(compiled(model), x)
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
        results = run_steps(compiled(model, "aot_eager_decomp_partition"), x)
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
