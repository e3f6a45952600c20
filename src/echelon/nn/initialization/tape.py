"""A tape of the operations that gave tensors of the meta device their values, which they do not have.

A model that is built on the meta device takes no memory: its tensors have a shape and no values. While a
`Tape` records, it notes every operation that would have written to them. Any of them can then be computed
later, alone, on any device: `values` goes back from the tensor to the operations that led to it, and runs
these again.

    empty    weight                     what is noted for  nn.Linear(4, 4, bias=False)
    uniform_ weight, -0.5, 0.5

Memory is what operations share, so the tape knows tensors by their storage, and views need no note: each
argument is a window of a storage.
"""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from echelon.errors import UserError
from echelon.nn.batch import tensors_of

Seed = Callable[[int], int]  # of a noted operation that draws at random, by its number
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Window:
    """A tensor of the meta device: a window of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Window":
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(_storage(tensor), tensor.dtype, size, stride, int(tensor.storage_offset()))


class Note(NamedTuple):
    """One operation; its tensors are windows. It changes the storages `written`, or makes the `made` ones."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    read: frozenset[int]
    written: frozenset[int]
    made: tuple[Window | None, ...]  # for each tensor that the operation returns
    is_random: bool

    @property
    def leaves(self) -> list[Any]:
        """All single arguments."""
        return tree_leaves((self.args, self.kwargs))

    @property
    def leaves_undefined(self) -> bool:
        """True if it returns memory as it was before."""
        return isinstance(self.function, OpOverload) and "empty" in self.function.name()


@final
class Tape(TorchDispatchMode):
    """Records in a `with`. Tensors of `kept` have values: nothing changes them meanwhile."""

    def __init__(self, kept: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = {_storage(tensor) for tensor in kept}
        self._notes: list[Note] = []
        self._writers: dict[int, list[int]] = defaultdict(list)  # of a storage: numbers of notes, in order
        self._alive: dict[int, torch.UntypedStorage] = {}  # so that no two storages have one number

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = tensors_of((args, kwargs))
        if func in _READS_VALUES and any(map(on_meta, inputs)):
            return func(*tree_map(self._known_value, args), **kwargs)
        if any(map(self.keeps, _changed(func, args, kwargs))):
            return next(_changed(func, args, kwargs))
        result = func(*args, **kwargs)
        read = frozenset(_storage(tensor) for tensor in inputs if on_meta(tensor))
        written = frozenset(_storage(t) for t in _changed(func, args, kwargs) if on_meta(t))
        outputs = tensors_of(result)
        made = tuple(Window.of(t) if on_meta(t) and _storage(t) not in read else None for t in outputs)
        if written or any(made):  # else it is a view, or nothing of the meta device
            noted_args, noted_kwargs = tree_map(_as_window, (tuple(args), dict(kwargs)))
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            note = Note(func, noted_args, noted_kwargs, read, written, made, is_random)
            self._add(note, (*inputs, *outputs))
        return result

    def keeps(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._kept

    def note_draw(self, function: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        """`function` will draw the values of `tensor`: one operation, however many it consists of."""
        written = frozenset([_storage(tensor)])
        note = Note(function, (Window.of(tensor), *args), kwargs, written, written, (None,), is_random=True)
        self._add(note, [tensor])

    def _add(self, note: Note, tensors: Iterable[Tensor]) -> None:
        self._alive |= {_storage(t): t.untyped_storage() for t in tensors if on_meta(t)}
        for storage in note.written.union(window.storage for window in note.made if window is not None):
            self._writers[storage].append(len(self._notes))
        self._notes.append(note)

    def _known_value(self, argument: Any) -> Any:
        """Compute a value now that a constructor reads."""
        if not isinstance(argument, Tensor) or not on_meta(argument):
            return argument
        return self.values(Window.of(argument), torch.device("cpu"), _refuse_random)

    # What was recorded.

    def is_defined(self, window: Window) -> bool:
        """Return True if something gave this storage values."""
        return any(
            not self._notes[number].leaves_undefined for number in self._writers.get(window.storage, ())
        )

    def draws(self, storage: int) -> list[int]:
        """Return the notes that draw at random what leads to the values of a storage, in order."""
        return [number for number in self._needed(storage) if self._notes[number].is_random]

    def has_generator(self, storage: int) -> bool:
        """Return True if values are drawn by a generator of the user's own, which is not there later."""
        needed = (self._notes[number] for number in self._needed(storage))
        return any(isinstance(leaf, torch.Generator) for note in needed for leaf in note.leaves)

    def writers(self) -> dict[int, int]:
        """Count the notes that write to each storage so far."""
        return {storage: len(numbers) for storage, numbers in self._writers.items()}

    def constants(self) -> Iterator[Tensor]:
        """Return the tensors with values that notes have kept."""
        yield from (leaf for note in self._notes for leaf in note.leaves if isinstance(leaf, Tensor))

    def describe(self) -> Iterator[str]:
        """Describe the notes without values of tensors: the same on ranks that have built the same."""
        for note in self._notes:
            yield f"{note.function.__name__}({', '.join(map(_describe, note.leaves))})"

    def values(self, window: Window, device: torch.device, seed: Seed) -> Tensor:
        """Compute the tensor on `device`; random numbers are drawn with `seed` of each operation."""
        run = _Run(device, self._alive)
        with torch.no_grad(), torch.random.fork_rng(_cuda(device)):
            for number in self._needed(window.storage):
                if self._notes[number].is_random:
                    torch.manual_seed(seed(number))
                run.repeat(self._notes[number])
        return run.tensor(window)

    def _needed(self, storage: int) -> list[int]:
        """Return the notes that lead to the values of a storage, in order."""
        needed: set[int] = set()
        todo = [(storage, len(self._notes))]
        seen: dict[int, int] = {}  # of a storage: up to which note its writers are in `needed`
        while todo:
            storage, end = todo.pop()
            if seen.get(storage, 0) >= end:
                continue
            seen[storage] = end
            for number in self._writers.get(storage, ()):
                if number < end and number not in needed:
                    needed.add(number)
                    todo += ((other, number) for other in self._notes[number].read)
        return sorted(needed)


class _Run:
    """Real storages in which notes are repeated."""

    def __init__(self, device: torch.device, recorded: Mapping[int, torch.UntypedStorage]) -> None:
        self._device, self._recorded = device, recorded
        self._storages: dict[int, torch.UntypedStorage] = {}

    def tensor(self, window: Window) -> Tensor:
        if window.storage not in self._storages:  # it was there before the recording; all of it is NaN
            size = self._recorded[window.storage].nbytes()
            memory = torch.full((size,), 0xFF, dtype=torch.uint8, device=self._device)
            self._storages[window.storage] = memory.untyped_storage()
        empty = torch.empty(0, dtype=window.dtype, device=self._device)
        return empty.set_(self._storages[window.storage], window.offset, window.size, window.stride)

    def repeat(self, note: Note) -> None:
        args, kwargs = tree_map(self._as_real, (note.args, note.kwargs))
        result = note.function(*args, **kwargs)
        outputs = tensors_of(result)
        for window, output in zip(note.made, outputs, strict=True):
            if window is not None:
                self._keep(window, output)

    def _keep(self, window: Window, output: Tensor) -> None:
        """Keep the output of an operation as the window: as a rule it has the same form."""
        if (output.stride(), output.storage_offset()) != (window.stride, window.offset):
            extent = (
                window.offset + sum((n - 1) * s for n, s in zip(window.size, window.stride, strict=True)) + 1
            )
            memory = torch.empty(extent, dtype=window.dtype, device=self._device)
            output = memory.as_strided(window.size, window.stride, window.offset).copy_(output)
        self._storages[window.storage] = output.untyped_storage()

    def _as_real(self, argument: Any) -> Any:
        if isinstance(argument, Window):
            return self.tensor(argument)
        assert not isinstance(argument, torch.Generator), "has_generator finds it"
        return self._device if argument == _META and isinstance(argument, torch.device) else argument


def key_of(*parts: object) -> int:
    """Make a seed of 63 bits made from anything that prints."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_aten = torch.ops.aten
_READS_VALUES = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}


def _refuse_random(_: int) -> int:
    raise UserError(
        "the constructor looks at a value that it has drawn at random (.item(), if tensor: …), which is not "
        "known before the model has names; build the model whole, or compute the value with Python's numbers"
    )


def _changed(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Return the arguments that the operation writes to."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Window):
        return f"{leaf.dtype} {leaf.size}"
    return f"{leaf.dtype} {tuple(leaf.shape)} with values" if isinstance(leaf, Tensor) else repr(leaf)


def _as_window(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return Window.of(argument) if on_meta(argument) else argument.detach().clone()


def on_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"  # and not is_meta, about which torch.nn.init is told otherwise


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _cuda(device: torch.device) -> Iterable[torch.device]:
    return [device] if device.type == "cuda" else []


# Building on the meta device so that a tape sees all of it, also what torch leaves out there.

_IS_META: Any = vars(torch._C.TensorBase)["is_meta"].__get__
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Make tensors on the meta device inside, while `tape` records what they would hold."""
    with torch.device("meta"), _NothingLeftOut(), _truncated_draws(tape), tape:
        yield


class _NothingLeftOut(TorchFunctionMode):
    """Keeps values that torch would lose because a tensor is on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__") == init.__name__:
            return False  # torch.nn.init gives a tensor of the meta device no values at all
        has_numbers = bool(args) and not isinstance(args[0], Tensor)
        if func not in _MADE_OF_NUMBERS or not has_numbers or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        made: Tensor = func(*args, **{**kwargs, "device": "cpu"})  # keeps the numbers
        # With torch.tensor([]) transformers asks for the device; on "meta" it leaves initial values out.
        return made.to("meta") if made.numel() else made


@contextmanager
def _truncated_draws(tape: Tape) -> Iterator[None]:
    """torch draws a truncated normal distribution again and again until it likes what it sees: one draw."""
    draw: Any = init._no_grad_trunc_normal_

    def note(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not on_meta(tensor):
            return tensor if tape.keeps(tensor) else draw(tensor, *args, **kwargs)
        tape.note_draw(draw, tensor, *args, **kwargs)
        return tensor

    init._no_grad_trunc_normal_ = note
    try:
        yield
    finally:
        init._no_grad_trunc_normal_ = draw
