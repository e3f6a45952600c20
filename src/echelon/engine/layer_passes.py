"""What is changed in a graph before torch's compiler divides it into a forward and a backward pass.

Imported when the first layer is compiled: torch's compiler takes seconds to import.
"""

from typing import Any, final

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from echelon.memory.recompute import repeated_products
from echelon.parallel.data import added_products


@final
class LayerPasses(CustomGraphPass):
    def __init__(self, *, adds_products: bool, repeats_products: bool) -> None:
        self._adds_products, self._repeats_products = adds_products, repeats_products

    def __call__(self, graph: fx.Graph) -> None:
        if self._repeats_products:
            repeated_products.mark_products(graph)
        if self._adds_products:
            added_products.add_products(graph)

    def uuid(self) -> Any:
        """torch keeps what it has compiled on disk, by this."""
        files = get_hash_for_files((__file__, repeated_products.__file__, added_products.__file__))
        return files, self._adds_products, self._repeats_products
