"""Measuring a model: what is told of each layer, and that the model is left as it was."""

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.models import ModelConfig, build
from echelon.planner import partition, profile, profile_of, to_dict
from tests.planner.brute_force import is_chain


class Pair(nn.Module):
    """Hands on a structure: a tensor, and a dict with a tensor and a plain value."""

    def forward(self, x: Tensor) -> Any:
        return x, {"twice": 2 * x, "steps": 3}


class Join(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        x, more = pair
        return x + more["twice"] * more["steps"]


class Slow(nn.Module):
    """Many times the work of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(40):
            x = x @ self.weight
        return x


def test_what_is_told_of_each_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Slow(), nn.ReLU(inplace=True), nn.Linear(64, 8, bias=False))
    measured = profile(model, torch.randn(32, 64))
    assert is_chain(measured)
    assert [node.name for node in measured.nodes] == ["0", "1", "2", "3"]
    assert [node.about for node in measured.nodes] == ["Linear", "Slow", "ReLU", "Linear"]
    assert [node.output_bytes for node in measured.nodes] == [8192, 8192, 8192, 1024]
    assert [node.parameter_bytes for node in measured.nodes] == [4 * 65 * 64, 4 * 64 * 64, 0, 4 * 64 * 8]
    # Slow keeps what each of its products takes and the last output; a ReLU in place keeps its output.
    assert [node.stash_bytes for node in measured.nodes] == [8192, 40 * 8192, 0, 1024]
    times = [node.seconds for node in measured.nodes]
    assert all(node.forward_seconds > 0 and node.backward_seconds > 0 for node in measured.nodes)
    assert max(times) == times[1]


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model[3].eval()
    model[0].weight.grad = torch.ones(8, 8)
    before, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    kept = inputs.clone()
    profile(model, (inputs, torch.zeros(16)))
    assert torch.equal(torch.rand(1), drawn)
    assert torch.equal(inputs, kept)
    assert not inputs.requires_grad
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model[0].weight.grad, torch.ones(8, 8))
    assert all(p.grad is None for p in list(model.parameters())[1:])


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_transformer_from_profile_to_stages(family: Any) -> None:
    model = build(ModelConfig(family, layers=2, width=32, heads=4, vocab=64, sequence=16, tied=True))
    tokens = torch.randint(0, 64, (2, 16))
    measured = profile(model, (tokens, tokens), repeats=1, warmups=0)
    assert [node.name for node in measured.nodes] == ["embedding", "blocks.0", "blocks.1", "head"]
    assert measured.tied == (("embedding", "head"),)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert measured.parameter_bytes == size  # the tied weight once
    assert measured.nodes[0].backward_seconds > 0  # tokens take no gradient, the embedding does
    assert profile_of(to_dict(measured)) == measured
    split = partition(measured, 4, 1e9, straight=True)
    assert (split.plan, split.layer_counts) == ("pipeline=4", (1, 1, 1, 1))


def test_any_structure_passes_between_layers() -> None:
    measured = profile(nn.Sequential(nn.Linear(4, 4), Pair(), Join()), {"x": torch.randn(2, 4)}["x"])
    assert [node.output_bytes for node in measured.nodes] == [32, 64, 32]


def test_a_layer_that_comes_twice_has_two_names_and_its_parameters_once() -> None:
    shared = nn.Linear(4, 4)
    measured = profile(nn.Sequential(shared, nn.ReLU(), shared), torch.randn(2, 4), repeats=1)
    assert [node.name for node in measured.nodes] == ["0", "1", "0@2"]
    assert [node.parameter_bytes for node in measured.nodes] == [80, 0, 0]
    assert measured.tied == (("0", "0@2"),)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match=r"Linear does not say where it can be cut.*layers\(\)"):
        profile(nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(UserError, match=r"layer 1 \(Linear\) fails on its input"):
        profile(nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3)), torch.randn(2, 4))
    with pytest.raises(UserError, match="repeats=0"):
        profile(nn.Sequential(nn.Linear(2, 2)), torch.randn(2, 2), repeats=0)


def test_splitting_imports_no_torch() -> None:
    script = "import sys, echelon.planner, echelon.planner.cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
