"""What lossy formats never round: gradients are those of torch where nothing else is saved."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.memory.gist import floats
from echelon.memory.gist.compression import Compression
from echelon.memory.gist.layer import Saver
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes


class Calls(nn.Module):
    """What a function of the input saves is all that there is."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


EXACT = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "a view of softmax": lambda x: x.softmax(-1).view(-1, 64).square(),
}


@pytest.mark.parametrize("name", EXACT)
def test_results_of_softmax(name: str) -> None:
    torch.manual_seed(0)
    plain, x = Calls(EXACT[name]), 3 * torch.randn(4, 32, 64)
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    assert is_same(gradients(plain, x), gradients(model, x))


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


STATISTICS = {
    "attention": attention,
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "rms_norm": lambda x: x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt(),
    "deviation": lambda x: x / (x.std(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_of_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but what is as large as the input is encoded."""
    encoded = []

    def encode(flat: Tensor, name: str) -> floats.Parts:
        encoded.append(flat.numel())
        return (flat.clone(),)

    monkeypatch.setattr(floats, "encode", encode)
    model, x = Calls(STATISTICS[name]), torch.randn(2, 4, 128, 64, requires_grad=True)
    compress(model, "gist-fp8")
    model(x)
    assert set(encoded) == {x.numel()}


def test_statistics_of_a_model_of_tokens() -> None:
    saver = Saver(Compression.of("gist-fp8"), {}, num_inputs=0)
    large, few = torch.randn(64, 256), torch.randn(64, 2)
    assert type(saver.pack(large)) is not type(saver.pack(few))


def test_a_small_view_does_not_keep_a_large_memory() -> None:
    plain, x = Calls(lambda x: (x * 2)[:, :1].square()), torch.randn(64, 256, requires_grad=True)
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    assert saved_bytes(plain, x) == x.nbytes
    assert saved_bytes(model, x) < x.nbytes // 64


class Rotated(nn.Module):
    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], *, more: dict[str, list[Tensor]]) -> Tensor:
        return x * angles[0] + x.roll(1) * angles[1] + x * more["list"][0]


def test_nested_inputs_without_gradients_stay_as_they_are() -> None:
    torch.manual_seed(0)
    x, cosine, sine, factor = torch.randn(4, 32, 32)
    slopes = []
    for name in ("none", "gist-fp8"):
        model, leaf = Rotated(), x.clone().requires_grad_()
        if name != "none":
            compress(model, name)
        model(leaf, (cosine, sine), more={"list": [factor]}).backward(x)
        slopes.append([leaf.grad])
    assert is_same(*slopes)
