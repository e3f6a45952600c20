"""Losses that take logits that wait: torch's own cross entropy, and others that are compiled with the head.

torch's is known by itself: `F.cross_entropy`, a `functools.partial` of it, an `nn.CrossEntropyLoss`. What a
function that calls it does with logits besides, nobody knows: such a loss gets logits.
"""

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from echelon.launching import beat
from echelon.nn.draws.functions import BODIES, DRAWINGS
from echelon.nn.draws.sample_draws import not_intercepted
from echelon.nn.head.deferred import factors, fused_cross_entropy, is_deferred
from echelon.nn.losses import Loss


class WaitingLoss(ABC):
    """A loss that takes logits that wait, and all others."""

    @property
    @abstractmethod
    def takes_deferred(self) -> bool:
        """Whether it does so now."""

    @abstractmethod
    def __call__(self, output: Any, targets: Any) -> Any: ...


# As they are in torch: what is put in their place does something else.
_FUNCTION, _FORWARD = F.cross_entropy, nn.CrossEntropyLoss.forward
_NAMES = ("weight", "ignore_index", "reduction", "label_smoothing")


class CrossEntropySettings(NamedTuple):
    ignored: int
    smoothing: float
    is_mean: bool


@final
class TorchCrossEntropy(WaitingLoss):
    """torch's cross entropy of logits [samples, classes], which is computed with the head's matrix; of all
    else it is what `otherwise` returns."""

    def __init__(self, loss: Loss, otherwise: Loss) -> None:
        self._loss, self._otherwise = loss, otherwise

    @property
    def takes_deferred(self) -> bool:
        return known_settings(self._loss) is not None

    def __call__(self, output: Any, targets: Any) -> Any:
        settings = known_settings(self._loss)  # a module's can change
        if settings is None or not is_deferred(output) or not _are_classes(targets, output):
            return self._otherwise(output, targets)
        ignored, smoothing, is_mean = settings
        total = fused_cross_entropy(output, targets, ignored=ignored, smoothing=smoothing)
        if total is None:
            return self._otherwise(output, targets)
        return _mean(total, (targets != ignored).sum()) if is_mean else total


def _are_classes(targets: Any, logits: Tensor) -> bool:
    """Return whether targets are the classes of samples, and neither probabilities nor of other dims."""
    is_right = type(targets) is Tensor and targets.dtype == torch.int64
    return is_right and logits.dim() == 2 and targets.shape == logits.shape[:1]


def _mean(total: Tensor, count: Tensor) -> Tensor:
    """Of no samples it is not a number, and has no gradient, as torch's."""
    return torch.where(count > 0, total / count.clamp(min=1), torch.nan)


def known_settings(loss: Any) -> CrossEntropySettings | None:
    """Return the settings of torch's cross entropy, if a loss is that now, without weights of classes."""
    if F.cross_entropy is not _FUNCTION:
        return None
    given: Mapping[str, Any] = {}
    if type(loss) is functools.partial and not loss.args:
        given, loss = loss.keywords, loss.func
    elif type(loss) is nn.CrossEntropyLoss and _is_as_made(loss):
        given, loss = {name: getattr(loss, name) for name in _NAMES}, _FUNCTION
    if loss is not _FUNCTION or not set(given) <= set(_NAMES) or given.get("weight") is not None:
        return None
    ignored, smoothing = given.get("ignore_index", -100), given.get("label_smoothing", 0.0)
    reduction = given.get("reduction", "mean")
    if type(ignored) is not int or reduction not in ("mean", "sum"):
        return None
    if type(smoothing) not in (int, float) or not 0 <= smoothing <= 1:
        return None
    return CrossEntropySettings(ignored, float(smoothing), reduction == "mean")


def _is_as_made(module: nn.CrossEntropyLoss) -> bool:
    """Return whether a call of the module computes the function, and nothing else."""
    hooks: list[Any] = [value for name, value in vars(module).items() if name.endswith("_hooks")]
    replaced = "forward" in vars(module) or type(module).forward is not _FORWARD
    return not replaced and not any(hooks) and not nn.modules.module._has_any_global_hook()


def known_loss(loss: Loss, otherwise: Callable[[Any, Any], Any]) -> Loss:
    """Return `otherwise`, which computes this loss of logits; if it is torch's, of those that wait too."""
    return otherwise if known_settings(loss) is None else TorchCrossEntropy(loss, otherwise)


# compile=true: the head's matrix and a loss that the engine does not know, compiled as one graph.
#
#   logits = h Wᵀ + b        in the type of the model
#   loss(logits, targets)    float32 copies, softmax and their gradients are parts of kernels, and no memory
#
# The graph must be whole: what torch.compile cannot trace (a value that is read, a print, a hook, a gradient
# of a gradient) is not called in pieces, but as it is, of logits, for good. So is a loss that draws numbers,
# which belong to samples, and one that reads weights besides the head's, which may be elsewhere.


# Times that it is compiled, for other sizes, modes and numbers that it reads: a smoothing that changes in
# each step is no reason to compile in each. All engines of a process share them.
_LIMITS = {"recompile_limit": 24}


@final
class CompiledLoss(WaitingLoss):
    """A loss of logits that wait, compiled with the matrix that makes them; of all others, and where that
    cannot be, the loss itself."""

    def __init__(
        self, loss: Loss, options: dict[str, Any] | None, *, frees_weights: bool, warns: bool
    ) -> None:
        """`frees_weights`: they are there only while the modules that own them run. `warns`: this rank says
        that a loss is not compiled."""
        self._loss, self._warns = loss, warns
        self._compiler = LossCompiler(options, frees_weights)
        self._compiled: Any = None
        self._is_refused = False

    @property
    def takes_deferred(self) -> bool:
        return not self._is_refused

    def __call__(self, output: Any, targets: Any) -> Any:
        parts = None if self._is_refused or _get_current_dispatch_mode() is not None else _parts_of(output)
        if parts is None:
            return self._loss(output, targets)
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException  # takes seconds to import

        beat()  # the first calls take long
        if self._compiled is None:
            self._compiled = torch.compile(_compute, backend=self._compiler, fullgraph=True)
        spec, place, others, logits = parts
        try:
            with torch._dynamo.config.patch(_LIMITS), not_intercepted():
                return self._compiled(self._loss, spec, place, others, factors(logits), targets)
        except FailOnRecompileLimitHit:
            reason = "numbers or sizes that it reads change too often"
        except TorchDynamoException as error:
            reason = str(getattr(error, "inner_exception", error)).partition("\n")[0].strip(". ")
        result = self._loss(output, targets)  # it may raise, and not be to blame on the compiler
        self._refuse(reason)
        return result

    def _refuse(self, reason: str) -> None:
        self._is_refused = True
        if self._warns:
            warnings.warn(
                f"compile=true: the loss runs uncompiled, of whole logits, because torch.compile cannot take "
                f"all of it as one graph ({reason})",
                stacklevel=2,
            )


class _Parts(NamedTuple):
    """An output by its leaves: its form, the place of the logits, the other leaves, the logits."""

    spec: TreeSpec
    place: int
    others: list[Any]
    logits: Tensor


def _parts_of(output: Any) -> _Parts | None:
    leaves, spec = tree_flatten(output)
    places = [place for place, leaf in enumerate(leaves) if is_deferred(leaf)]
    if len(places) != 1:
        return None
    logits: Tensor = leaves.pop(places[0])
    return _Parts(spec, places[0], leaves, logits)


def _compute(
    loss: Loss, spec: TreeSpec, place: int, others: list[Any], factors: tuple[Tensor, ...], targets: Any
) -> Any:
    """What is compiled: a function of its arguments, so that engines share it."""
    leaves = [*others[:place], F.linear(*factors), *others[place:]]
    return loss(tree_unflatten(leaves, spec), targets)


_ARGUMENTS = ("l_others_", "l_factors_", "l_targets_")  # how torch names inputs of the graph, in lower case


class UncompiledError(Exception):
    """A graph that would not compute what the loss does."""


@final
@dataclass(frozen=True)
class LossCompiler:
    """torch's compiler, of graphs that compute what the loss does. Equal ones share what they compiled."""

    options: dict[str, Any] | None
    frees_weights: bool

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        for node in graph.graph.nodes:
            if _draws(node):
                raise UncompiledError("it draws random numbers, which belong to samples")
        places = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        for name, value in zip(places, inputs, strict=True):
            is_read = isinstance(value, Tensor) and not name.lower().startswith(_ARGUMENTS)
            if is_read and (value.requires_grad or self.frees_weights):
                raise UncompiledError("it reads weights, or other tensors that are not its arguments")
        return self.lower(graph, inputs)

    def lower(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        from torch._inductor.compile_fx import compile_fx  # takes seconds to import

        return compile_fx(graph, inputs, config_patches=self.options)

    def __hash__(self) -> int:
        return hash(LossCompiler)


def _draws(node: torch.fx.Node) -> bool:
    """Return whether a node calls what draws, or what torch marks so."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    function = getattr(Tensor, name, None) if node.op == "call_method" else node.target
    if node.op not in ("call_function", "call_method"):
        return False
    packet = getattr(torch.ops.aten, name, None)
    tags = [] if packet is None else [getattr(packet, overload).tags for overload in packet.overloads()]
    return function in DRAWINGS or function in BODIES or any(_RANDOM in each for each in tags)


_RANDOM = torch.Tag.nondeterministic_seeded
