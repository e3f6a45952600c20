"""The user's model between steps, as its author wrote it, with whole weights, on every rank.

What a rank holds whole is not copied: the model has other parameters in the same memory. What it lacks is put
together from all ranks, and is gone with the context.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from echelon.collectives.agreement import gather_values
from echelon.engine.audit.plain_form import PlainForm
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.saving.whole_tensors import WholeTensors
from echelon.engine.step.feed import to_device
from echelon.errors import UserError
from echelon.memory.meter import free_bytes
from echelon.nn.autograd.generators import GeneratorStates
from echelon.nn.sample_gathering import Replicas
from echelon.parallel.data.zero.weight_access import IdleParameter
from echelon.quantities import show_bytes


@final
class WholeModel:
    """Makes the model of an engine whole, for a time. All ranks must make the same calls."""

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
