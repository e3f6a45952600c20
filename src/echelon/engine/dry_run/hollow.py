"""Memory without values: torch allocates it, and nothing writes to it, so that the machine gives none out.

Inside of `HollowMemory` a large tensor is a real tensor of the CPU, with a storage, an address and a version,
but no operation on it is computed: its results get memory of the right size and type. A small tensor has
values, as always: counts, flags and scales are what the host of a step reads. What is small and comes from
large tensors (a loss, a norm) is 1, a flag is not set, and a choice among n (the experts of a token) is
divided evenly.

    large   numbers of a model, of more than 256 B: no values
            others, of more than 16 MiB (flags: 1 MiB): integers, and float64, in which a step counts
    small   all that is not large: computed as always
"""

import operator
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_iter, tree_map, tree_unflatten

from echelon.errors import UserError

_SMALL = 2**8  # bytes of the largest storage of a model's numbers that has values
_SMALL_FLAGS = 2**20  # the same, of flags, one for each element of a weight or one for each token
_SMALL_OTHERS = 2**24  # the same, of what a step counts and chooses by: tokens, positions, statistics

_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap does not name

_FORMS = {"set_", "resize_"}  # change the form of a tensor and none of its values
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NEW = {"new_zeros", "new_ones", "new_full"}
_CHOICES = {"sort", "topk"}  # their second result are indices
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_READS = {"_local_scalar_dense": 1.0, "equal": True}  # what the host gets where there is no value


@final
class HollowMemory(TorchDispatchMode):
    """Leave out every operation on large tensors; only for tensors of the CPU.

    with HollowMemory():
        model = build("llama3-405b")  # 1.6 TB of parameters on a laptop
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name in _EMPTY and kwargs.get("device") != torch.device("meta"):
            return tree_map(_allocate, _forms_of(func, args, kwargs))
        if name in _FORMS or (_is_view(func) and not _shows_bits(func, args)):
            return func(*args, **kwargs)
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        if not tensors or name in _NEW or name.endswith("_like"):  # the values of these do not matter
            is_left_out = any(map(_is_large, tree_iter(_forms_of(func, args, kwargs))))
            is_left_out = is_left_out and kwargs.get("device") != torch.device("meta")
        else:
            is_left_out = any(map(is_hollow, tensors))
        return _leave_out(func, name, args, kwargs) if is_left_out else func(*args, **kwargs)


def is_hollow(tensor: Tensor) -> bool:
    """Return whether a tensor has no values inside of `HollowMemory`."""
    return not tensor.is_meta and _is_large(tensor)


def _is_large(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return False
    size = max(tensor.untyped_storage().nbytes(), tensor.numel() * tensor.itemsize)
    if tensor.dtype == torch.bool:
        return size > _SMALL_FLAGS
    return size > (_SMALL if _is_number(tensor) and tensor.dtype != torch.float64 else _SMALL_OTHERS)


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_view(func: Any) -> bool:
    """Return whether all results show memory of the arguments, which is not written."""
    returns = func._schema.returns
    return bool(returns) and all(
        each.alias_info is not None and not each.alias_info.is_write for each in returns
    )


def _shows_bits(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the bits of numbers without values are asked for, as integers, which have values."""
    return func is torch.ops.aten.view.dtype and is_hollow(args[0]) and not args[1].is_floating_point


def _leave_out(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what the operation would return, without values."""
    if name in _READS:
        return _READS[name]
    written = _written(func._schema, args, kwargs)
    sources = [_source(each, written) for each in func._schema.returns]
    if all(source is not None for source in sources):
        results = tuple(sources)
    else:
        forms = _forms_of(func, args, kwargs)
        of_each = forms if isinstance(forms, tuple) else (forms,)
        results = tuple(
            tree_map(_allocate, form) if source is None else source
            for form, source in zip(of_each, sources, strict=True)
        )
        if name in _CHOICES:
            _choose_evenly(args[0], results[1])
        elif name in _COMPARISONS:
            _fill(results[0], _compared(name, *args))
        elif name in ("all", "any", "sum") and is_hollow(args[0]) and args[0].dtype == torch.bool:
            _fill(results[0], int(_first(args[0])) * (args[0].numel() if name == "sum" else 1))
    return results if len(results) > 1 else (results[0] if results else None)


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that the operation writes to, by their names in the schema's annotations."""
    written = {}
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            written[_mark(argument.alias_info)] = value
    return written


def _source(returned: Any, written: dict[str, Any]) -> Any:
    is_written = returned.alias_info is not None and returned.alias_info.is_write
    return written[_mark(returned.alias_info)] if is_written else None


def _mark(alias: Any) -> str:
    return ",".join(sorted(alias.before_set))


_forms: dict[object, Any] = {}  # of operations that were seen, which are the same in every layer


def _forms_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an operation on the meta device."""
    if func is torch.ops.aten.index.Tensor:  # flags choose a number of rows that only values tell
        args = (args[0], [_as_indices(each) for each in args[1]])
    leaves, structure = tree_flatten((args, {name: kwargs[name] for name in kwargs if name != "generator"}))
    key = (func, structure, tuple(map(_described, leaves)))
    if key not in _forms:
        on_meta, named = tree_unflatten(map(_form, leaves), structure)
        if "device" in named:
            named["device"] = torch.device("meta")
        try:
            _forms[key] = func(*on_meta, **named)
        except (NotImplementedError, RuntimeError) as error:
            raise UserError(
                f"dry run: what {func} returns depends on values, which a dry run has not: {error}"
            ) from error
    return _forms[key]


def _described(leaf: Any) -> object:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _as_indices(index: Tensor | None) -> Tensor | None:
    is_flag = index is not None and index.dtype in (torch.bool, torch.uint8)
    return index.nonzero().squeeze(1) if is_flag and index is not None and index.dim() == 1 else index


def _form(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _allocate(form: Any) -> Any:
    if not isinstance(form, Tensor):
        return form
    try:
        tensor = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype)
    except RuntimeError:  # more than the machine has in one piece, of which it promises none here
        size = form.untyped_storage().nbytes()
        memory = mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS | _NO_RESERVE)
        tensor = torch.frombuffer(memory, dtype=form.dtype).as_strided(form.shape, form.stride())
    _answer(tensor)
    return tensor


def _answer(tensor: Tensor) -> None:
    """Give a tensor the values that the host may read: small numbers are 1, and no flag is set."""
    _fill(tensor, 1 if _is_number(tensor) else 0)


def _fill(tensor: Tensor, value: float) -> None:
    """Of what has no values, the first element of integers and flags stands for all."""
    if not is_hollow(tensor):
        tensor.fill_(value)
    elif not _is_number(tensor):
        _first(tensor).fill_(value)


def _first(tensor: Tensor) -> Tensor:
    return tensor[(0,) * tensor.dim()]


def _compared(name: str, one: Any, other: Any) -> bool:
    """Compare numbers that are 1. Other elements of one tensor may differ: `x == x[:1]` is not true."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return name in ("eq", "le", "ge") and one.shape == other.shape
    return bool(_COMPARISONS[name](1, other))


def _choose_evenly(scores: Tensor, indices: Tensor) -> None:
    """Let row r choose r, r + 1, …: over many rows, each of n is chosen as often. With scores [4, 3], the
    first choices of the rows are 0, 1, 2, 0."""
    rows = torch.arange(indices.numel() // max(1, indices.shape[-1])).view(*indices.shape[:-1], 1)
    indices.copy_((rows + torch.arange(indices.shape[-1])) % scores.shape[-1])
