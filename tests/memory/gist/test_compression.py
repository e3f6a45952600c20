"""A ReLU writes the encoding of its output, where the operation that reads it saves it."""

import copy
import weakref

import pytest
import torch
from torch import nn

from echelon.memory.gist import backend
from echelon.memory.gist.compression import Fresh, Maker
from echelon.memory.gist.floats import Parts
from echelon.memory.gist.functions import CompressedModule
from echelon.nn.wrapping import find_wrapper
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes


def network(between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), between, nn.Conv2d(8, 4, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*conv)


def encodes_itself(relu: nn.Module) -> bool:
    wrapper = find_wrapper(relu, CompressedModule)
    assert wrapper is not None
    return wrapper.is_read


def test_the_output_of_a_relu_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second step encodes what the first has shown to be saved, in the kernel of the ReLU."""
    model = network(nn.Identity())
    compress(model, "gist-fp16")
    encoded: list[int] = []
    encode = backend.encode_floats
    monkeypatch.setattr(backend, "encode_floats", lambda x, name: encoded.append(0) or encode(x, name))
    x = torch.randn(2, 3, 12, 12)
    gradients(model, x)
    first, encoded[:] = len(encoded), []
    assert encodes_itself(model[1])
    gradients(model, x)
    assert len(encoded) == first - 1


@pytest.mark.parametrize("name", ["gist-fp16", "gist-fp8"])
@pytest.mark.parametrize("between", [nn.Identity(), nn.MaxPool2d(2), nn.Dropout(0.0), nn.Sigmoid()])
def test_every_step_is_that_of_the_first(between: nn.Module, name: str) -> None:
    model = network(between)
    compress(model, name)
    x = torch.randn(2, 3, 12, 12)
    expected, saved = gradients(model, x), saved_bytes(model, x)
    for _ in range(3):
        assert is_same(gradients(model, x), expected)
        assert saved_bytes(model, x) == saved
    assert not encodes_itself(model[4])


def test_a_changed_output_is_encoded_again() -> None:
    """In place, after the ReLU has encoded it."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if self.factor == 1.0 else x.mul_(self.factor)

    between = Scaled()
    model = network(between)
    fresh = copy.deepcopy(model)
    compress(model, "gist-fp16")
    x = torch.randn(2, 3, 12, 12)
    gradients(model, x)  # now the ReLU encodes
    between.factor = fresh[2].factor = 3.0
    compress(fresh, "gist-fp16")
    assert is_same(gradients(model, x), gradients(fresh, x))


def test_an_encoding_that_nobody_asks_for_goes_with_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept until the next step: of a ReLU that is called twice, and whose first output is saved."""
    torch.manual_seed(0)
    again = nn.ReLU()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), again, nn.Conv2d(8, 8, 3), again, nn.MaxPool2d(2))
    compress(model, "gist-fp16")
    written: list[weakref.ref[torch.Tensor]] = []
    show = Fresh.show

    def watch(self: Fresh, output: torch.Tensor, maker: Maker, parts: Parts | None) -> None:
        written.extend(map(weakref.ref, parts or ()))
        show(self, output, maker, parts)

    monkeypatch.setattr(Fresh, "show", watch)
    for _ in range(2):
        gradients(model, torch.randn(2, 3, 12, 12))
    assert written
    assert [each() for each in written] == [None] * len(written)


def test_no_encoding_for_a_pool() -> None:
    model = network(nn.MaxPool2d(2))
    compress(model, "gist-fp16")
    for _ in range(3):
        gradients(model, torch.randn(2, 3, 12, 12))
        assert not encodes_itself(model[1])
