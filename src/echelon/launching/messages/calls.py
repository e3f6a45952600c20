"""Packs the function and the arguments of a run, and explains what cannot be sent."""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from echelon.errors import UserError, raise_errors
from echelon.launching.messages.transport import pack

_FIX = "define it at the top level of a module (a .py file) and pass what it needs as arguments"
_INPUT = "what is sent to the ranks"


def pack_call(fn: Callable[..., object], args: Sequence[object]) -> bytes:
    """The bytes that ask a rank for `fn(*args)`; one error names every part that cannot be sent."""
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
    """A rank finds a function by its name in a module, but it cannot import an interactive session."""
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
