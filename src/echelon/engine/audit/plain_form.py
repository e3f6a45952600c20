"""The plain form of a model: called as its author wrote it, with whole weights, on one rank.

A plan wraps forwards, sets hooks and attributes, and leaves a rank with parts of the weights. All of that
lies in the `__dict__` of modules (and of wrappers around them), so the plain form is a set of dicts:

    before      what modules held, and of which class they were, when parallelize began to change them;
                dropout is keyed already
    settled     what the plan has changed since: only these keys are put back
    installed   each module has a copy of its dict, with those keys as before and whole tensors in it

The objects stay the same. So a loss that reads an attribute of the model (an auxiliary loss, say) reads that
of the plain form. What a forward assigns goes into the copies, and is forgotten with them.
"""

import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.nn.autograd.leaves import hooks_of, late_hooks, set_hooks, twin
from echelon.nn.wrapping import Wrapper, Wrapping, stack_of
from echelon.parallel.data.zero.weight_access import FreedParameter
from echelon.state.ownership import StateNames

_ABSENT = object()
# Tensors are given by `installed`; a mode is the user's.
_NOT_RECORDED = frozenset({"training", "_parameters", "_buffers", "_flat_weights", "_flat_weight_refs"})
_LAYER = re.compile(r"(.*\.)?\d+(?=\.)")  # up to the last number: an element of a list of modules

Owner = nn.Module | Wrapper


class _Tensors(NamedTuple):
    """The tensors of one module by attribute: names of parameters, names of buffers; None: there is none."""

    parameters: dict[str, str | None]
    buffers: dict[str, str | None]


@final
class PlainForm:
    """Made before a model is split; `settle` when that is done."""

    def __init__(self, model: nn.Module, names: StateNames, wrapping: Wrapping) -> None:
        self._names, self._wrapping = names, wrapping
        self._num_assigned = len(wrapping.assigned())
        parameters = dict(model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.order = list(parameters)
        # Of parameters that another rank has, and of those here: those that come and go lose none of them.
        self._hooks = {name: (hooks_of(p), late_hooks(p)) for name, p in parameters.items()}
        self._complex = {name for name, parameter in parameters.items() if parameter.is_complex()}
        self._tensors = {module: _tensors(path, module, names) for path, module in model.named_modules()}
        # Buffers in no state dict: no rank can give those that another one has dropped.
        self.temporary = {
            f"{path}.{key}".removeprefix("."): buffer
            for path, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if key in module._non_persistent_buffers_set and buffer is not None
        }
        self._before = {owner: _entries(owner) for owner in _owners(self._tensors)}
        self._kinds = {owner: type(owner) for owner in self._before}
        self._changed: dict[Owner, dict[str, Any]] = {}
        self._outside: Sequence[tuple[Any, str, object]] = ()

    def settle(self) -> None:
        """Note all that the plan has changed, also attributes of what is no module (a config)."""
        for owner, before in self._before.items():
            now = _entries(owner)
            keys = [
                key
                for key in {**before, **now}
                if not _is_same(before.get(key, _ABSENT), now.get(key, _ABSENT))
            ]
            if keys:
                self._changed[owner] = {key: before.get(key, _ABSENT) for key in keys}
        assigned = self._wrapping.assigned()[self._num_assigned :]
        self._outside = [each for each in assigned if not isinstance(each[0], nn.Module)]
        self._before = {owner: {} for owner in self._before}  # what has not changed is not kept alive

    def missing(self, device: torch.device) -> list[str]:
        """List the parameters and buffers of which this rank does not have the whole."""
        names = []
        for module, tensors in self._tensors.items():
            for key, name in tensors.parameters.items():
                if name is not None and not self._is_here(module._parameters.get(key), name, device):
                    names.append(name)
            for key, name in tensors.buffers.items():
                if name is not None and module._buffers.get(key) is None and name not in self.temporary:
                    names.append(name)
        return list(dict.fromkeys(names))

    def num_bytes(self, names: Sequence[str], dtype: torch.dtype) -> int:
        """Return the memory of `names` and of all gradients."""
        held = sum(self._shapes[name].numel() for name in names if name in self._shapes)
        trained = sum(self._shapes[name].numel() for name in self._names.trained)
        return (held + trained) * dtype.itemsize

    def streamed_bytes(self, names: Sequence[str], dtype: torch.dtype) -> int:
        """Return the memory of one layer of `names`, and of one weight and gradient on their way."""
        weights = {n: self._shapes[n].numel() * dtype.itemsize for n in names if n in self._shapes}
        gradients = [like.nbytes for like in self.gradients_like(dtype).values()]
        return max(layer_sizes(weights), default=0) + 3 * max(gradients, default=0)

    def gradients_like(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return, for each trained parameter, a tensor of the meta device, float32 at least."""
        real = torch.promote_types(dtype, torch.float32)
        return {
            name: torch.empty(
                self._shapes[name], dtype=real.to_complex() if name in self._complex else real, device="meta"
            )
            for name in sorted(self._names.trained)
        }

    def buffers(self) -> dict[str, Tensor]:
        """Return those that modules hold now, by name; not BatchNorm's, which replicas compute together."""
        return {
            name: buffer
            for module, tensors in self._tensors.items()
            if not isinstance(module, _BatchNorm)
            for key, name in tensors.buffers.items()
            if name is not None and (buffer := module._buffers.get(key)) is not None
        }

    @contextmanager
    def installed(
        self, whole: Mapping[str, Tensor], device: torch.device, *, fresh: bool = False
    ) -> Iterator[dict[str, nn.Parameter]]:
        """Inside, the model is plain; `whole` has what is `missing`. Yields the trained parameters by name.
        `fresh`: parameters are other objects in the same memory, so that `backward` fills other gradients. A
        loss that holds a parameter itself then trains it no more."""
        parameters = self._parameters(whole, device, fresh=fresh)
        clones: dict[int, Tensor] = {}
        with ExitStack() as stack, torch.no_grad():
            for owner in self._before:
                entries = vars(owner)
                stack.callback(object.__setattr__, owner, "__dict__", entries)
                plain = self._entries(owner, entries)
                if isinstance(owner, nn.Module):
                    tensors = self._tensors[owner]
                    plain["_parameters"] = {
                        key: None if name is None else parameters[name]
                        for key, name in tensors.parameters.items()
                    }
                    plain["_buffers"] = {
                        key: self._buffer(entries["_buffers"].get(key), name, whole, clones)
                        for key, name in tensors.buffers.items()
                    }
                object.__setattr__(owner, "__dict__", plain)
                if type(owner) is not self._kinds[owner]:  # one that watches what is read of it
                    stack.callback(object.__setattr__, owner, "__class__", type(owner))
                    object.__setattr__(owner, "__class__", self._kinds[owner])
            for module in self._tensors:
                if isinstance(module, nn.RNNBase):  # it has a list of its weights beside them
                    module._init_flat_weights()
            for place, attribute, value in reversed(self._outside):
                stack.callback(setattr, place, attribute, getattr(place, attribute))
                setattr(place, attribute, value)
            with torch.enable_grad():
                yield {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    def _entries(self, owner: Owner, current: dict[str, Any]) -> dict[str, Any]:
        entries = dict(current)
        for key, value in self._changed.get(owner, {}).items():
            if value is _ABSENT:
                del entries[key]
            else:
                entries[key] = copy.copy(value) if isinstance(value, dict) else value
        return entries

    def _is_here(self, parameter: nn.Parameter | None, name: str, device: torch.device) -> bool:
        if parameter is None or type(parameter) is FreedParameter or parameter.shape != self._shapes[name]:
            return False
        return parameter.device == device

    def _parameters(
        self, whole: Mapping[str, Tensor], device: torch.device, *, fresh: bool
    ) -> dict[str, nn.Parameter]:
        parameters: dict[str, nn.Parameter] = {}
        for module, tensors in self._tensors.items():
            for key, name in tensors.parameters.items():
                if name is None or name in parameters:
                    continue
                current = module._parameters.get(key)
                if name in whole:
                    trained = name in self._names.trained if current is None else current.requires_grad
                    parameters[name] = nn.Parameter(whole[name], requires_grad=trained)
                    if trained:
                        set_hooks(parameters[name], *self._hooks[name])
                elif self._is_here(current, name, device):
                    assert current is not None
                    parameters[name] = twin(current, current.detach()) if fresh else current
        return parameters

    def _buffer(
        self, current: Tensor | None, name: str | None, whole: Mapping[str, Tensor], clones: dict[int, Tensor]
    ) -> Tensor | None:
        """Return a copy, which a forward may change; one for modules that share a buffer."""
        if name is None:
            return None
        source = current if current is not None else whole.get(name, self.temporary.get(name))
        return None if source is None else clones.setdefault(id(source), source.detach().clone())


def _tensors(path: str, module: nn.Module, names: StateNames) -> _Tensors:
    def full(key: str) -> str:
        return f"{path}.{key}" if path else key

    parameters = {
        key: None if p is None else names.parameters[full(key)] for key, p in module._parameters.items()
    }
    buffers = {key: None if buffer is None else full(key) for key, buffer in module._buffers.items()}
    return _Tensors(parameters, buffers)


def _owners(modules: Mapping[nn.Module, object]) -> list[Owner]:
    return [*modules, *(wrapper for module in modules for wrapper in stack_of(module))]


def _entries(owner: Owner) -> dict[str, Any]:
    """Read what an object holds; of dicts a copy, because hooks are added to them in place."""
    return {
        key: copy.copy(value) if isinstance(value, dict) else value
        for key, value in vars(owner).items()
        if key not in _NOT_RECORDED
    }


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(one[key] is other[key] for key in one)
    return one is other


def layer_sizes(sizes: Mapping[str, int]) -> list[int]:
    """Add up the sizes of weights by layer: by element of a list of modules, or by module.
    layer_sizes({"0.up.weight": 3, "0.down.weight": 3, "1.up.weight": 4}) == [6, 4]"""
    layers: Counter[str] = Counter()
    for name, size in sizes.items():
        match = _LAYER.match(name)
        layers[match[0] if match else name.rpartition(".")[0]] += size
    return list(layers.values())
