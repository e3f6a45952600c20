"""Results of ranks as bytes that hold data only: JSON, and tensors and arrays by safetensors.

Under torchrun results travel over a network. Pickle would let anyone who can write to a socket run code.
Here classes are found by name among those that are loaded, and no code of theirs runs.
"""

import dataclasses
import functools
import inspect
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

from echelon.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

_LENGTH_BYTES = 8
_FIX = (
    "return None, numbers, strings, bytes, tensors, numpy arrays, or lists, tuples, dicts, dataclasses and "
    "named tuples of them; write anything else to a file"
)
_SAME = "run the same code, with the same version of echelon, on every rank"
_ARRAY_KINDS = "biufcSUmM"  # numpy's: booleans, numbers, text, times. Objects and records are not plain bytes


def encode(value: object) -> bytes:
    """Return the bytes of `value`; a TypeError names what they cannot hold. Tensors are copied to the CPU."""
    from safetensors.torch import save

    encoder = _Encoder()
    try:
        text = json.dumps(encoder.structure(value, "the result")).encode()
    except RecursionError:
        raise TypeError(f"the result contains itself, or is nested too deep: {_FIX}") from None
    try:
        tensors = save(encoder.tensors)
    except Exception as error:  # a type of numbers that safetensors does not have
        types = sorted({str(tensor.dtype) for tensor in encoder.tensors.values()})
        raise TypeError(
            f"the result has tensors of {', '.join(types)}, which cannot all be sent ({error}): "
            "convert them to float64, or to integers"
        ) from error
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text + tensors


def decode(data: bytes) -> Any:
    """Return the value that `encode` was given. Tensors are on the CPU and need no gradient."""
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
        import numpy as np
        import torch

        kind = type(value)
        if kind in (type(None), bool, int, float, str):
            return value
        if kind in (list, tuple):
            items = [self.structure(each, f"{place}[{index}]") for index, each in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind in (dict, OrderedDict):
            return {
                kind.__name__: [
                    [
                        self.structure(key, f"the key {key!r} of {place}"),
                        self.structure(value[key], f"{place}[{key!r}]"),
                    ]
                    for key in value
                ]
            }
        if kind is bytes:
            return {"bytes": self._bytes(value)}
        if kind in (torch.Tensor, torch.nn.Parameter):
            return {"tensor": self._tensor(value, place)}
        if hasattr(kind, "as_named_tuple"):  # metrics, whose numbers may be on a device
            return self.structure(value.as_named_tuple(), place)
        if kind is np.ndarray:
            return {"array": self._array(value, place)}
        if isinstance(value, np.generic):
            return {"scalar": self._array(np.asarray(value), place)}
        if is_named_tuple(kind):
            name, fields = class_name(kind, place), kind._fields
            refuse_other_attributes(value, fields, place)
            pairs = zip(fields, value, strict=True)
            return {"named tuple": [name, [self.structure(each, f"{place}.{key}") for key, each in pairs]]}
        if dataclasses.is_dataclass(kind):
            name, contents = class_name(kind, place), fields_of(value, place)
            sent = {key: self.structure(each, f"{place}.{key}") for key, each in contents.items()}
            return {"dataclass": [name, sent]}
        raise TypeError(f"{place} is of type {kind.__qualname__}, which cannot be sent: {_FIX}")

    def _array(self, array: "np.ndarray[Any, Any]", place: str) -> list[Any]:
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(
                f"{place} is a numpy array of {array.dtype}, which cannot be sent: convert it to an array of "
                "numbers or text, or to lists (array.tolist())"
            )
        return [array.dtype.str, array.shape, self._bytes(array.tobytes())]

    def _bytes(self, data: bytes) -> str:
        import torch

        return self._keep(torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0))

    def _tensor(self, tensor: "Tensor", place: str) -> str:
        import torch

        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise TypeError(
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
        case "array":
            return _read_array(content, tensors)
        case "scalar":
            return _read_array(content, tensors)[()]
        case "tuple":
            return tuple(_decode(content, tensors))
        case "named tuple":
            name, values = content
            return make_named_tuple(find_class(name), _decode(values, tensors))
        case "dataclass":
            name, fields = content
            values = {key: _decode(fields[key], tensors) for key in fields}
            return make_dataclass(find_class(name), values)
        case "dict" | "OrderedDict":
            entries = [(_decode(key, tensors), _decode(value, tensors)) for key, value in content]
            return OrderedDict(entries) if kind == "OrderedDict" else dict(entries)
        case _:
            raise UserError(f"a result of another rank has content of the unknown kind {kind!r}: {_SAME}")


def _read_array(content: list[Any], tensors: "dict[str, Tensor]") -> "np.ndarray[Any, Any]":
    import numpy as np

    text, shape, name = content
    dtype, data = np.dtype(text), tensors[name].numpy().tobytes()
    if dtype.kind not in _ARRAY_KINDS:  # the bytes of an object would be a pointer
        raise UserError(f"a result of another rank has a numpy array of {dtype}, which is not read: {_SAME}")
    if math.prod(shape) * dtype.itemsize != len(data):
        raise UserError(
            f"a result of another rank has a numpy array of {dtype} and shape {tuple(shape)}, for which "
            f"{len(data)} bytes do not fit: {_SAME}"
        )
    return np.ndarray(tuple(shape), dtype, bytearray(data))


# Dataclasses and named tuples by their names and their fields. A name that arrives over a network finds only
# a class that this process has loaded already, and an object of it is made from fields alone: no `__init__`,
# no `__post_init__`, no setter of a property runs.


def is_named_tuple(kind: type[Any]) -> bool:
    return issubclass(kind, tuple) and isinstance(getattr(kind, "_fields", None), tuple)


def class_name(kind: type[Any], place: str) -> str:
    """Return the name by which other ranks find `kind`; `place` is where the object is, for errors."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _loaded_class(name) is not kind:
        raise TypeError(
            f"{place} is of type {kind.__qualname__}, which other ranks cannot find by its name: define the "
            "class at the top level of a module, or in such a class"
        )
    return name


def find_class(name: str) -> type[Any]:
    kind = _loaded_class(name)
    if kind is None:
        module = name.partition(":")[0]
        raise UserError(
            f"a result of another rank is of type {name}, which this rank has not imported: "
            f"import {module} at the top of the script"
        )
    if not dataclasses.is_dataclass(kind) and not is_named_tuple(kind):
        raise UserError(f"a result of another rank is of type {name}, which is no dataclass: it is not read")
    return kind


def fields_of(value: Any, place: str) -> dict[str, Any]:
    """Return the fields of a dataclass that have a value, if they are all there is to it."""
    kind = type(value)
    names = _field_names(kind)
    if _new_object(kind) is None:
        _refuse(
            value, place, "inherits from a built-in type", "return a dataclass that holds the value instead"
        )
    computed = [name for name in names if _runs_code(kind, name)]
    if computed:
        _refuse(value, place, f"computes its field {computed[0]}", "make it a plain field")
    refuse_other_attributes(value, names, place)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def refuse_other_attributes(value: Any, names: Sequence[str], place: str) -> None:
    """Refuse an object that would arrive without something that it has."""
    # typing adds __orig_class__ to an object that is made by Box[int](…); it only repeats the annotation.
    expected = {*names, "__orig_class__"}
    others = [name for name in getattr(value, "__dict__", {}) if name not in expected]
    caches = functools.cached_property
    lost = [
        name for name in others if not isinstance(inspect.getattr_static(type(value), name, None), caches)
    ]
    if lost:
        _refuse(value, place, f"has {lost[0]!r}, which is no field", "declare it: a field(init=False)")


def make_named_tuple(kind: type[Any], values: Sequence[Any]) -> Any:
    if not is_named_tuple(kind) or len(values) != len(kind._fields):
        raise UserError(f"a result of another rank has {len(values)} values for {kind.__qualname__}: {_SAME}")
    return tuple.__new__(kind, values)


def make_dataclass(kind: type[Any], fields: Mapping[str, Any]) -> Any:
    value = _new_object(kind)
    names = _field_names(kind)
    if value is None or any(name not in names or _runs_code(kind, name) for name in fields):
        raise UserError(
            f"a result of another rank has the fields {', '.join(fields)} for {kind.__qualname__}, which has "
            f"{', '.join(names) or 'none'}: {_SAME}"
        )
    for name, content in fields.items():
        object.__setattr__(value, name, content)  # also if it is frozen
    return value


def _loaded_class(name: str) -> type[Any] | None:
    """Return the class of a loaded module, or a class inside that, and so on.

    Reads what is there: a lookup by `getattr` could run code of the module.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = None if found is None else vars(found).get(part)
        found = found if isinstance(found, type) else None
    kind: type[Any] | None = found
    return kind


def _field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _new_object(kind: type[Any]) -> Any:
    """Return an object without values; None for a class that cannot be made so, like one that is a dict."""
    try:
        return object.__new__(kind)
    except TypeError:
        return None


def _runs_code(kind: type[Any], name: str) -> bool:
    """Return whether setting this field would call something, as of a property. A slot calls nothing."""
    attribute = inspect.getattr_static(kind, name, None)
    return hasattr(type(attribute), "__set__") and not isinstance(attribute, MemberDescriptorType)


def _refuse(value: Any, place: str, why: str, fix: str) -> None:
    raise TypeError(
        f"{place} is of type {type(value).__qualname__}, which {why}, so its fields are not all of it: {fix}"
    )
