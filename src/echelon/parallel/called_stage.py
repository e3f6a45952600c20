"""A stage of a model whose own forward calls its layers: the forward runs, and layers of others are skipped.

    stage 0    before ── layer 0 ── layer 1 ──|                          it sends what layer 1 returned
    stage 1    before ── skipped ── received ── layer 2 ── layer 3 ── after

Code around the layers runs on every stage, with the inputs of the microbatch; behind its last own layer a
stage stops. Weights of that code are in every stage, and their gradients are summed, as those of tied weights
are. What a skipped layer returns is absent, and so is all that is computed of it. A layer, or an output, that
needs something absent is refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from echelon.errors import UserError
from echelon.nn.batch import call
from echelon.nn.layering import around_layers, name_layers
from echelon.nn.wrapping import Wrapper, Wrapping
from echelon.parallel.observer import ForwardPass, Observers, StepObserver
from echelon.parallel.stage import LocalStages


class Names(NamedTuple):
    """A model's names, from before it was split: of parameters (the first, where tied) and of modules."""

    parameters: Mapping[nn.Parameter, str]
    modules: Mapping[nn.Module, str]

    @classmethod
    def of(cls, model: nn.Module) -> "Names":
        return cls(
            {parameter: name for name, parameter in model.named_parameters()},
            {module: name for name, module in model.named_modules()},
        )

    def buffer(self, module: nn.Module, name: str) -> str:
        """Return the model's name for a buffer of a module, or the module's for one of another module."""
        path = self.modules.get(module)
        return f"{path}.{name}" if path else name


class AbsentTensor(Tensor):
    """Stands for a tensor of another stage: every function of it returns one again, and none has values."""

    @staticmethod
    def make() -> "AbsentTensor":
        return torch.empty(0, device="meta").as_subclass(AbsentTensor)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        changes_other = (name == "__setitem__" or name.endswith("_")) and not isinstance(args[0], cls)
        if name in _QUESTIONS or changes_other:
            raise UserError(
                "pipeline: the model's forward uses, between its layers, what a layer of another stage has "
                f"returned, in {name.strip('_')}; do it inside of a layer, give the model layers() -> "
                "list[nn.Module], or use pipeline=1"
            )
        return AbsentTensor.make()


# Functions that answer with no tensor: code would go on with a wrong answer.
_QUESTIONS = frozenset(
    (
        *("__get__", "size", "dim", "ndimension", "stride", "numel", "__len__", "__iter__", "__contains__"),
        *("__bool__", "__int__", "__float__", "__index__", "item", "tolist", "numpy", "__array__"),
        *("is_floating_point", "is_complex", "data_ptr", "untyped_storage", "equal", "allclose"),
        *("__format__", "__repr__"),
    )
)


class _Finished(BaseException):
    """The last layer of this stage has run. Not an Exception: a forward may catch those."""


@final
class CalledStage(nn.Module):
    """Layers `begin` to before `end` of those that a model's forward calls, and all that is in no layer."""

    def __init__(
        self, model: nn.Module, layers: Sequence[nn.Module], begin: int, end: int, names: Names
    ) -> None:
        super().__init__()
        self._whole, self.all_layers, self._begin, self._end = (model,), tuple(layers), begin, end
        self._names = names
        self._layers = nn.ModuleList(layers[begin:end])
        containers, beside = around_layers(model, layers)
        self._outside, self.containers = nn.ModuleList(beside), tuple(containers)
        direct = dict.fromkeys(p for module in containers for p in module.parameters(recurse=False))
        for number, parameter in enumerate(direct):
            self.register_parameter(f"_direct{number}", parameter)
        name_layers(self, "_layers")
        self.inputs: Any = None  # of the microbatch
        self._received: Any = None
        self._last_output: Any = None
        self._place = 0  # the layer that is to be called next
        self.is_running = False  # and not another stage of this rank

    def layers(self) -> list[nn.Module]:
        return list(self._layers)

    @property
    def model(self) -> nn.Module:
        return self._whole[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first stage takes the inputs of a microbatch, and each other what the one before returned."""
        self._place, self.is_running = 0, True
        try:
            if self._begin == 0:
                output = self.model(*args, **kwargs)
            else:
                (self._received,) = args
                output = call(self.model, self.inputs)
        except _Finished:
            output = self._last_output
        finally:
            self._received = self._last_output = None
            self.is_running = False
        if self._place != min(self._end + 1, len(self.all_layers)):
            raise self._error(
                f"calls {self._place} of its {len(self.all_layers)} layers in their order, and ends"
            )
        self._check_present(output, "what it returns")
        return output

    def skip(self, place: int) -> Any:
        """A layer of another stage is called: return what stands for its output."""
        self._advance(place)
        if place >= self._end:
            raise _Finished
        if place == self._begin - 1:
            return self._received
        return tree_map(
            lambda leaf: AbsentTensor.make() if isinstance(leaf, Tensor) else leaf, self._received
        )

    def enter(self, place: int, arguments: Any) -> None:
        self._advance(place)
        self._check_present(arguments, f"an argument of layer {place}")

    def leave(self, place: int, output: Any) -> None:
        if place == self._end - 1 and self._end < len(self.all_layers):
            self._last_output = output

    def _advance(self, place: int) -> None:
        if place != self._place:
            raise self._error(f"calls layer {place}, where layer {self._place} was to follow")
        self._place += 1

    def _check_present(self, structure: Any, what: str) -> None:
        if any(isinstance(leaf, AbsentTensor) for leaf in tree_leaves(structure)):
            raise self._error(f"makes {what} of what a layer of an earlier stage has returned")

    def _error(self, what: str) -> UserError:
        return UserError(
            f"pipeline: the forward of {type(self.model).__name__} {what}; stages take layers that it calls "
            "once and in their order, each with what the one before returned and what is made of the inputs "
            "alone; give the model layers() -> list[nn.Module], or use pipeline=1"
        )

    def has(self, place: int) -> bool:
        return self._begin <= place < self._end

    def outside_buffers(self) -> dict[str, Tensor]:
        in_layers = {module for layer in self._layers for module in layer.modules()}
        outside = [module for module in (*self.modules(), *self.containers) if module not in in_layers]
        return dict(self._buffers_of(outside))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        for name, module in super().named_modules(*args, **kwargs):
            yield self._names.modules.get(module, name), module

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        found = (p for module in self.modules() for p in module._parameters.values() if p is not None)
        for parameter in dict.fromkeys(found):
            yield self._names.parameters[parameter], parameter

    def named_buffers(self, *_: Any, **__: Any) -> Iterator[tuple[str, Tensor]]:
        return self._buffers_of((*self.modules(), *self.containers))

    def _buffers_of(self, modules: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield self._names.buffer(module, name), buffer


@final
class CountedLayer(Wrapper):
    """A layer of a model in stages, of which this rank may have several: the one that runs is told of a call.
    A copy of a model is called as if it were not there."""

    entry: ClassVar[str] = "stage"

    def __init__(self, module: nn.Module, stages: Sequence[CalledStage], place: int) -> None:
        super().__init__(module)
        self._stages, self._place = tuple(stages), place

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_stages": ()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stage = next((each for each in self._stages if each.is_running), None)
        if stage is None:
            return self.inner(*args, **kwargs)
        if not stage.has(self._place):  # its weights are on another rank, or in another stage of this one
            return stage.skip(self._place)
        stage.enter(self._place, (args, kwargs))
        output = self.inner(*args, **kwargs)
        stage.leave(self._place, output)
        return output


def connect_stages(local: LocalStages, wrapping: Wrapping, observers: Observers) -> None:
    """Let the stages that run the model's own forward see its layers and the inputs of each microbatch."""
    stages = {n: stage.module for n, stage in local.stages.items() if isinstance(stage.module, CalledStage)}
    if stages:
        layers = next(iter(stages.values())).all_layers
        for place, layer in enumerate(layers):
            wrapping.wrap(CountedLayer(layer, list(stages.values()), place))
        observers.add(StageInputs(stages))


@final
class StageInputs(StepObserver):
    """Gives each stage the inputs of the microbatch. Refuses a forward that changes buffers outside of its
    layers: each stage would have its own, and only the last one all changes."""

    def __init__(self, stages: dict[int, CalledStage]) -> None:
        self._stages = stages
        # Copies, until the first step is over: kernels of norms change theirs without a mark.
        self._first = {name: buffer.clone() for name, buffer in self._buffers().items()}

    @contextmanager
    def around_layers(self, forward: ForwardPass) -> Iterator[None]:
        stage = self._stages[forward.slot[0]]
        stage.inputs = forward.inputs
        try:
            yield
        finally:
            stage.inputs = None

    def check_first_step(self) -> None:
        now, first, self._first = self._buffers(), self._first, {}
        changed = [name for name, before in first.items() if not _is_same(before, now[name])]
        if changed:
            raise UserError(
                f"pipeline: the forward changes {', '.join(changed)}, which are in no layer, so that every "
                "stage would have its own; move the modules into layers, or use pipeline=1"
            )

    def _buffers(self) -> dict[str, Tensor]:
        return {name: b for stage in self._stages.values() for name, b in stage.outside_buffers().items()}


def _is_same(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())
