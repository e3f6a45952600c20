"""Results of ranks as bytes that hold data only: JSON, and tensors by safetensors.

Under torchrun results travel over a network. Pickle would let anyone who can write to a socket run code.
Here classes are looked up among the modules that are loaded, and no code of theirs runs.
"""

import dataclasses
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from echelon.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

_LENGTH_BYTES = 8
_FIX = (
    "return None, numbers, strings, bytes, tensors, or lists, tuples, dicts, dataclasses and named tuples of "
    "them; write anything else to a file"
)


@dataclasses.dataclass(frozen=True, repr=False)
class RemoteResult:
    """Takes the place of another rank's result, which only rank 0 has."""

    rank: int

    def __repr__(self) -> str:
        return f"<the result of rank {self.rank}: only rank 0 has it>"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"only rank 0 has this result, so there is no {name!r} here: use it on rank 0")

    def __bool__(self) -> bool:
        raise UserError(f"{self!r} is neither true nor false: use the result on rank 0")


def encode(value: object) -> bytes:
    """The bytes of `value`; a UserError names what they cannot hold. Tensors are copied to the CPU."""
    from safetensors.torch import save

    encoder = _Encoder()
    text = json.dumps(encoder.structure(value, "the result")).encode()
    try:
        tensors = save(encoder.tensors)
    except Exception as error:  # a type of numbers that safetensors does not have
        types = sorted({str(tensor.dtype) for tensor in encoder.tensors.values()})
        raise UserError(
            f"the result has tensors of {', '.join(types)}, which cannot all be sent ({error}): "
            "convert them to float64, or to integers"
        ) from error
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + tensors


def decode(data: bytes) -> Any:
    """The value that `encode` was given. Tensors are on the CPU and need no gradient."""
    from safetensors.torch import load

    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    return _decode(json.loads(data[_LENGTH_BYTES:end]), load(data[end:]))


class _Encoder:
    """Turns a value into JSON: None, numbers, strings and lists as they are, others as {kind: content}."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._storages: set[int] = set()

    def structure(self, value: Any, place: str) -> Any:
        """`place` says where `value` is, for errors."""
        import torch

        kind = type(value)
        if kind in (type(None), bool, int, float, str):
            return value
        if kind is list:
            return self._items(value, place)
        if kind is tuple:
            return {"tuple": self._items(value, place)}
        if kind in (dict, OrderedDict):
            return {kind.__name__: [self._entry(key, value[key], place) for key in value]}
        if kind is bytes:
            data = torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0)
            return {"bytes": self._keep(data)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return {"tensor": self._tensor(value, place)}
        if hasattr(kind, "as_named_tuple"):  # metrics, whose numbers may be on a device
            return self.structure(value.as_named_tuple(), place)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return {"named tuple": [_class_name(kind, place), self._items(value, place)]}
        if dataclasses.is_dataclass(value):
            return {"dataclass": [_class_name(kind, place), self._fields(value, place)]}
        raise UserError(f"{place} is of type {kind.__qualname__}, which cannot be sent: {_FIX}")

    def _items(self, values: Iterable[Any], place: str) -> list[Any]:
        return [self.structure(value, f"{place}[{index}]") for index, value in enumerate(values)]

    def _entry(self, key: Any, value: Any, place: str) -> list[Any]:
        return [
            self.structure(key, f"the key {key!r} of {place}"),
            self.structure(value, f"{place}[{key!r}]"),
        ]

    def _fields(self, value: Any, place: str) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(value)]
        return {name: self.structure(getattr(value, name), f"{place}.{name}") for name in names}

    def _tensor(self, tensor: "Tensor", place: str) -> str:
        import torch

        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise UserError(
                f"{place} is a sparse, quantized or meta tensor, which cannot be sent: "
                "return a dense tensor (tensor.to_dense(), tensor.dequantize())"
            )
        return self._keep(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())

    def _keep(self, tensor: "Tensor") -> str:
        storage = tensor.untyped_storage().data_ptr()
        if storage in self._storages:  # safetensors refuses two tensors in one memory
            tensor = tensor.clone()
        self._storages.add(storage)
        name = str(len(self.tensors))
        self.tensors[name] = tensor
        return name


def _decode(structure: Any, tensors: "dict[str, Tensor]") -> Any:
    if isinstance(structure, list):
        return [_decode(each, tensors) for each in structure]
    if not isinstance(structure, dict):
        return structure
    ((kind, content),) = structure.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "bytes":
            return tensors[content].numpy().tobytes()
        case "tuple":
            return tuple(_decode(content, tensors))
        case "named tuple":
            name, values = content
            return tuple.__new__(_find_class(name), _decode(values, tensors))
        case "dataclass":
            name, fields = content
            return _rebuild(_find_class(name), {key: _decode(fields[key], tensors) for key in fields})
        case _:
            entries = [(_decode(key, tensors), _decode(value, tensors)) for key, value in content]
            return OrderedDict(entries) if kind == "OrderedDict" else dict(entries)


def _rebuild(kind: type[Any], fields: dict[str, Any]) -> Any:
    """A dataclass with these fields, without a call of its `__init__`."""
    value = object.__new__(kind)
    for name, content in fields.items():
        object.__setattr__(value, name, content)  # also if it is frozen
    return value


def _class_name(kind: type[Any], place: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _loaded_class(name) is not kind:
        raise UserError(
            f"{place} is of type {kind.__qualname__}, which other ranks cannot find: define the class at the "
            "top level of a module"
        )
    return name


def _find_class(name: str) -> type[Any]:
    kind = _loaded_class(name)
    is_data = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    if kind is None or not is_data:
        raise UserError(f"a result of another rank is of type {name}, which this rank has not imported")
    return kind


def _loaded_class(name: str) -> type[Any] | None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None
