"""One device: rank 0 runs the plain model; all ranks give it weights, and take the gradients that it makes.

Where whole weights and gradients do not fit there, weights come and go while it computes, and so does each
gradient when it is complete. The other ranks serve it:

    rank 0 asks       all ranks
    a weight          put it together, on rank 0
    a gradient        get it, and take what they compare of it
    the end           go on together
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from echelon.collectives.agreement import RankAgreement
from echelon.collectives.group import alone
from echelon.engine.audit.gradient_comparison import Take, share_gradients
from echelon.engine.audit.plain_form import layer_sizes
from echelon.engine.audit.reference import Reference, Result, Run
from echelon.errors import UserError
from echelon.memory.meter import free_bytes
from echelon.quantities import show_bytes
from echelon.state.assembly import Assembly
from echelon.state.ownership import VALUE, OwnedSlice

_UNSEEN = {  # methods that read memory, and are no operations
    *(Tensor.data_ptr, Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__),
}
_ADDRESSES = {Tensor.data_ptr, Tensor.__dlpack__}


@final
class WeightStream(TorchDispatchMode):
    """Weights that are in memory while something reads them, about a layer of them at a time.

        names        model.layers.0.up   model.layers.0.down   model.layers.1.up   …
        memory       whole               whole                 none                         capacity: a layer

    `tensors` by name, without memory; what reads them inside `reading()` gets values from `fetch`. As a mode
    of torch it is given every operation of this thread, also those that autograd calls. A parameter keeps its
    tensor and its storage; the storage alone has memory, or none. So whatever autograd has saved of it, also
    a view, is right again as soon as the memory is. Kernels that torch does not see ask for an address, or
    read what their module holds, or what a function has saved: these bring weights too.
    """

    def __init__(
        self, likes: Mapping[str, Tensor], fetch: Callable[[str], Tensor], device: torch.device
    ) -> None:
        """`likes`: of the meta device."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._fetch = fetch
        self._capacity = max(layer_sizes({name: each.nbytes for name, each in likes.items()}), default=0)
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        for name, like in likes.items():
            tensor = self.tensors[name] = torch.empty_like(like, device=device)
            if tensor.nbytes:
                tensor.untyped_storage().resize_(0)
                self._names[tensor.untyped_storage()._cdata] = name
        self._present: dict[str, bool] = {}  # the last used one last; whether it was written into

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the weights that are in memory now."""
        return sum(self.tensors[name].nbytes for name in self._present)

    @contextmanager
    def reading(self) -> Iterator[None]:
        hook = register_module_forward_pre_hook(lambda module, _: self.bring(module._parameters.values()))
        try:
            # Without threads of its own the backward pass of a device asks for weights in this one.
            with (
                torch.autograd.set_multithreading_enabled(False),
                saved_tensors_hooks(lambda tensor: tensor, self._unpack),
                self,
                _UnseenReads(self),
            ):
                yield
        finally:
            hook.remove()
            for name in list(self._present):
                self._free(name)

    def bring(self, tensors: Iterable[Any], written: Iterable[Any] = ()) -> None:
        """Give memory and values to the weights among `tensors` (or of which these are views), and take it
        from those that were not used for longest. What is written into stays."""
        wanted = self._named(tensors)
        self._present |= {name: self._present.pop(name) for name in wanted if name in self._present}
        absent = [name for name in wanted if name not in self._present]
        if absent:
            self._make_room(sum(self.tensors[name].nbytes for name in absent), wanted)
        for name in absent:
            self._fill(name)
        self._present |= dict.fromkeys(self._named(written), True)

    def _named(self, tensors: Iterable[Any]) -> dict[str, None]:
        storages = [
            each.untyped_storage()._cdata
            for each in tensors
            if isinstance(each, Tensor) and each.layout == torch.strided
        ]
        return {self._names[each]: None for each in storages if each in self._names}

    def _make_room(self, needed: int, wanted: Mapping[str, None]) -> None:
        for name, is_written in list(self._present.items()):
            if self.num_bytes + needed <= self._capacity:
                return
            if name not in wanted and not is_written:
                self._free(name)

    def _fill(self, name: str) -> None:
        with _disable_current_modes(), torch.no_grad():
            values, tensor = self._fetch(name), self.tensors[name]
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.data.copy_(values)  # of a version of its own: what was saved of the weight is as it was
        self._present[name] = False

    def _free(self, name: str) -> None:
        storage = self.tensors[name].untyped_storage()
        if storage.resizable():  # else an array of numpy shares its memory
            storage.resize_(0)
            del self._present[name]

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.bring([tensor])
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formals = func._schema.arguments
        given = {formal.name: each for formal, each in zip(formals, args, strict=False)} | (kwargs or {})
        writes = [formal.name for formal in formals if formal.alias_info and formal.alias_info.is_write]
        self.bring(tree_leaves((args, kwargs)), tree_leaves([given.get(name) for name in writes]))
        return func(*args, **(kwargs or {}))


@final
class _UnseenReads(TorchFunctionMode):
    def __init__(self, stream: WeightStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNSEEN:  # an address may be used for long: that weight stays
            self._stream.bring(args[:1], args[:1] if func in _ADDRESSES else ())
        return func(*args, **(kwargs or {}))


_END = -1
_ALONE = "rank 0 runs this by itself, and it needs weights of another engine"

Values = Callable[[], list[OwnedSlice]]  # weights and buffers of a rank
Work = Callable[[Mapping[str, Tensor], Take], Result]  # of rank 0, given what it lacks of the weights


class CannotCompareError(Exception):
    """Says why nothing was compared, on every rank alike. `is_final`: another batch would change nothing."""

    def __init__(self, reason: str, *, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


class _LostRequestError(BaseException):
    """A rank has failed in the middle of something that all do together: the others wait there, and cannot be
    told. No code of a model may catch it; the cause ends this rank."""

    def __init__(self, cause: Exception) -> None:
        super().__init__()
        self.cause = cause


class FailedRunError(Exception):
    """Raised on every rank for what rank 0 raised in a run."""


@final
class OneDevice:
    """All ranks call its methods together, inside `ready`. Workers of sync=async are each rank 0 of a group
    of their own (None)."""

    def __init__(self, reference: Reference, values: Values, agreement: RankAgreement) -> None:
        self.reference, self.group = reference, agreement.group
        self._values, self._agreement = values, agreement
        self._likes = reference.form.gradients_like(reference.dtype)
        self._missing: list[str] = []
        self.whole: dict[str, Tensor] | None = {}  # at hand; None: weights come and go
        self._rehearsed: tuple[Run, Result] | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, rank 0 has the weights and buffers that it lacks, or gets each when it reads it."""
        form, device, dtype = self.reference.form, self.reference.device, self.reference.dtype
        missing = form.missing(device) if self._agreement.rank == 0 else []
        needed, streamed = form.num_bytes(missing, dtype), form.streamed_bytes(missing, dtype)
        is_large = bool(_reason_not_to_take(needed, "whole weights and gradients", device))
        reason = _reason_not_to_take(streamed, "weights and gradients of one layer", device)
        self._missing, is_large, reason = self._agreement.gather([missing, is_large, reason])[0]
        if is_large and reason:
            raise CannotCompareError(reason)
        likes, assemble = ({}, None) if is_large else self._sources()
        self.whole = None if assemble is None else _present(likes, assemble)
        try:
            yield
        finally:
            self.whole, self._rehearsed = {}, None

    def for_judging(self) -> "OneDevice | None":
        """Return the device on which to search the cause of differences: rank 0 by itself, where it has all
        weights; else all ranks."""
        if self.whole is None:
            return self
        device = copy.copy(self)
        device.group, device._agreement = None, RankAgreement(None, self.reference.device)
        return device if self._agreement.rank == 0 else None

    def rehearse(self, run: Run, part: Run | None, *, part_tells: bool) -> Result:
        """Run what `gradients` is asked for later, and before it a part of it, forward alone. Raise, on every
        rank, what the model raises: the plan would fail in the middle of it. `part_tells`: where weights come
        and go, a run of the part is enough."""

        def work(weights: Mapping[str, Tensor], _: Take) -> Result:
            of_part = None if part is None else self.reference.run_forward(part, weights)
            if self.whole is not None:
                return self.reference.run(run, weights)
            if part_tells and of_part is not None and of_part.counted:
                return of_part
            return self.reference.run_forward(run, weights)

        self._rehearsed = run, self._on_rank_0(work, lambda _name, _gradient: None)
        return self._rehearsed[1]

    def gradients(self, run: Run, take: Take, names: Sequence[str] | None = None) -> Result:
        """On every rank, `take` is given each gradient of a run (or those of `names`): zeros where the model
        makes none."""
        likes = self._likes if names is None else {name: self._likes[name] for name in names}
        if self.whole is not None:
            if self._rehearsed is not None and run is self._rehearsed[0]:
                result = self._rehearsed[1]
            else:
                result = self._on_rank_0(lambda weights, _: self.reference.run(run, weights), take)
            share_gradients(result.gradients, likes, self.group, self.reference.device, take)
            return result
        absent = dict(likes)

        def take_wanted(name: str, gradient: Tensor) -> None:
            if name in likes:
                absent.pop(name, None)
                take(name, gradient)

        result = self._on_rank_0(lambda weights, send: self.reference.run(run, weights, send), take_wanted)
        for name, like in absent.items():
            take(name, torch.zeros((), dtype=like.dtype, device=self.reference.device).expand(like.shape))
        return result

    def _on_rank_0(self, work: Work, take: Take) -> Result:
        """Return its result, on the other ranks without output and gradients. Raise what it raises on all."""
        result, failure, is_refusal = None, "", False
        try:
            if self.whole is None:
                result = self._stream(work, take)
            elif self._agreement.rank == 0:
                with alone(_ALONE):
                    result = work(self.whole, take)
        except _LostRequestError as lost:
            raise lost.cause from None
        except UserError as refusal:
            failure, is_refusal = str(refusal), True
        except Exception as error:
            failure = f"{type(error).__name__}: {error}".splitlines()[0]
        shared = result and [result.total, result.counted, *result[4:8]]
        shared, failure, is_refusal = self._agreement.gather([shared, failure, is_refusal])[0]
        if failure:
            raise UserError(failure) if is_refusal else FailedRunError(failure)
        total, counted, *others = shared
        return result or Result(None, total, counted, {}, *others)

    # Weights.

    def _sources(self) -> tuple[dict[str, Tensor], Callable[[str], Tensor | None]]:
        """Return what is missing, as tensors of the meta device, and a function that puts one together on
        rank 0, called on all ranks."""
        wanted, group, device = set(self._missing), self.group, self.reference.device
        if not wanted:
            return {}, lambda _: None
        owned = [each for each in self._values() if each.slice.part == VALUE and each.slice.name in wanted]
        if group is None:
            tensors = {each.slice.name: each.tensor.detach() for each in owned}
            return {name: t.to("meta") for name, t in tensors.items()}, lambda name: tensors[name].to(device)
        assembly = Assembly(owned, group, device)
        likes = {key[0]: assembly.like(key) for key in sorted(assembly)}
        return likes, lambda name: assembly.tensor((name, VALUE), to=0)

    def _stream(self, work: Work, take: Take) -> Result | None:
        """On rank 0 `work`, during which the other ranks serve it."""
        device = self.reference.device
        likes, assemble = self._sources()
        weights = {name: like for name, like in likes.items() if name in self.reference.form.order}
        with _together():
            buffers = _present([name for name in likes if name not in weights], assemble)
        subjects = [*weights, *self._likes]  # what can be asked for, by number

        def answer(number: int, gradients: Mapping[str, Tensor]) -> Tensor | None:
            name = subjects[number]
            with _together():
                if number < len(weights):
                    return assemble(name)
                share_gradients(gradients, {name: self._likes[name]}, self.group, device, take)
            return None

        if self._agreement.rank != 0:
            while (number := self._ask(_END)) != _END:
                answer(number, {})
            return None

        def fetch(name: str) -> Tensor:
            with alone(""):  # this is for all ranks
                tensor = answer(self._ask(subjects.index(name)), {})
            assert tensor is not None
            return tensor

        def send(name: str, gradient: Tensor) -> None:
            with alone(""), torch.no_grad():
                answer(self._ask(len(weights) + list(self._likes).index(name)), {name: gradient})

        try:
            stream = WeightStream(weights, fetch, device)
            with alone(_ALONE), stream.reading():
                result = work({**stream.tensors, **buffers}, send)
        except _LostRequestError:
            raise
        except BaseException:
            self._ask(_END)
            raise
        self._ask(_END)
        return result

    def _ask(self, number: int) -> int:
        """On rank 0: tell all what comes next. On the others: wait for it."""
        if self.group is None:
            return number
        request = torch.tensor([number], device=self.reference.device)
        self.group.broadcast(request)
        return int(request)


@contextmanager
def _together() -> Iterator[None]:
    """Around what all ranks do at once."""
    try:
        yield
    except Exception as error:
        raise _LostRequestError(error) from error


def _present(names: Iterable[str], assemble: Callable[[str], Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor for name in names if (tensor := assemble(name)) is not None}


def _reason_not_to_take(needed: int, content: str, device: torch.device) -> str:
    """Say why an audit should not take so many bytes; empty if it may."""
    free = free_bytes(device)
    if 2 * needed <= free:
        return ""
    return (
        f"{content} take {show_bytes(needed)} on rank 0, which has {show_bytes(free)} free, half of it for "
        "the audit"
    )
