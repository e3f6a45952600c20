"""The products of compiled layers that run again: short ones, of which nothing but a sum reads."""

from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute
from torch._inductor.decomposition import select_decomp_table

from echelon.memory.recompute.repeated_products import mark_products
from echelon.models import ModelConfig, build

CONFIG = ModelConfig("gpt", layers=1, width=32, heads=2, vocab=64, sequence=8)


class Long(nn.Module):
    """A product whose rows are long is as dear as on the way forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(4096, 32)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.down(x.repeat(1, 128)))


def marked(layer: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    """The sizes of the matrices whose products are marked."""
    found: list[tuple[int, ...]] = []

    def divide(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        mark_products(joint.graph)
        nodes = [node for node in joint.graph.nodes if must_recompute(node)]
        found.extend(tuple(node.args[-1].meta["val"].shape) for node in nodes)
        return min_cut_rematerialization_partition(joint, *args, **options)

    torch._dynamo.reset()
    compilers = dict.fromkeys(("fw_compiler", "bw_compiler"), boxed_nop)
    backend = aot_autograd(**compilers, partition_fn=divide, decompositions=select_decomp_table())
    output = torch.compile(layer, backend=backend)(x.requires_grad_())
    expected = layer(x)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    gradients = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    expected.square().sum().backward()
    torch.testing.assert_close(gradients, [p.grad for p in layer.parameters() if p.grad is not None])
    return found


def test_the_product_between_attention_and_the_residual_stream_runs_again() -> None:
    """And that behind GELU, which no gradient needs: it does not run."""
    block = build(CONFIG).layers()[1]
    assert marked(block, torch.randn(2, 8, 32)) == [(32, 32), (128, 32)]


def test_a_product_with_long_rows_is_kept() -> None:
    assert marked(Long(), torch.randn(4, 32)) == []
