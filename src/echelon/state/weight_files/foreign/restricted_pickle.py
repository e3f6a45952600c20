"""Pickle files of other systems, read by an unpickler that calls nothing of what they name.

A pickle file is a program that names functions to call. Here it gets tensors, plain values and nothing else:

    functions of torch that make a tensor, torch.Size, a dtype, an OrderedDict, a set     as they are
    any other class or function     an `Inert` object, which takes all arguments and state, and does nothing

So a file can waste memory, but cannot run code. Readers check what they take from it.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, final

import torch

from echelon.errors import UserError

MOST_METADATA_BYTES = 2**31


class Inert:
    """Stands for an object of a class that is not loaded: its name, arguments and state are kept."""

    name: ClassVar[str] = ""
    args: tuple[Any, ...] = ()

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update({key: value for key, value in state.items() if isinstance(key, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        """A class that is a dict: its items are not needed."""

    def append(self, value: Any) -> None:
        """A class that is a list: likewise."""

    def extend(self, values: Any) -> None:
        """Likewise."""

    def __call__(self, *_: Any, **__: Any) -> "Inert":
        return self


@cache
def _inert(name: str) -> type[Inert]:
    return type("Inert", (Inert,), {"name": name})


_ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "complex"): complex,
    ("builtins", "bytearray"): bytearray,
    ("__builtin__", "set"): set,  # as torch.save names it
}
# Of tensors, by torch's own functions: they check sizes against the storage.
_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter")


def _rebuild_plain(make: Any, _kind: Any, args: tuple[Any, ...], _attributes: Any) -> Any:
    """A tensor on which a program has set attributes, as DeepSpeed does, without them."""
    if make not in [getattr(torch._utils, name) for name in _REBUILD]:
        raise pickle.UnpicklingError(f"{make!a} makes no tensor")
    return make(*args)


def plain(value: Any) -> Any:
    """The value of a member of an enumeration, whose class is not loaded."""
    return value.args[0] if isinstance(value, Inert) and len(value.args) == 1 else value


@final
class RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch._utils" and name in _REBUILD:
            return getattr(torch._utils, name)
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _rebuild_plain
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        return _inert(f"{module}.{name}")


def _load(file: Any, **options: Any) -> Any:
    return RestrictedUnpickler(file, **options).load()


# As torch.load takes it: for each of its files it makes an unpickler of this module.
_MODULE: Any = SimpleNamespace(__name__="restricted", Unpickler=RestrictedUnpickler, load=_load)


def load_pickle(path: Path) -> Any:
    try:
        if path.stat().st_size > MOST_METADATA_BYTES:
            raise UserError(
                f"{path}: has {path.stat().st_size} bytes; must have {MOST_METADATA_BYTES} at most"
            )
        return _load(io.BytesIO(path.read_bytes()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # whatever damaged bytes lead to
        raise UserError(f"{path}: is damaged, or is no pickle file: {error}") from None


def load_torch(path: Path | io.BytesIO, name: str = "") -> Any:
    """Load what torch.save has written; tensors are on the CPU, those of a file mapped into memory."""
    subject = str(path) if isinstance(path, Path) else name
    try:
        if not zipfile.is_zipfile(path):
            raise UserError(f"{subject}: is damaged, or was saved by a torch before 1.6: save it again")
        is_file = isinstance(path, Path)
        if not isinstance(path, Path):
            path.seek(0)
        return torch.load(
            path, map_location="cpu", pickle_module=_MODULE, weights_only=False, mmap=is_file or None
        )
    except OSError as error:
        raise UserError(f"{subject}: cannot be read: {error.strerror or error}") from None
    except UserError:
        raise
    except Exception as error:  # as above
        raise UserError(f"{subject}: is damaged: {error}") from None
