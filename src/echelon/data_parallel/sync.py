"""How the replicas of a stage hold their weights and agree on gradients: the interface.

The engine calls, for each step and in this order: `start_step`; for each microbatch `start_backward`, the
backward pass, `finish_backward`; `finish_gradients`; the optimizer over `held()`; `finish_step`.
"""

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import NamedTuple, final

from torch import Tensor, nn

from echelon.data_parallel.adding import Adding, add_in_place
from echelon.ownership import Held, Owned, Slice, whole_slice

NOTHING: frozenset[nn.Parameter] = frozenset()


class Storages(NamedTuple):
    """The tensors whose memory a strategy answers for, by category of the memory meter."""

    parameters: list[Tensor]
    gradients: list[Tensor]


class Sync(ABC):
    """One way for replicas to stay equal. Knows nothing of other axes."""

    # Whether ranks hold different things, so that the whole must be put together from all of them.
    sharded: bool

    # Whether ranks talk during every microbatch, so that each must run the same number of them.
    lockstep: bool

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """The model's trainable parameters, as the user's optimizer is to see them."""

    @abstractmethod
    def held(self) -> list[Held]:
        """What this rank's optimizer updates."""

    @abstractmethod
    def start_step(self) -> None:
        """Forget old gradients. Also mends what a failed step left behind."""

    @abstractmethod
    def start_backward(self, *, last: bool) -> None:
        """A microbatch's backward pass begins; it is the `last` of the step."""

    @abstractmethod
    def finish_backward(self) -> None:
        """The backward pass is over: parameters that it has not reached will get no gradient from it."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Return when `.grad` of all that is held is the sum over replicas, or None if none used it."""

    @abstractmethod
    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        """Gradients whose squares, summed over ranks, are those of the whole: each counted by one rank.

        Those of the parameters `without` are left out: others count them.
        """

    @abstractmethod
    def finish_step(self) -> None:
        """The optimizer has updated what is held: bring the weights everywhere they are used."""

    @abstractmethod
    def owned(self) -> list[Owned]:
        """The weights that this rank holds, frozen ones too."""

    @abstractmethod
    def slices(self, held: Held) -> list[Slice]:
        """Where the pieces of `held.tensor` lie in the whole parameter, in order."""

    @abstractmethod
    def storages(self) -> Storages:
        """What memory holds weights and gradients on this rank now."""

    def add_in_place(self) -> None:  # noqa: B027 (nothing to do where gradients never stay, or parts do it)
        """Let the model's matrices add to their gradients, where several microbatches make one."""

    def gather(self, *, backward: bool) -> None:  # noqa: B027 (nothing to do where weights stay whole)
        """The model is about to be used: begin to make whole what comes first."""

    def free(self) -> None:  # noqa: B027
        """The model was used: give back what was gathered ahead and not used."""

    def renew(self) -> None:
        """Move the weights to new memory, and leave the old to whoever holds it."""
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()


@final
class Alone(Sync):
    """One replica: there is nobody to agree with."""

    sharded = False
    lockstep = False

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._held = hold_whole(module)
        self._adding = Adding()

    def parameters(self) -> list[nn.Parameter]:
        return [held.parameter for held in self._held]

    def held(self) -> list[Held]:
        return self._held

    def start_step(self) -> None:
        for held in self._held:
            held.parameter.grad = None

    def start_backward(self, *, last: bool) -> None:  # noqa: ARG002
        self._adding.open = True

    def finish_backward(self) -> None:
        self._adding.open = False

    def finish_gradients(self) -> None:
        pass

    def norm_share(self, without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
        return held_gradients(self._held, without)

    def finish_step(self) -> None:
        pass

    def owned(self) -> list[Owned]:
        return own_module(self._module, replicated=())

    def slices(self, held: Held) -> list[Slice]:
        return [whole_slice(held.name, held.parameter, replicated=())]

    def storages(self) -> Storages:
        return module_storages(self._module)

    def add_in_place(self) -> None:
        add_in_place(self._module, self._adding)


def hold_whole(module: nn.Module) -> list[Held]:
    """Every trainable parameter, whole."""
    return [Held(name, p, p) for name, p in module.named_parameters() if p.requires_grad]


def held_gradients(held: list[Held], without: Set[nn.Parameter] = NOTHING) -> list[Tensor]:
    """The gradients of what is held, where there are any."""
    return [h.tensor.grad for h in held if h.tensor.grad is not None and h.parameter not in without]


def own_module(module: nn.Module, replicated: tuple[str, ...]) -> list[Owned]:
    """Every parameter of a module that this rank holds whole."""
    return [Owned(whole_slice(name, p, replicated), p) for name, p in module.named_parameters()]


def module_storages(module: nn.Module) -> Storages:
    parameters: list[Tensor] = list(module.parameters())
    return Storages(parameters, [p.grad for p in parameters if p.grad is not None])
