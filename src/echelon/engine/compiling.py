"""compile=true: the layers of a model, compiled in place by torch.compile.

Only the `forward` of a layer is compiled. Its hooks stay outside (ZeRO gathers and frees weights in them),
and its names, parameters and state are what they were. Layers of one class share their compiled code.
"""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any, final

import torch
from torch import Tensor, nn

from echelon.engine.layer_compiler import LayerCompiler
from echelon.errors import UserError
from echelon.launching import beat
from echelon.memory.recompute.selective import not_watched
from echelon.nn.draws.sample_draws import not_intercepted
from echelon.nn.dropout.modules import KeyedDropout, draw_ahead, is_keyed
from echelon.nn.experts import gates_of
from echelon.nn.huggingface.adapters import reason_not_passed_on
from echelon.nn.huggingface.layers import DecoderLayer
from echelon.nn.huggingface.modules import blocks_in, has_cache, makes_cache, without_cache
from echelon.nn.layering import around_layers, called_layers
from echelon.nn.wrapping import Wrapper, Wrapping, find_wrapper
from echelon.parallel.data.buckets import gradient_dtype, without_gradients
from echelon.parallel.data.grad_accumulation import hook_before
from echelon.parallel.stage import Stage
from echelon.parallel.tensor.modules import prepare_compiling
from echelon.plan import Plan

# Code is shared by all engines of a process, each with sizes, types and modes of its own; torch keeps 8
# recordings of a function and, when there are more, goes on without compiling, which is slow but right.
_LIMITS = {"recompile_limit": 64, "accumulated_recompile_limit": 1024}


# Triton measures several forms of a kernel and takes the fastest, which may be another one on another rank.
# Forms that add in another order are left out.
_SAME_KERNELS = {"deterministic": True}


def compile_layers(
    stages: Iterable[Stage], plan: Plan, wrapping: Wrapping, *, adds_products: bool = False
) -> None:
    """If the plan says so, compile the `compiled_modules` of the stages, each by itself. Tensor ranks compute
    gradients of weights that are not split each for itself. These must be the same to the last bit, or the
    weights drift apart: they take the same kernels. `adds_products`: to the gradients of matrices."""
    if not plan.compile:
        return
    _check_compiler()
    options = compiler_options(plan)
    compilers: list[LayerCompiler | None] = (
        [LayerCompiler(options, adds_products)] if adds_products else [None]
    )
    if plan.recompute == "selective":  # of every second layer, products run again
        compilers = [
            LayerCompiler(options, adds_products, keeps_less=True, repeats_products=repeats)
            for repeats in (True, False)
        ]
    in_turn = cycle(compilers)
    for stage in stages:
        for module in compiled_modules(stage, plan):
            wrapping.wrap(CompiledForward(module, options, next(in_turn)))
            for parameter in module.parameters():
                if parameter.requires_grad:
                    wrapping.hold("compile", module, hook_before(parameter, own_memory))
        for module in filter(makes_cache, stage.module.modules()):
            # A layer that writes to a cache does so by its number, and each would be compiled for its own.
            wrapping.before("compile", module, without_cache, with_kwargs=True)
        for gate in gates_of(stage.module):
            wrapping.wrap(EagerForward(gate))


def compiler_options(plan: Plan) -> dict[str, Any] | None:
    return _SAME_KERNELS if plan.tensor > 1 else None


def compiled_modules(stage: Stage, plan: Plan) -> list[nn.Module]:
    """Return what is compiled of a stage: its layers; or those that its own forward calls, and what is beside
    them; or the module, if no layers are known."""
    modules = [_traced(layer, plan) for layer in stage.wrapped_layers(plan)]
    if modules == [stage.module] and not reason_not_passed_on(stage.module):
        called = called_layers(stage.module)
        blocks = blocks_in(stage.module) if called is None else called.layers
        if blocks:
            _, beside = around_layers(stage.module, blocks)
            # What has weights, and is more than one product or look-up.
            fusing = [each for each in _members(beside) if type(each) not in (nn.Linear, nn.Embedding)]
            chosen = {*(each for each in fusing if any(True for _ in each.parameters())), *blocks}
            modules = [module for module in stage.module.modules() if module in chosen]
    return [module for module in dict.fromkeys(modules) if not is_keyed(module)]  # a dropout alone


def _traced(layer: nn.Module, plan: Plan) -> nn.Module:
    """Return what is compiled of a layer: of a decoder layer of transformers the block, and not what makes
    its mask and positions. When traced, transformers makes every mask whole, also one that attention does
    not need and is twice as slow with. Where ranks share a sequence there is no mask."""
    return layer.block if isinstance(layer, DecoderLayer) and plan.context == 1 else layer


def _members(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield modules, and in place of a list, which is never called, its members."""
    for module in modules:
        is_list = isinstance(module, nn.ModuleList | nn.ModuleDict)
        yield from _members(module.children()) if is_list else (module,)


def own_memory(gradient: Tensor | None) -> Tensor | None:
    """A copy of a gradient that shares its memory. The compiler may return views of one tensor as gradients
    of several parameters (a class token and position embeddings of one sample), and autograd keeps them
    without a copy: what is added to one, or scales it, would change the other."""
    if gradient is None or gradient.layout != torch.strided:
        return None
    storage = gradient.untyped_storage()  # a user of its own
    return gradient.clone() if torch._C._storage_Use_Count(storage._cdata) > 2 else None


own_memory.__torch_unserializable__ = True  # type: ignore[attr-defined]  # a pickled model has none


@final
class CompiledForward(Wrapper):
    """All that is inside of a layer, compiled; a copy of a model compiles its own."""

    entry = "compile"

    def __init__(
        self, module: nn.Module, options: dict[str, Any] | None, compiler: LayerCompiler | None = None
    ) -> None:
        """`compiler`: in place of torch's own with these options."""
        super().__init__(module)
        self._options, self._compiler = options, compiler
        self._compiled: Any = None
        keyed = (find_wrapper(inside, KeyedDropout) for inside in module.modules())
        self._dropouts = [wrapper for wrapper in keyed if wrapper is not None]
        self._low = [p for p in module.parameters() if gradient_dtype(p) != p.dtype]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if has_cache((*args, *kwargs.values())):  # it generates
            return self.inner(*args, **kwargs)
        if self._compiled is None:
            prepare_compiling(self.module)
            self._compiled = (
                torch.compile(self.inner, options=self._options)
                if self._compiler is None
                else torch.compile(self.inner, backend=self._compiler)
            )
        beat()  # the first calls take long
        with (
            torch._dynamo.config.patch(_LIMITS),
            without_gradients(self._low),
            draw_ahead(self._dropouts),
            not_intercepted(),
            not_watched(),
        ):
            return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": None}


@final
class EagerForward(Wrapper):
    """A gate between compiled parts of a layer: a graph does not know the recorder of its statistics."""

    entry = "compile"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._call: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call is None:
            self._call = torch.compiler.disable(self.inner)
        return self._call(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_call": None}


def _check_compiler() -> None:
    """Fail here, and not in the first step."""
    from torch._inductor.cpp_builder import get_cpp_compiler  # takes seconds to import
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "compile=true: torch.compile writes C++ and finds no compiler here; install g++, or set CXX "
            "to a compiler, or drop compile"
        ) from None
