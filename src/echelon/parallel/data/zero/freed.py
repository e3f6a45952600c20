"""Freed weights: whoever reads one gets it whole, or an error that names it; never memory of something else.

    whole       nn.Parameter        as the user made it
    freed       FreedParameter      the same object; any function of torch that reads it asks its owner first

The owner gathers the weight, or raises. Shape, type, device and gradient can be read at any time. Autograd's
own reads do not come by here: the version of a freed weight is another than the one that it has saved.
"""

import copy
from collections.abc import Callable, MutableMapping, Sequence
from types import GetSetDescriptorType
from typing import Any, NamedTuple, cast
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from echelon.errors import UserError
from echelon.nn.tracing import untraced
from echelon.parallel.data.zero.idle import gradient_between_steps, idle_kind, is_idle


class FreedParameter(nn.Parameter):
    """A parameter whose values are not on this rank at the moment."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _GRADIENT:
            return gradient_between_steps(args[0])
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return _read(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _make_whole(self)
        return copy.deepcopy(self, memo)


class _Freed(NamedTuple):
    """Who can make a parameter whole, and what it is then."""

    name: str
    read: "WeakMethod[Callable[[str], None]]"
    kind: type[nn.Parameter]


# What is known of each parameter that comes and goes.
_freed: MutableMapping[Tensor, _Freed] = WeakIdKeyDictionary()


def register_owner(parameter: nn.Parameter, name: str, read: Callable[[str], None]) -> None:
    """`read(name)`, a method, is called when somebody reads the parameter while it is freed."""
    _freed[parameter] = _Freed(name, WeakMethod(read), type(parameter))


def mark_whole(parameter: nn.Parameter) -> None:
    """It may be read again, as what it was."""
    if parameter in _freed:
        parameter.__class__ = idle_kind(parameter, _freed[parameter].kind)


@untraced
def _read(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `func` when all parameters among its arguments are whole."""
    if func is Tensor.__repr__:
        return f"{_freed[args[0]].name}, freed, shape={tuple(args[0].shape)}"
    for leaf in tree_leaves((args, kwargs)):
        if type(leaf) is FreedParameter:
            _make_whole(leaf)
    if func == _DATA and is_idle(args[0]):
        return args[0].detach()  # a write through it is then seen
    return func(*args, **kwargs)


def _make_whole(parameter: FreedParameter) -> None:
    name, read, _ = _freed[parameter]
    owner = read()
    if owner is None:
        raise UserError(
            f"{name} has no values on this rank: its engine is gone, and has left a part, or nothing, of it "
            "here (zero=3, offload); end an engine with engine.close(), which puts the model together"
        )
    owner(name)
    assert type(parameter) is not FreedParameter, f"{name} is not whole"


def _functions_without_values() -> set[Callable[..., Any]]:
    """What torch answers without a look at the values: all attributes but those that are tensors of them."""
    values = {"data", "T", "H", "mT", "mH", "real", "imag"}
    functions: set[Callable[..., Any]] = set()
    for name, attribute in vars(torch._C.TensorBase).items():
        if isinstance(attribute, GetSetDescriptorType) and name not in values:
            functions |= {attribute.__get__, attribute.__set__, attribute.__delete__}
    methods = (
        "dim ndimension size numel nelement stride storage_offset element_size untyped_storage get_device "
        "is_contiguous is_pinned is_floating_point is_complex is_signed is_inference requires_grad_ "
        "register_hook register_post_accumulate_grad_hook __len__ new_empty new_zeros new_ones new_full"
    )
    functions |= {getattr(Tensor, name) for name in methods.split()}
    makers = "empty_like zeros_like ones_like full_like rand_like randn_like"
    questions = "numel is_floating_point is_complex"
    return functions | {getattr(torch, name) for name in f"{makers} {questions}".split()}


_WITHOUT_VALUES = _functions_without_values()
_DATA, _GRADIENT = (descriptor.__get__ for descriptor in cast(Any, (Tensor.data, Tensor.grad)))
