"""Models of transformers on the meta device, and those that hold one."""

import pytest
import torch
from torch import nn

from echelon.nn.initialization import InitialValues, deferred, named_tensors

transformers = pytest.importorskip("transformers")
CPU = torch.device("cpu")


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = small_llama(), nn.Linear(64, 400)


@pytest.mark.parametrize("recorded", [True, False], ids=["deferred", "meta"])
def test_weights_have_the_spread_that_transformers_gives_them(recorded: bool) -> None:
    if recorded:
        holder = deferred(Holder)
    else:
        with torch.device("meta"):
            holder = Holder()
    values = InitialValues(holder, CPU)
    assert not values.errors()
    for name, expected in named_tensors(Holder()):
        found, wanted = values.tensor(name).double(), expected.detach().double()
        if "inv_freq" in name or "norm" in name:
            assert torch.equal(found, wanted), name
        else:
            assert 0.9 < found.std() / wanted.std() < 1.1, name


def test_what_has_values_keeps_them_and_nothing_is_marked() -> None:
    with torch.device("meta"):
        model = Holder()
    name = "model.model.layers.0.mlp.up_proj.weight"
    weights = torch.rand(96, 64)
    model.load_state_dict({name: weights.clone()}, strict=False, assign=True)
    for _ in range(2):  # a first try leaves nothing behind
        values = InitialValues(model, CPU)
        assert not values.errors()
        assert torch.equal(values.tensor(name), weights)
        assert torch.equal(model.get_parameter(name).detach(), weights)


def test_containers_reset_after_what_they_contain() -> None:
    with torch.device("meta"):
        model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
    values = InitialValues(model, CPU)
    expected = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).encoder.layers[0].linear1.weight
    found = values.tensor("encoder.layers.0.linear1.weight")
    assert 0.9 < found.std() / expected.std() < 1.1, "xavier, and not that of nn.Linear"


def test_ties_of_two_modules_that_both_reset_are_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
    (error,) = InitialValues(model, CPU).errors()
    assert error.startswith("0.weight: is tied, and several modules give it values")
