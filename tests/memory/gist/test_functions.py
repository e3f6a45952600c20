"""ReLU and pools: every way to call them gives the gradients of torch, to the last bit."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.memory.gist.compression import Compression
from echelon.memory.gist.functions import Window, relu
from tests.memory.gist.nets import compress, gradients, is_same, saved_bytes

POOLS = {
    "2": nn.MaxPool2d(2),
    "3, 2": nn.MaxPool2d(3, 2),
    "ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "padded": nn.MaxPool2d(3, 2, padding=1),
    "dilated": nn.MaxPool2d(2, 1, dilation=2),
    "oblong": nn.MaxPool2d((3, 2), (2, 1), (1, 0), (1, 3)),
    "large window": nn.MaxPool2d(5, 2),
    "window too large": nn.MaxPool2d(17, 1, padding=8),
    "average": nn.AvgPool2d(3, 2, padding=1, ceil_mode=True),
    "average without padding": nn.AvgPool2d(2, count_include_pad=False),
    "adaptive": nn.AdaptiveMaxPool2d(3),
}


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pool", POOLS)
def test_pools(pool: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), POOLS[pool], nn.Conv2d(4, 2, 1))
    plain = plain.to(memory_format=layout)
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(2, 3, 15, 18).to(memory_format=layout)
    assert is_same(gradients(plain, x), gradients(model, x))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("length", range(4, 12))
def test_the_size_of_the_output_is_that_of_torch(length: int, ceil_mode: bool) -> None:
    x = torch.ones(1, 2, length, length + 1)
    for kernel, stride, padding, dilation in (
        (2, 2, 0, 1),
        (3, 2, 1, 1),
        (3, 1, 1, 1),
        (2, 3, 1, 1),
        (2, 2, 1, 3),
    ):
        window = Window.of((kernel, 1), (stride, 3), (padding, 0), dilation, ceil_mode)
        expected = F.max_pool2d(x, *window[:4], ceil_mode=ceil_mode)
        assert window.output_size(x.size()) == expected.size()


def test_a_pool_of_one_image_without_a_batch() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2))
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(3, 11, 9)
    assert is_same(gradients(plain, x), gradients(model, x))


class Called(nn.Module):
    """Calls one function between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(self.function(self.first(x)))
        return output


def twice(x: Tensor) -> Tensor:
    """The output of a ReLU is used three times."""
    y = F.relu(x)
    return F.max_pool2d(y, 3, 1, 1) + y + torch.relu(y.mean()) + y * y


def of_a_view(x: Tensor) -> Tensor:
    """Autograd has its own rules for a view that is changed in place."""
    x = x * 1
    F.relu(x[:, 1:], inplace=True)
    return x


FUNCTIONS = {
    "F.relu": F.relu,
    "torch.relu": torch.relu,
    "Tensor.relu": Tensor.relu,
    "relu_": torch.relu_,
    "Tensor.relu_": Tensor.relu_,
    "in place": lambda x: F.relu(x, inplace=True),
    "relu6": F.relu6,
    "gelu": F.gelu,
    "leaky": F.leaky_relu,
    "twice": twice,
    "view": of_a_view,
    "pool": lambda x: F.max_pool2d(x.relu(), 2, stride=1),
    "places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "strided": lambda x: F.relu(x[:, :, ::2]),
    "transposed": lambda x: F.relu(x.transpose(2, 3)),
    "expanded": lambda x: F.relu(x.mean((2, 3), keepdim=True).expand(-1, -1, 20, 20)),
    "NaN": lambda x: F.relu(torch.where(x > 1, x, x * float("nan"))).nan_to_num(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    torch.manual_seed(0)
    plain = Called(FUNCTIONS[name])
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(2, 3, 12, 12)
    for _ in range(2):  # the second call knows what the first has seen
        first, second = gradients(plain, x), gradients(model, x)
        assert len(first) == len(second)
        assert all(
            torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(first, second, strict=True)
        )


LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6, 8, 10),
    "channels_last": lambda: torch.randn(4, 6, 8, 10).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(4, 6, 10, 8).transpose(2, 3),
    "with gaps": lambda: torch.randn(4, 6, 10, 16).transpose(2, 3)[:, :, ::2],
    "expanded": lambda: torch.randn(4, 6, 1, 10).expand(-1, -1, 8, -1),
}


@pytest.mark.parametrize("of_gradient", LAYOUTS)
@pytest.mark.parametrize("of_input", LAYOUTS)
def test_outputs_and_gradients_of_relu_lie_as_those_of_torch(of_input: str, of_gradient: str) -> None:
    """Later operations sum in the order of memory."""
    x = LAYOUTS[of_input]().requires_grad_()
    slope = LAYOUTS[of_gradient]()
    results = []
    for function in (F.relu, lambda x: relu(x, Compression.of("gist"))):
        output = function(x)
        results.append((output, *torch.autograd.grad(output, x, slope)))
    for expected, result in zip(*results, strict=True):
        assert result.stride() == expected.stride()
        assert torch.equal(result, expected)


class Columns(nn.Module):
    """A convolution over the sequence, as in speech models: its gradient is a transposed one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.convolution = nn.Linear(64, 64), nn.Conv1d(64, 64, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.linear(x).transpose(1, 2))
        return F.relu(self.convolution(y).transpose(1, 2)) * x


def test_transposed_outputs_are_bit_identical() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(Columns(), Columns())
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(8, 16, 64)
    assert is_same(gradients(plain, x), gradients(model, x))


def test_modules_around_a_relu() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 8),
        nn.ReLU(),
    )
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(4, 3, 12, 12)
    assert is_same(gradients(plain, x), gradients(model, x))
    assert all(map(torch.equal, plain.buffers(), model.buffers()))


def test_a_relu_before_a_pool_keeps_a_bit_and_half_a_byte() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(2, 3, 16, 16)
    num = 2 * 8 * 16 * 16
    assert saved_bytes(plain, x) == x.nbytes + 4 * num + 8 * num // 4
    assert saved_bytes(model, x) == x.nbytes + num // 8 + num // 4 // 2


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))
    model = copy.deepcopy(plain)
    compress(model, "gist")
    x = torch.randn(2, 3, 12, 12, requires_grad=True)
    results = []
    for each in (plain, model):
        (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(slope.square().sum(), list(each.parameters())[:1]))
    assert torch.equal(results[0][0], results[1][0])


def test_nan_passes_gradients_as_in_torch() -> None:
    x = torch.randn(100)
    x[::3] = float("nan")
    slopes = []
    for name in ("none", "gist"):
        model = nn.Sequential(nn.Sequential(nn.Identity(), nn.ReLU()))
        if name != "none":
            compress(model, name)
        leaf = x.clone().requires_grad_()
        model(leaf).backward(torch.ones(100))
        assert leaf.grad is not None
        slopes.append(leaf.grad)
    assert torch.equal(*slopes)
    assert slopes[1][::3].eq(1).all()
