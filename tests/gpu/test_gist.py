"""Gist on a GPU: kernels write the bytes of the CPU, gradients are those of torch, and no step waits."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from echelon.memory.gist.compression import any_size
from echelon.memory.gist.packing import Layout
from echelon.models import ModelConfig, build, build_image
from tests.gpu.test_no_sync import waiting_raises
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes
from tests.memory.gist.test_kernels import check_kernels
from tests.memory.gist.test_networks import NETWORKS
from tests.memory.gist.test_pooling import check_pooling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZES = (4096, 9001)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """cuDNN may choose another convolution each time."""
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    with any_size():
        yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def test_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time they are launched straight, where it is known how. Sizes that are a multiple of 16 and
    others are two kernels for Triton; the interpreter has more of them."""
    from echelon.memory.gist import launch

    check_kernels("cuda", SIZES)
    if launch._IS_KNOWN:
        monkeypatch.setattr(launch.Launch, "_choose", _refuse)
    check_kernels("cuda", SIZES)


def test_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    from echelon.memory.gist import launch

    check_pooling("cuda")
    if launch._IS_KNOWN:
        monkeypatch.setattr(launch.Launch, "_choose", _refuse)
    check_pooling("cuda")


def _refuse(*_: object) -> None:
    raise AssertionError("Triton chooses a kernel again")


def test_kernels_of_memory_that_begins_anywhere() -> None:
    from echelon.memory.gist import kernels

    whole = torch.randn(4097, device="cuda")
    for start in (0, 1, 0, 1):
        x = whole[start : start + 4096]
        output, mask, layout = kernels.relu_and_mask(x, inplace=False)
        assert torch.equal(output, x.relu())
        assert torch.equal(kernels.masked(x, mask, layout), x.relu())
        (half,) = kernels.encode_floats(x, "fp16")
        assert torch.equal(half, x.half())
        half, layout = half[start:], Layout(half[start:].size(), (1,))
        assert torch.equal(kernels.decode_floats((half,), "fp16", layout, torch.float32), half.float())


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_are_bit_identical(network: str) -> None:
    torch.manual_seed(0)
    plain = build_image(f"{network}-tiny").cuda().eval()
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(3, 3, 32, 32, device="cuda")
    # Pools whose windows overlap add gradients in any order.
    first, second = gradients(plain, x), gradients(model, x)
    if is_same(first, gradients(plain, x)):
        assert is_same(first, second)
    else:
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["gist-fp16", "gist-fp10", "gist-fp8"])
def test_a_matrix_sees_the_rounded_input_of_the_cpu(name: str) -> None:
    """The gradient of a weight is a product with the kept input: with one row of gradients, a copy of it."""
    torch.manual_seed(0)
    model = nn.Linear(64, 8, bias=False)
    compress(model, name)
    x = torch.randn(1, 64, requires_grad=True)
    model(x)[0, 0].backward()
    assert model.weight.grad is not None
    here = model.weight.grad[0].clone()
    model.zero_grad()
    model.cuda()
    model(x.detach().cuda().requires_grad_())[0, 0].backward()
    assert torch.equal(model.weight.grad[0].cpu(), here)
    assert not torch.equal(here, x.detach()[0])


def test_transformers_in_bf16_keep_half_in_fp8() -> None:
    torch.manual_seed(0)
    plain = build(ModelConfig("gpt", 2, 128, 4, vocab=64, sequence=128)).cuda().bfloat16()
    model = copy.deepcopy(plain)
    compress(model, "gist-fp8")
    tokens = torch.randint(64, (4, 128), device="cuda")
    assert torch.equal(plain(tokens), model(tokens))
    assert saved_bytes(plain, tokens) > 1.7 * saved_bytes(model, tokens)


@pytest.mark.parametrize("name", ["gist", "gist-fp16", "gist-fp10", "gist-fp8"])
def test_no_step_waits_for_the_device(name: str) -> None:
    model = build_image("vgg16-tiny").cuda()
    compress(model, name)
    x = torch.randn(4, 3, 32, 32, device="cuda")
    model(x).sum().backward()  # kernels are compiled
    with waiting_raises():
        model(x).sum().backward()
