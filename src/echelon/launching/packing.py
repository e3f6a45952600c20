"""Values as bytes, for the private pipe between the launching process and a rank.

Values are pickled, with tensors as plain bytes. torch would send file descriptors of shared memory, which run
out with hundreds of tensors and die with the process that made them. Only processes that this package started
read these bytes, and they are never written to a file.

Functions and classes of a script are found by name, because ranks import its main module. Those of a notebook
or REPL are sent by value, by cloudpickle, each time: a rank never has the definition of an earlier cell.
"""

import functools
import io
import itertools
import linecache
import multiprocessing
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from echelon.errors import UserError

if TYPE_CHECKING:
    import torch


def is_main_importable() -> bool:
    """Return whether a rank can import the main module of this process."""
    main = sys.modules["__main__"]
    if hasattr(main, "get_ipython") and "ipykernel" in sys.modules:
        return False  # a notebook; some editors give its main module a `__file__`
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return not spec.name.startswith("_pyrepl.")  # the REPL of Python 3.13 and later
    return file is not None and Path(file).exists()  # of a program from standard input it is "<stdin>"


@contextmanager
def hidden_main_file() -> Iterator[None]:
    """While a rank is started: multiprocessing lets it import any `__file__`, also "<stdin>"."""
    main = sys.modules["__main__"]
    file = None if is_main_importable() else vars(main).pop("__file__", None)
    try:
        yield
    finally:
        if file is not None:
            main.__file__ = file


FIX = "define it at the top level of a module (a .py file)"
_CACHE = type(functools.cache(lambda: None))
_DEFINITIONS = (FunctionType, type, _CACHE)  # what pickle finds by its name


def pack(value: object) -> bytes:
    """Return the bytes of `value`. Tensors are copied to the CPU; shared storages become separate ones."""
    try:
        return _dump(_Pickler, value)
    except _NotImportableError as error:
        name = error.name
    try:
        pickler = _make_value_pickler()
    except ImportError:
        raise UserError(
            f"{name} is defined in a notebook or an interactive session, which no rank can import: install "
            f"what sends it by value (pip install 'echelon[notebook]'), or {FIX}"
        ) from None
    return _dump(pickler, value)


def unpack(data: bytes) -> Any:
    """Return the value that `pack` was given; its tensors are on the CPU."""
    return pickle.loads(data)


def is_not_importable(definition: object) -> bool:
    """Return whether `definition` is a function or class of a main module that no rank can import."""
    return (
        isinstance(definition, _DEFINITIONS)
        and definition.__module__ == "__main__"
        and not is_main_importable()
    )


def _dump(pickler: type[pickle.Pickler], value: object) -> bytes:
    buffer = io.BytesIO()
    pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _NotImportableError(Exception):
    def __init__(self, name: str) -> None:
        self.name = name


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if is_not_importable(value):
            raise _NotImportableError(getattr(value, "__qualname__", repr(value)))
        return _reduce_tensor(value)


def _reduce_tensor(value: object) -> Any:
    if "torch" not in sys.modules:  # then nothing is a tensor, and torch is not imported
        return NotImplemented
    import torch

    # torch pickles subclasses, sparse and quantized tensors itself, without shared memory.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return NotImplemented
    assert isinstance(value, torch.Tensor)
    if value.layout != torch.strided or value.device.type == "meta" or value.is_quantized:
        return NotImplemented
    contiguous = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytearray(contiguous.reshape(-1).view(torch.uint8).numpy().data)
    is_parameter = type(value) is torch.nn.Parameter
    return _rebuild, (data, value.dtype, tuple(value.shape), value.requires_grad, is_parameter)


def _rebuild(
    data: bytearray, dtype: "torch.dtype", shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> "torch.Tensor":
    import torch

    # frombuffer refuses an empty buffer; a bytearray is writable, so the tensor may own it.
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


# By value. A definition that a rank received goes back as its identity, and becomes the parent's own again:
# cloudpickle would overwrite the methods of the parent's class with copies, which no later cell can change.

_Identity = tuple[int, int]  # the process that defined it, and a number
_identities: "weakref.WeakKeyDictionary[Any, _Identity]" = weakref.WeakKeyDictionary()
_definitions: "weakref.WeakValueDictionary[_Identity, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count()
_Source = tuple[str, list[str], int]  # a file, its lines, their number of letters


@functools.cache
def _make_value_pickler() -> type[pickle.Pickler]:
    import cloudpickle  # type: ignore[import-untyped]

    class ValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, _CACHE) and is_not_importable(value):
                return _rebuild_cache, (value.__wrapped__, value.cache_parameters())
            if not isinstance(value, FunctionType | type):
                return _reduce_tensor(value)
            identity = _identities.get(value)
            if identity is not None and identity[0] == _parent_pid():
                return _find_definition, (identity, value.__qualname__)
            reduced = super().reducer_override(value)
            if reduced is NotImplemented or len(reduced) < 6:  # found by name
                return reduced
            make, arguments, *rest = reduced
            return (_make_definition, (_identify(value), _source(value), make, arguments), *rest)

    return ValuePickler


def _rebuild_cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _parent_pid() -> int | None:
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid


def _identify(definition: Any) -> _Identity:
    identity = _identities.setdefault(definition, (os.getpid(), next(_numbers)))
    _definitions[identity] = definition
    return identity


def _find_definition(identity: _Identity, name: str) -> Any:
    if identity not in _definitions:
        raise LookupError(f"{name} of an earlier cell was replaced by a later one")
    return _definitions[identity]


def _make_definition(
    identity: _Identity, source: _Source | None, make: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    if source is not None:  # for tracebacks
        file, lines, size = source
        linecache.cache[file] = (size, None, lines, file)
    definition = make(*arguments)
    _identities[definition] = identity
    _definitions[identity] = definition
    return definition


def _source(definition: Any) -> _Source | None:
    """Return the cell of a function, which is no file: Python has its lines in memory."""
    if not isinstance(definition, FunctionType):
        return None
    file = definition.__code__.co_filename
    match linecache.cache.get(file):
        case (size, None, lines, _):
            return file, lines, size  # the same list each time, so that it is sent once
    return None
