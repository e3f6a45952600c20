"""Whole tensors of an engine's model, put together from what all ranks own, one after the other; and the
user's model with them, between steps, as its author wrote it."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.collectives.agreement import gather_values
from echelon.engine.audit.plain_form import PlainForm
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.step.feed import to_device
from echelon.errors import UserError
from echelon.memory.meter import free_bytes
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.sample_gathering import Replicas
from echelon.parallel.data.zero.weight_access import IdleParameter
from echelon.quantities import show_bytes
from echelon.state.assembly import Assembly
from echelon.state.ownership import AVERAGE, ENGINE, MASTER, VALUE, OwnedSlice, Slice


@final
class WholeTensors:
    """Reads the newest state of an engine. All ranks must make the same calls."""

    def __init__(
        self, state: EngineState, synchronize: Callable[[], None], owned: Callable[[], list[OwnedSlice]]
    ) -> None:
        """`synchronize` brings every rank to the newest weights; `owned` returns what this rank owns then."""
        self._state, self._synchronize, self._owned = state, synchronize, owned

    def weights(self, names: Collection[str] | None = None) -> Assembly:
        """Return weights and buffers, of these names or all."""
        return self._assembly(lambda box: box.part == VALUE and (names is None or box.name in names))

    def _assembly(self, chosen: Callable[[Slice], bool]) -> Assembly:
        self._synchronize()
        owned = [each for each in self._owned() if each.slice.name != ENGINE and chosen(each.slice)]
        return Assembly(owned, self._state.mesh.group("all"), self._state.mesh.device)

    def stream(self, check: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over the weights and buffers by name, one whole tensor at a time, on every rank.
        `check` raises if the state has changed since then."""
        return self._stream(self.weights(), check)

    def _stream(self, assembly: Assembly, check: Callable[[], None]) -> Iterator[tuple[str, Tensor]]:
        known = set(assembly)
        for name, first in self._state.names.state.items():
            if (first, VALUE) in known:  # extra state that is no tensor is not
                check()
                tensor = assembly.tensor((first, VALUE))
                assert tensor is not None
                yield name, tensor
                _take_memory(name, tensor)

    def state_dict(self, to: str | None) -> dict[str, Tensor]:
        """Return all weights and buffers on every rank, or (to="rank0") in host memory of rank 0 alone."""
        if to not in (None, "rank0"):
            raise UserError(f"full_state_dict(to={to!r}): give to='rank0', or leave it out for every rank")
        whole = {name: tensor for (name, _), tensor in _tensors(self.weights(), to_first=to is not None)}
        if to is not None and self._state.mesh.rank != 0:
            return {}
        local = self._state.module.state_dict(keep_vars=True)
        # Extra state has no owner: it is as it is here.
        return {
            name: whole[first] if first in whole else copy.deepcopy(local[name])
            for name, first in self._state.names.state.items()
            if first in whole or name in local
        }

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state of each parameter, under every name that the parameter has."""
        whole: dict[str, dict[str, Tensor]] = {}
        others = (VALUE, MASTER, AVERAGE)
        for (name, part), tensor in _tensors(self._assembly(lambda box: box.part not in others)):
            whole.setdefault(name, {})[part] = tensor
        return {name: whole.get(first, {}) for name, first in self._state.names.parameters.items()}


def _tensors(assembly: Assembly, *, to_first: bool = False) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for key in sorted(assembly):
        tensor = assembly.tensor(key, to=0 if to_first else None)
        if tensor is not None:
            yield key, tensor.cpu() if to_first else tensor


def _take_memory(name: str, tensor: Tensor) -> None:
    """Take the memory of a tensor: the loop's variable holds it until the next one is there. What shares it
    with an array of numpy, or with another process, cannot be taken, and stays as it is."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
        tensor.__class__ = PassedTensor
        tensor.label = name  # type: ignore[attr-defined]


@final
class PassedTensor(Tensor):
    """A tensor of `weights` whose turn is over: to read it raises an error that says so."""

    label: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel", "stride"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        passed = next(leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if type(leaf) is cls)
        raise UserError(
            f"{passed.label} is read after engine.weights() has gone on to the next tensor, which has taken "
            "its memory; use each tensor inside the loop, or keep tensor.clone(); engine.full_state_dict() "
            "returns all at once"
        )


@final
class WholeModel:
    """Makes the model of an engine whole, for a time. All ranks must make the same calls. What a rank holds
    whole is not copied: the model has other parameters in the same memory. What it lacks is put together from
    all ranks, and is gone with the context."""

    def __init__(self, form: PlainForm, state: EngineState, tensors: WholeTensors) -> None:
        self._form, self._state, self._tensors = form, state, tensors
        self._mesh = state.mesh

    @contextmanager
    def installed(self) -> Iterator[nn.Module]:
        """Inside, the model is whole and plain."""
        model, device, mode = self._state.module, self._mesh.device, torch.is_grad_enabled()
        copies = self._missing()
        plain, one_device = self._form.installed(copies, device, fresh=True), Replicas().gathering()
        with plain, one_device, torch.set_grad_enabled(mode):
            parameters = dict(model.named_parameters())
            for parameter in parameters.values():
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = IdleParameter  # a write through `.data` is then seen
            places = {name: parameter.data_ptr() for name, parameter in parameters.items()}
            versions = {name: copy._version for name, copy in copies.items()}
            yield model
            lost = [name for name, copy in copies.items() if copy._version != versions[name]]
            lost += [name for name, p in parameters.items() if p.data_ptr() != places[name]]
        if lost:
            raise UserError(
                f"{lost[0]} was changed inside of engine.whole(): with plan '{self._mesh.plan}' it is a "
                "copy, or has got other memory there, and the engine trains on with the weight of before; "
                "make the change before parallelize, after engine.close(), or in a checkpoint that "
                "engine.load reads"
            )

    def generate(self, args: Any, kwargs: Any) -> Any:
        """Call the model's own `generate`, in evaluation mode, with the same random numbers on every rank."""
        model, device = self._state.module, self._mesh.device
        if not callable(getattr(model, "generate", None)):
            raise UserError(
                f"engine.generate: {type(model).__name__} has no method generate, as language models of "
                "transformers have; write `with engine.whole() as model:`, and call the model there"
            )
        own = torch.randint(2**62, (1,)).item()
        seed = gather_values(own, self._mesh.group("all"), device)[0]
        states = GeneratorStates.of_torch(device)
        with self.installed() as whole, torch.no_grad(), states.seeded(seed):
            whole.eval()
            args, kwargs = tree_map(lambda leaf: to_device(leaf, device), (args, kwargs))
            return whole.generate(*args, **kwargs)  # type: ignore[operator]

    def _missing(self) -> dict[str, Tensor]:
        """Return copies of the weights and buffers that this rank has not, or not whole."""
        missing = set(self._form.missing(self._mesh.device))
        rows = gather_values(sorted(missing), self._mesh.group("all"), self._mesh.device)
        anywhere = {name for of_rank in rows for name in of_rank}
        if not anywhere:
            return {}
        assembly = self._tensors.weights(anywhere)
        self._check_memory(sum(assembly.like(key).nbytes for key in assembly if key[0] in missing))
        copies = {}
        for key in sorted(assembly):
            tensor = assembly.tensor(key)
            if key[0] in missing and tensor is not None:
                copies[key[0]] = tensor
        return copies

    def _check_memory(self, needed: int) -> None:
        free = free_bytes(self._mesh.device)
        rows = gather_values([needed, free], self._mesh.group("all"), self._mesh.device)
        for rank, (of_rank, available) in enumerate(rows):
            if of_rank > available:
                raise UserError(
                    f"engine.whole(): plan '{self._mesh.plan}' leaves rank {rank} with a part of the model; "
                    f"the rest takes {show_bytes(of_rank)} there, and {show_bytes(available)} are free; "
                    "engine.weights() returns one whole tensor at a time, and engine.export writes a folder"
                )
