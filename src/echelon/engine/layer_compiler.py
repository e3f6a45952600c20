"""torch's compiler for layers, where the plan changes what it makes of a forward and its backward pass.

recompute=selective: the compiler keeps what it would have to write anyway, such as the output of a norm that
a product reads. Here that is computed again, and kept are products and what is not pointwise. (torch's
`activation_memory_budget` takes attention for cheap where cuDNN computes it.)
"""

from dataclasses import dataclass
from typing import Any, final

import torch

# What torch keeps although it is cheap: for the time that one more kernel takes.
_KEEPS_LESS = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
# An operator that returns no gradient is not asked for the sizes of one.
_WITHOUT_CHECKS = {"size_asserts": False, "alignment_asserts": False}


@final
@dataclass(frozen=True)
class LayerCompiler:
    """Equal ones share what they have compiled. `adds_products`: to the gradients of matrices; `keeps_less`:
    for the backward pass; `repeats_products`: short ones run again there, too."""

    options: dict[str, Any] | None
    adds_products: bool = False
    keeps_less: bool = False
    repeats_products: bool = False

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(_KEEPS_LESS if self.keeps_less else {}):
            return self.lower(graph, inputs)

    def lower(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        # Both take seconds to import.
        from torch._inductor.compile_fx import compile_fx

        from echelon.engine.layer_passes import LayerPasses

        passes = LayerPasses(adds_products=self.adds_products, repeats_products=self.repeats_products)
        checks = _WITHOUT_CHECKS if self.adds_products else {}
        patches = {**(self.options or {}), **checks, "joint_custom_post_pass": passes}
        return compile_fx(graph, inputs, config_patches=patches)

    def __hash__(self) -> int:
        return hash((LayerCompiler, self.adds_products, self.keeps_less, self.repeats_products))
