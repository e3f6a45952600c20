"""The pipe between the launching process and a rank: how values are packed, and what both ends send.

The parent's end is in `rank_process.py`. Values are pickled, with tensors as plain bytes. torch would send
file descriptors of shared memory, which run out with hundreds of tensors and die with the process that made
them. Only processes that this package started read these bytes, and they are never written to a file.
"""

import functools
import io
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from echelon.errors import UserError, raise_errors

if TYPE_CHECKING:
    import torch


def pack(value: object) -> bytes:
    """Return the bytes of `value`. Tensors are copied to the CPU; shared storages become separate ones."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return the value that `pack` was given; its tensors are on the CPU."""
    return pickle.loads(data)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if "torch" not in sys.modules:  # then nothing is a tensor, and torch is not imported
            return NotImplemented
        import torch

        # torch pickles subclasses, sparse and quantized tensors itself, without shared memory.
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        assert isinstance(value, torch.Tensor)
        plain = value.layout == torch.strided and value.device.type != "meta" and not value.is_quantized
        return _reduce(value) if plain else NotImplemented


def _reduce(tensor: "torch.Tensor") -> tuple[Any, ...]:
    import torch

    contiguous = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = bytearray(contiguous.reshape(-1).view(torch.uint8).numpy().data)
    is_parameter = type(tensor) is torch.nn.Parameter
    return _rebuild, (data, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, is_parameter)


def _rebuild(
    data: bytearray, dtype: "torch.dtype", shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> "torch.Tensor":
    import torch

    # frombuffer refuses an empty buffer; a bytearray is writable, so the tensor may own it.
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


STOP = b""  # the parent's call that asks a rank to end; any other call is a packed (fn, args)


class Answer(NamedTuple):
    """The result of a call. A rank sends `Answer(None)` first, when it has joined its process group."""

    value: Any


class Message(NamedTuple):
    """A value that the user's function sends with `send_message` while it runs."""

    content: Any


class Channel:
    """Sends complete messages, from any thread of the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def receive(self) -> bytes:
        return self._connection.recv_bytes()

    def send(self, data: bytes) -> None:
        with self._lock:
            self._connection.send_bytes(data)

    def close(self) -> None:
        self._connection.close()


_channel: Channel | None = None


def open_channel(connection: Connection) -> Channel:
    """Let `send_message` use `connection` in this process, but not in processes that it forks."""
    global _channel
    _channel = Channel(connection)
    os.register_at_fork(after_in_child=_close_in_child)
    return _channel


def _close_in_child() -> None:
    """Close the pipe: a data worker must not send in the rank's name, nor keep its pipe open."""
    global _channel
    if _channel is not None:
        _channel.close()
        _channel = None


def is_launched_rank() -> bool:
    """Return whether this process is a rank that `launch` or `Ranks` started."""
    return _channel is not None


def send_message(content: object) -> None:
    """Send `content` to the parent's `on_message(rank, content)`; does nothing outside a launched rank."""
    if _channel is not None:
        _channel.send(pack(Message(content)))


_FIX = "define it at the top level of a module (a .py file) and pass what it needs as arguments"
_INPUT = "what is sent to the ranks"


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """Return the bytes that ask a rank for `fn(*args)`; one error names every part that cannot be sent."""
    _refuse_program_from_stdin()
    _refuse_interactive(fn)
    try:
        return pack((fn, tuple(args)))
    except Exception:  # PicklingError, AttributeError, TypeError, and what the class of an argument raises
        raise_errors(_INPUT, [*_function_errors(fn), *_argument_errors(args)])
        raise


def _refuse_program_from_stdin() -> None:
    """`python < script.py` names a file '<stdin>', which no rank can import."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if main.__spec__ is None and path is not None and not Path(path).exists():
        raise UserError(
            f"The ranks import the main module, but its file does not exist ({path}): "
            "save the program as a .py file and run that."
        )


def _refuse_interactive(fn: Callable[..., object]) -> None:
    """Refuse a function that ranks cannot find: they import modules, and no interactive session."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    in_main = getattr(inner, "__module__", None) == "__main__"
    if in_main and not hasattr(sys.modules["__main__"], "__file__"):
        error = f"{_name(inner)} is defined in an interactive session, which no rank can import: {_FIX}"
        raise_errors(_INPUT, [error])


def _function_errors(fn: Callable[..., object]) -> list[str]:
    error = _packing_error(fn)
    rule = "cannot be sent, because a rank finds a function by its name in a module"
    return [f"{_name(fn)} {rule} ({error}): {_FIX}"] if error else []


def _argument_errors(args: Sequence[object]) -> list[str]:
    errors = [_packing_error(arg) for arg in args]
    return [
        f"argument {index} of type {type(arg).__name__} cannot be sent ({error}): "
        "send plain data, tensors or objects that pickle can copy, and make the rest inside the function"
        for index, (arg, error) in enumerate(zip(args, errors, strict=True))
        if error
    ]


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def _packing_error(value: object) -> str:
    try:
        pack(value)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
