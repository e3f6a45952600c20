"""The bench `moe-layer` works on a CPU too, where its figures mean nothing."""

import pytest
import torch
from benchmarks.moe_layer import FusedSwiGLU
from torch import Tensor, nn

from benchmarks import moe_layer
from echelon.nn.experts import Experts


def test_rows_compare_a_mixture_with_dense_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_layer, "_MIXTRAL", {})  # takes long to import
    settings, rows = moe_layer.bench(quick=True)
    assert [row.contender for row in rows] == ["dense", "dense, fused", "echelon"]
    assert {row.case for row in rows} == {"64 tokens, 32 wide, top-2 of 8 x 24"}
    assert all(row.extras["share_of_dense"] > 0 for row in rows)
    assert settings["dispatched_bytes"] == 64 * 2 * 32 * 2
    assert settings["microseconds_of_kernels"]["echelon"]


def test_a_block_that_does_not_run_here_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"not here, {x.ndim}\nmore")

    monkeypatch.setattr(moe_layer, "_MIXTRAL", {"theirs": "eager"})
    monkeypatch.setattr(moe_layer, "_mixtral", lambda *_: Broken())
    settings, rows = moe_layer.bench(quick=True)
    assert "theirs" not in [row.contender for row in rows]
    assert settings["left_out"] == {"theirs": "not here, 3"}


@pytest.mark.slow
def test_rows_compare_a_mixture_with_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    _, rows = moe_layer.bench(quick=True)
    assert rows[3].contender == "transformers Mixtral"


def test_experts_that_differ_give_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_layer, "_MIXTRAL", {})
    forward = Experts.forward
    monkeypatch.setattr(Experts, "forward", lambda *args: forward(*args) * 1.1)
    with pytest.raises(RuntimeError, match=r"experts differ by 0\.1"):
        moe_layer.bench(quick=True)


def test_the_fused_dense_layer_is_a_swiglu() -> None:
    torch.manual_seed(0)
    dense = FusedSwiGLU(6, 5).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    gate, up = (x @ dense.gate_up.weight.T).chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * up) @ dense.down.weight.T
    found = dense(x)
    torch.testing.assert_close(found, expected)
    leaves = [x, *dense.parameters()]
    gradient = torch.randn_like(x)
    for one, other in zip(
        torch.autograd.grad(found, leaves, gradient),
        torch.autograd.grad(expected, leaves, gradient),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
