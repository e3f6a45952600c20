"""Weights that come and go compute what whole ones do, wherever they are read, in the memory of a layer."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from echelon.engine.audit.one_device import WeightStream
from echelon.engine.audit.plain_form import layer_sizes

CPU = torch.device("cpu")


class Scale(torch.autograd.Function):
    """As if by a kernel, which reads memory without an operation of torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        assert weight.data_ptr(), "a kernel would read nothing"
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        assert weight.data_ptr(), "a kernel would read nothing"
        return gradient * weight, (gradient * x).sum((0, 1))


class Net(nn.Module):
    """Tied ends, recurrent weights, one that another module reads, one that an unseen kernel does."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.last = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
        self.last.weight = self.ends.weight
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for _ in range(4)]
        )
        self.recurrent, self.scale = nn.LSTM(8, 8, batch_first=True), nn.Parameter(torch.ones(8))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.ends(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = F.linear(self.recurrent(hidden)[0], self.layers[0].linear1.weight[:8])
        output: Tensor = self.last(Scale.apply(hidden, self.scale))
        return output


def entropy(model: nn.Module) -> Tensor:
    tokens = torch.arange(15).view(3, 5)
    output: Tensor = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return output


def entropy_and_decay(model: nn.Module) -> Tensor:
    """Reads all weights outside of their modules."""
    return entropy(model) + sum(weight.square().sum() for weight in model.parameters())


def entropy_and_gradient(model: nn.Module) -> Tensor:
    (gradient,) = torch.autograd.grad(entropy(model), [model.scale], create_graph=True)  # type: ignore[list-item]
    return gradient.square().sum()


def stream_of(model: nn.Module, fetched: list[str]) -> WeightStream:
    """The weights of a model, which now come and go; a list of those that came."""
    values = {name: weight.detach() for name, weight in model.named_parameters()}

    def fetch(name: str) -> Tensor:
        fetched.append(name)
        return values[name]

    stream = WeightStream({name: value.to("meta") for name, value in values.items()}, fetch, CPU)
    twins = {id(weight): nn.Parameter(stream.tensors[name]) for name, weight in model.named_parameters()}
    for module in model.modules():
        module._parameters = {
            key: None if weight is None else twins[id(weight)] for key, weight in module._parameters.items()
        }
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
    return stream


@pytest.mark.parametrize("loss", [entropy, entropy_and_decay, entropy_and_gradient])
def test_gradients_are_those_of_whole_weights(
    monkeypatch: pytest.MonkeyPatch, loss: Callable[[nn.Module], Tensor]
) -> None:
    torch.manual_seed(0)
    model, fetched, held = Net().double(), list[str](), list[int]()
    expected = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
    sizes = layer_sizes({name: weight.nbytes for name, weight in model.named_parameters()})
    stream = stream_of(model, fetched)
    fill = WeightStream._fill
    monkeypatch.setattr(
        WeightStream, "_fill", lambda self, name: (fill(self, name), held.append(self.num_bytes))
    )
    with stream.reading():
        gradients = torch.autograd.grad(loss(model), list(model.parameters()), allow_unused=True)
    for one, other in zip(expected, gradients, strict=True):
        assert one is None if other is None else torch.equal(one, other)
    assert 0 < max(held) <= max(sizes)
    assert set(fetched) == {name for name, _ in model.named_parameters()}
    assert stream.num_bytes == 0
    assert not any(weight.data_ptr() for weight in model.parameters())


def test_a_layer_is_fetched_once_in_each_pass() -> None:
    model, fetched = Net(), list[str]()
    with stream_of(model, fetched).reading():
        output = model.recurrent(torch.ones(2, 30, 8))[0]
        assert len(fetched) == 4  # and not for each of 30 positions
        output.sum().backward()
    assert len(fetched) == 4


def test_layers() -> None:
    names = ["bias", "head.weight", "head.bias", "blocks.0.up.weight", "blocks.0.down.bias", "blocks.1.norm"]
    assert layer_sizes(dict.fromkeys(names, 12)) == [12, 24, 24, 12]


def test_what_a_forward_writes_into_a_weight_stays() -> None:
    model, fetched = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), list[str]()
    with stream_of(model, fetched).reading():
        with torch.no_grad():
            model[0].weight.fill_(2)
        model(torch.ones(1, 4)).sum().backward()
        assert model[0].weight.sum() == 32


def test_parameters_without_elements() -> None:
    model, fetched = nn.Linear(4, 4, bias=False), list[str]()
    model.empty = nn.Parameter(torch.ones(0))
    with stream_of(model, fetched).reading():
        (model(torch.ones(1, 4)).sum() + model.empty.sum()).backward()
    assert fetched == ["weight"]


READINGS: dict[str, Callable[[Tensor], Any]] = {
    "tolist": lambda weight: weight.tolist(),
    "repr": repr,
    "address": lambda weight: weight.data_ptr() != 0,
    "dlpack": lambda weight: torch.from_dlpack(weight).tolist(),
    "numpy": lambda weight: weight.numpy().tolist(),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_what_reads_memory_without_an_operation(read: Callable[[Tensor], Any]) -> None:
    model, fetched = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), list[str]()
    expected = read(model[0].weight.detach())
    with stream_of(model, fetched).reading():
        view = model[0].weight.detach()
        model[2](torch.ones(1, 4))  # takes the memory
        assert view.untyped_storage().nbytes() == 0
        assert read(view) == expected


def test_memory_that_an_array_shares_stays() -> None:
    model, fetched = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), list[str]()
    expected = model[0].weight.detach().clone()
    with stream_of(model, fetched).reading():
        array = model[0].weight.detach().numpy()
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(torch.from_numpy(array), expected)


def test_weights_whose_addresses_were_taken_stay() -> None:
    """As for a table of pointers that one kernel reads."""
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    expected = [layer.weight.detach().clone() for layer in model]
    with stream_of(model, []).reading():
        weights = [layer.weight for layer in model]
        addresses = [weight.data_ptr() for weight in weights]
        shared = torch.from_dlpack(model[0].bias.detach())
        for layer in model:
            layer(torch.ones(16))
        assert len(set(addresses)) == 4
        for address, weight in zip(addresses, expected, strict=True):
            numbers = (ctypes.c_float * weight.numel()).from_address(address)
            assert list(numbers) == weight.flatten().tolist()
        assert torch.equal(shared, model[0].bias)


def test_what_an_operation_writes_into_a_weight_by_name_stays() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    with stream_of(model, []).reading(), torch.no_grad():
        torch.zeros(16, 16, out=model[0].weight)
        torch.add(model[1].bias, 1.0, out=model[0].bias)
        for layer in model:
            layer(torch.ones(16))
        assert not model[0].weight.any()
        assert torch.equal(model[0].bias, model[1].bias + 1)
