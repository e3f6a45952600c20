"""What a layer saves: each memory once, never weights, and always the values of the forward pass."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.memory.gist.compression import uncompressed
from echelon.models import ModelConfig, build
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes


class Block(nn.Module):
    """One input to three matrices, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("table", torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.query(x)) * self.key(x) + self.value(x) * self.table


@pytest.mark.parametrize("name", ["gist-fp16", "gist-fp10", "gist-fp8"])
def test_float64_gradients_are_exact(name: str) -> None:
    """What plans are proven with."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.LayerNorm(32), Block()).double()
    model = copy.deepcopy(plain)
    found = compress(model, name).found
    x = torch.randn(4, 64, 32).double()
    assert is_same(gradients(plain, x), gradients(model, x))
    assert "exact" in found


def test_an_input_of_three_matrices_is_kept_once() -> None:
    torch.manual_seed(0)
    plain, x = Block(), torch.randn(4, 64, 32, requires_grad=True)
    model = copy.deepcopy(plain)
    compress(model, "gist-fp16")
    # x, and the outputs of query, its GELU, key; the value's product needs the table alone.
    assert saved_bytes(plain, x) == 4 * x.nbytes
    assert saved_bytes(model, x) == 4 * x.nbytes // 2


def test_weights_buffers_and_given_inputs_stay_as_they_are() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    x = torch.randn(16, 32)
    slopes = []
    for each in (plain, model):
        each.zero_grad()
        each(x).sum().backward()
        slopes.append([p.grad for p in each.parameters()])
    # The first layer's input was given, and its gradients come through weights alone.
    assert torch.equal(slopes[0][0], slopes[1][0])
    assert not torch.equal(slopes[0][2], slopes[1][2])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_transformers_keep_a_quarter_in_fp8(family: str) -> None:
    torch.manual_seed(0)
    plain = build(ModelConfig(family, 2, 64, 4, vocab=31, sequence=32, ffn=128))
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    tokens = torch.randint(31, (4, 32))
    assert saved_bytes(plain, tokens) > 3.5 * saved_bytes(model, tokens)
    assert torch.equal(plain(tokens), model(tokens))


class Reused(nn.Module):
    """Memory that is freed and taken again, and memory that changes after it was saved."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.exp().square().sum()
        for factor in range(5):
            total = total + (x * (factor + 1)).square().sum()  # in the memory of the one before
        y = x * 3
        total = total + y.square().sum()
        y.mul_(2)  # its old values were needed, which autograd refuses and a copy does not mind
        return total + y.square().sum()


def test_memory_that_is_used_again_is_encoded_again() -> None:
    x = torch.randn(64, 32, dtype=torch.float64, requires_grad=True)
    model = Reused()
    compress(model, "gist-fp8")
    model(x).backward()
    expected = 2 * (2 * x).exp() + 2 * x * (1 + 4 + 9 + 16 + 25 + 9 + 36)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected - (2 * x).exp() * 0)


def test_uncompressed() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), nn.ReLU(), nn.Linear(32, 8))
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    x = torch.randn(4, 64, 32)
    assert not is_same(gradients(plain, x), gradients(model, x))
    with uncompressed():
        assert is_same(gradients(plain, x), gradients(model, x))
        assert saved_bytes(plain, x) == saved_bytes(model, x)


def test_a_compressed_model_can_be_copied() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.ReLU(), nn.Linear(32, 8))
    compress(model, "gist")
    x = torch.randn(4, 64, 32)
    expected = gradients(model, x)
    assert is_same(gradients(copy.deepcopy(model), x), expected)


def test_nothing_is_kept_without_gradients() -> None:
    model = nn.Sequential(Block(), nn.ReLU())
    found = compress(model, "gist-fp8").found
    with torch.no_grad():
        model(torch.randn(4, 64, 32))
    assert not found


class Refusing(nn.Module):
    """Calls relu, unless its input is refused, or told not to."""

    def forward(self, x: Tensor, with_relu: bool = True) -> Tensor:
        if x.shape[1] != 64:
            raise ValueError("the width must be 64")
        return F.relu(x * 2) if with_relu else x * 2


def test_a_call_that_failed_teaches_nothing() -> None:
    """Nor one without functions, after others: every ReLU from then on was saved as it is."""
    model = Refusing()
    found = compress(model, "gist").found
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(ValueError, match="width"):
        model(x[:, :32])
    model(x)
    assert "relu" in found
    model(x, with_relu=False)
    found.clear()
    model(x)
    assert "relu" in found


def test_an_input_is_encoded_also_where_it_has_memory_with_one_that_is_given() -> None:
    """As the inputs of a stage that came in one message; in a second run for the backward pass it has its
    own, and the same must be saved."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Linear(32, 32)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.matrix(x) * mask

    def kinds(x: Tensor, mask: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: saved.append((tensor.shape, tensor.dtype)) or tensor, lambda tensor: tensor
        ):
            model(x.detach().requires_grad_(), mask)
        return saved

    torch.manual_seed(0)
    model = Masked()
    compress(model, "gist-fp16")
    message = torch.randn(2, 64, 32)
    together = kinds(message[0], message[1])
    assert together == kinds(message[0].clone(), message[1].clone())
    assert ((64, 32), torch.float32) in together, "the mask"
    assert len(together) == 3, "beside a weight and the encoded input"
