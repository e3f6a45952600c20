"""Models of transformers on the meta device, and those that hold one."""

import pytest
import torch
from torch import nn

from echelon.initialization import InitialValues, deferred, named_tensors

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
