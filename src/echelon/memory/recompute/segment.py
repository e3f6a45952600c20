"""A segment: consecutive layers whose saved tensors are dropped and computed again for the backward pass.

    forward     x ── layer 0 ── layer 1 ── layer 2 ──      kept: x, and arguments that come from elsewhere
                       ·  ·       · ·        · · ·         autograd gets a numbered place for each tensor
    backward    a place is asked for its tensor: the layers run again, once, and fill all places;
                a tensor is released with its place

Graph tasks do not matter: a backward pass in two halves asks for the same places twice, and the layers run
again in the first half only. What a second run must find as the first did is in `layer_call`.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.errors import UserError
from echelon.memory.recompute.layer_call import LayerCall, LayerHistory
from echelon.memory.recompute.saved_inputs import SavedInputs
from echelon.memory.recompute.second_run import SecondRunCheck
from echelon.memory.storages import address_of
from echelon.nn.autograd.saved_tensors import KeptTensor, current_hooks, current_observer, replace
from echelon.nn.autograd.second_run import TapeEndedError
from echelon.nn.sequence import View
from echelon.nn.tracing import untraced
from echelon.nn.wrapping import Wrapper, Wrapping


class SegmentSettings(NamedTuple):
    """Shared by the segments of a stage. `during`: a context around the second run of a layer."""

    device: torch.device
    view: View
    check: SecondRunCheck
    inputs: SavedInputs
    during: Callable[[nn.Module], AbstractContextManager[None]]


class LayerRuns(ABC):
    """Layers that are called alone, or in one run with the layers before them."""

    def __init__(self, layers: Sequence[nn.Module], names: Sequence[str], settings: SegmentSettings) -> None:
        self.settings = settings
        self.layers = [RecomputedLayer(layer, name, self) for layer, name in zip(layers, names, strict=True)]
        # The run that the next layer may join. Weak: autograd holds a run as long as a place of it is needed.
        self._open: weakref.ref[Run] | None = None

    def wrap(self, wrapping: Wrapping) -> None:
        for layer in self.layers:
            wrapping.wrap(layer)

    @abstractmethod
    def call(self, layer: "RecomputedLayer", args: Any, kwargs: Any) -> Any:
        """Call a layer in place of its forward."""

    def _run(self, place: int, *, follows: bool) -> "Run":
        """Return the open run if the layer at `place` `follows` its last one, or else a new run."""
        run = None if self._open is None else self._open()
        joins = run is not None and follows and run.last is self.layers[place - 1]
        return run if run is not None and joins else Run(self.settings)

    def _call_in(self, run: "Run", layer: "RecomputedLayer", args: Any, kwargs: Any) -> Any:
        self._open = None  # if the layer raises, no other layer joins its run
        output = run.call_first(layer, args, kwargs)
        self._open = weakref.ref(run)
        return output


@final
class Segment(LayerRuns):
    """Consecutive layers. One that is called out of order begins a run of its own."""

    def call(self, layer: "RecomputedLayer", args: Any, kwargs: Any) -> Any:
        place = self.layers.index(layer)
        return self._call_in(self._run(place, follows=place > 0), layer, args, kwargs)


@final
class RecomputedLayer(Wrapper):
    """A layer of a segment, in place of its forward. A copy of a model is called as if it were not there: its
    segments would be those of the engine."""

    entry: ClassVar[str] = "recompute"

    def __init__(self, module: nn.Module, name: str, segment: LayerRuns) -> None:
        super().__init__(module)
        self.name = name
        self._segment: LayerRuns | None = segment
        self.history = LayerHistory(module, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # What a transform (vmap, torch.func.grad) calls in a layer is part of that layer's own run.
        is_inside = torch._C._functorch.peek_interpreter_stack() is not None
        if self._segment is None or is_inside or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return self._segment.call(self, args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_segment": None, "history": None}


class Form(NamedTuple):
    """The part of a saved tensor that a second run must repeat."""

    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tensor.shape, tensor.dtype)


@final
class Run:
    """One forward pass through a segment, and its second run."""

    def __init__(self, settings: SegmentSettings) -> None:
        self._settings = settings
        self.watch: Callable[[Tensor], None] | None = None  # called with what autograd saves in the first run
        self._hooks, self._observer = current_hooks(), current_observer()
        self._calls: list[LayerCall] = []
        self.last: RecomputedLayer | None = None  # the layer after it may join this run
        self._kept_storages: set[int] = set()
        # Places are numbered in the order in which autograd saves: the second run saves in the same order, so
        # that its n-th tensor is that of place n. Forms are compared, since a forward may not do the same.
        self.forms: list[Form | None] = []  # of each tensor that autograd saves; None: it is kept
        self.places: set[int] = set()  # those that autograd still holds
        self._filled: dict[int, KeptTensor] | None = None
        self._pending: list[Place] = []

    # The first run.

    def call_first(self, layer: RecomputedLayer, args: Any, kwargs: Any) -> Any:
        previous = self._calls[-1].outputs if self._calls else None
        call = LayerCall(layer, args, kwargs, previous, self._settings)
        self._kept_storages |= call.kept_storages()
        pack = self._pack  # one object: hooks are compared by identity
        try:
            with replace(pack, _take), call.first_run():
                output = layer.inner(*args, **kwargs)
        finally:  # until here the layer itself may have differentiated something
            for place in self._pending:
                place.tensor = None
            self._pending = []
        call.finish(output, self._hooks)
        self._calls.append(call)
        self.last = layer
        return output

    @untraced
    def _pack(self, tensor: Tensor) -> "KeptTensor | Place":
        if self.watch is not None:
            self.watch(tensor)
        # What is kept anyway (inputs, weights) takes no memory if autograd saves it too.
        if tensor.layout is torch.strided and address_of(tensor) in self._kept_storages:
            self.forms.append(None)
            return KeptTensor(tensor, self._hooks)
        number = len(self.forms)
        self.forms.append(Form.of(tensor))
        self.places.add(number)
        place = Place(self, number, tensor.detach())
        self._pending.append(place)
        return place

    # The second run.

    def take(self, number: int) -> Tensor:
        if self._filled is None:
            self._filled = self._run_again()  # at the first place that is asked for, in autograd's thread
            self._calls, self.last = [], None  # no layer joins a run that is over
        return self._filled[number].take()

    def release(self, number: int) -> None:
        self.places.discard(number)
        if self._filled is not None:
            self._filled.pop(number, None)

    def _run_again(self) -> dict[int, KeptTensor]:
        check = self._settings.check
        recorder = Recorder(self, self._calls, stops=not check.is_open)
        output: Any = None
        try:
            with torch.enable_grad(), replace(recorder.pack, _take):
                for recorder.call in self._calls:
                    with self._settings.during(recorder.call.layer.module), recorder.call.second_run():
                        args, kwargs = recorder.call.arguments.rebuild(output)
                        output = recorder.call.layer.inner(*args, **kwargs)
                    if not recorder.call.compare(output, check):
                        raise recorder.differs("returned other tensors")
        except AllRecorded:
            pass
        except TapeEndedError:
            raise recorder.differs("asked for more results that are computed once") from None
        if len(recorder.tensors) < len(recorder.wanted):
            raise recorder.differs(f"saved {recorder.num_seen} tensors instead of {len(self.forms)}")
        return recorder.tensors


class Place:
    """Held by autograd in place of a tensor. Until the layer has returned, the tensor is still here: the
    layer may differentiate something itself."""

    __slots__ = ("_number", "_run", "tensor")

    def __init__(self, run: Run, number: int, tensor: Tensor) -> None:
        self._run, self._number = run, number
        self.tensor: Tensor | None = tensor

    def take(self) -> Tensor:
        return self._run.take(self._number) if self.tensor is None else self.tensor

    @untraced
    def __del__(self) -> None:
        self._run.release(self._number)


class AllRecorded(BaseException):
    """A second run has computed all that is needed. Not an Exception: a layer may catch those."""


class Recorder:
    """Collects, in a second run, the tensors that the first one dropped."""

    def __init__(self, run: Run, calls: Sequence[LayerCall], *, stops: bool) -> None:
        """`stops`: the run ends as soon as it has all of them."""
        self._forms, self.wanted, self._stops = run.forms, set(run.places), stops
        self._observer = run._observer
        self.num_seen = 0
        self.call = calls[0]
        self.tensors: dict[int, KeptTensor] = {}

    @untraced
    def pack(self, tensor: Tensor) -> KeptTensor:
        number = self.num_seen
        self.num_seen += 1
        if number >= len(self._forms):
            raise self.differs(f"saved more than {len(self._forms)} tensors")
        kept = KeptTensor(tensor, self._observer if number in self.wanted else None)
        if number in self.wanted:
            form, first = Form.of(tensor), self._forms[number]
            if form != first:
                raise self.differs(f"saved a tensor of {form} instead of {first}")
            self.tensors[number] = kept
            if self._stops and len(self.tensors) == len(self.wanted):
                raise AllRecorded
        return kept

    def differs(self, what: str) -> UserError:
        return UserError(
            f"recompute: {self.call.layer.name} {what} when it ran again for the backward pass; its forward "
            "must do the same for the same input: keep conditions on global state, and random choices of "
            "what runs, out of it, or use recompute=none"
        )


@untraced
def _take(saved: KeptTensor | Place) -> Tensor:
    return saved.take()
