"""The twins of a rank's local parameters in host memory, which the optimizer updates in their place.

    kind        weights (pinned)          what the optimizer updates
    same type   in the weights' type      the same memory
    masters     in the weights' type      float32, rounded into `weights` after each update
    rounding    bf16                      float32 for the time of an update, rounded stochastically

Twins have memory from the first update on. Until then they are what the weights are, and take none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives import HostBoundary
from echelon.parallel.data.zero.host_weights import HostRun
from echelon.state.ownership import LocalParameter
from echelon.update.offload.host_adam import Scratch
from echelon.update.precision.flat_memory import views_like, without_memory
from echelon.update.precision.rounding import KeyedRounding, Placement
from echelon.update.precision.stepper import follow

# Bytes of optimizer state for each byte of what it updates, of optimizers that keep less than two moments.
_STATE = {"SGD": 1, "Adafactor": 0, "SM3": 1, "Muon": 1, "Adagrad": 1, "RMSprop": 1}
_MOMENTS = 2
_CPU = torch.device("cpu")


@final
@dataclass(eq=False)
class Twin:
    local: LocalParameter
    updated: nn.Parameter
    weights: Tensor
    version: tuple[int, int] | None = None  # of the model's weight whose values it has; None: it has none
    is_watched: bool = False  # whether another version says that the user has changed the weight
    host_run: HostRun | None = None  # where the weight is kept on the host, with offload=parameters

    def current_version(self) -> tuple[int, int]:
        """Return another version, if the user has changed the weight, or given it other memory."""
        if not self.is_watched:
            return 0, 0
        return self.local.parameter._version, self.local.parameter.data_ptr()

    def forget_version(self) -> None:
        """The user has changed the weight, as the engine has found."""
        if self.version is not None:
            self.version = (-1, -1)

    @property
    def is_changed(self) -> bool:
        """Return whether the weight has values that the twin lacks, and the next update begins with."""
        return self.is_watched and self.version is not None and self.version != self.current_version()


@final
class HostTwins:
    """All twins of a rank, and what is computed with them on the host."""

    def __init__(
        self,
        local: Sequence[LocalParameter],
        boundary: HostBoundary,
        *,
        masters: bool,
        rounding: KeyedRounding | None = None,
        placements: Mapping[nn.Parameter, Placement] | None = None,
        host_runs: Mapping[nn.Parameter, HostRun] | None = None,
        in_place: bool = True,
    ) -> None:
        """`placements`: of the elements of each local parameter, for `rounding`. `host_runs`: of
        local parameters that are kept on the host; these weights change with the twins, if `in_place`."""
        self._boundary, self.has_masters, self._rounding = boundary, masters, rounding
        self._placements = {} if placements is None else placements
        self._in_float32 = masters or rounding is not None
        self._twins = {each.tensor: self._without_memory(each) for each in local}
        self._in_place = in_place
        for tensor, run in (host_runs or {}).items():
            self._twins[tensor].host_run = run
        self._pinned: list[Tensor] = []
        self._masters: Tensor | None = None
        self._scratch: dict[str, Tensor] = {}  # float32, for the time of one update
        self.has_memory = False

    @property
    def all(self) -> list[Twin]:
        return list(self._twins.values())

    def of(self, local: LocalParameter) -> Twin:
        return self._twins[local.tensor]

    def allocate(self) -> None:
        for dtype in dict.fromkeys(tensor.dtype for tensor in self._twins):
            of_type = [twin for twin in self.all if twin.local.tensor.dtype == dtype]
            own = [twin for twin in of_type if not self._is_in_place(twin)]
            memory, views = views_like([twin.local.tensor for twin in own], dtype, self._boundary.empty)
            self._pinned.append(memory)
            for twin, view in zip(own, views, strict=True):
                twin.weights = view
                twin.is_watched = twin.host_run is None and _shares_memory(twin.local)
            for twin in of_type:
                if twin.host_run is not None and self._in_place:
                    twin.weights = twin.host_run.memory
                if not self._in_float32:
                    twin.updated.data = twin.weights
        if self.has_masters:
            self._masters, views = views_like(list(self._twins), torch.float32, torch.empty)
            for twin, view in zip(self.all, views, strict=True):
                twin.updated.data = view
        self.has_memory = True

    # What the thread that updates calls.

    def _is_in_place(self, twin: Twin) -> bool:
        return self._in_place and twin.host_run is not None

    def load(self, twins: Sequence[Twin]) -> None:
        """Begin masters with `weights`, or the copies of offload=parameters, that no update has made."""
        for twin in twins:
            if twin.host_run is not None and not self._in_place:
                twin.weights.copy_(twin.host_run.memory)
        if self.has_masters and twins:
            torch._foreach_copy_([twin.updated.detach() for twin in twins], [twin.weights for twin in twins])

    def follow(self, twins: Sequence[Twin]) -> None:
        """`weights` have values of the user's: masters take the elements that are others."""
        if self.has_masters:
            for twin in twins:
                follow(twin.updated.detach(), twin.weights)

    def update(
        self,
        twins: Sequence[Twin],
        gradients: Sequence[Tensor],
        call: Callable[[], None],
        number: int,
        in_portions: Callable[[Sequence[Tensor], Sequence[Tensor], Scratch], bool] = lambda *_: False,
    ) -> None:
        """Let `call` make update `number` of twins; then `weights` have the new values. `in_portions` makes
        that of masters and their weights in another way, or returns False."""
        weights, targets = [twin.weights for twin in twins], [twin.updated for twin in twins]
        if self.has_masters and in_portions(gradients, weights, partial(self._reuse, "gradients")):
            return
        if self._rounding is not None and twins:  # ranks that talk in an update all call, also with nothing
            copies = self._in_scratch("weights", twins, weights)
            for target, copy in zip(targets, copies, strict=True):
                target.data = copy
        if self._in_float32 and any(gradient.dtype != torch.float32 for gradient in gradients):
            gradients = self._in_scratch("gradients", twins, gradients)
        for target, gradient in zip(targets, gradients, strict=True):
            target.grad = gradient
        try:
            call()
        finally:
            for target in targets:
                target.grad = None
        self._finish(twins, number)

    def _finish(self, twins: Sequence[Twin], number: int) -> None:
        if self._rounding is not None:
            self._rounding.start_update(number)
            for twin in twins:
                self._rounding.round(twin.weights, twin.updated, self._placements[twin.local.tensor])
                twin.updated.data = without_memory(twin.local.tensor, torch.float32, _CPU)
        elif self.has_masters and twins:
            torch._foreach_copy_([twin.weights for twin in twins], [twin.updated.detach() for twin in twins])

    def _in_scratch(self, use: str, twins: Sequence[Twin], values: Sequence[Tensor]) -> list[Tensor]:
        """Float32 copies, in memory that is used again."""
        like = [twin.local.tensor for twin in twins]
        _, copies = views_like(like, torch.float32, partial(self._reuse, use))
        torch._foreach_copy_(copies, list(values))
        return copies

    def _reuse(self, use: str, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if use not in self._scratch or len(self._scratch[use]) < size:
            self._scratch[use] = torch.empty(size, dtype=dtype)
        return self._scratch[use]

    # What it takes.

    def parameter_storages(self) -> list[Tensor]:
        return list(self._pinned)

    def newest(self, local: LocalParameter) -> Tensor:
        """Return the values of a local parameter between updates, as fine as they are kept."""
        twin = self.of(local)
        return twin.updated.detach() if self.has_masters else twin.weights

    def master_storages(self) -> list[Tensor]:
        masters = [] if self._masters is None else [self._masters]
        return [*masters, *self._scratch.values()]

    def num_bytes(self, optimizer: torch.optim.Optimizer) -> int:
        """Return about what weights, masters and the state of known optimizers will take."""
        weights = sum(twin.local.tensor.nbytes for twin in self.all if not self._is_in_place(twin))
        own = sum(tensor.nbytes for tensor in self._twins)
        float32 = sum(4 * tensor.numel() for tensor in self._twins)
        updated = float32 if self._in_float32 else own
        inside: Sequence[torch.optim.Optimizer] = getattr(optimizer, "optimizers", (optimizer,))
        moments = max(_STATE.get(type(each).__name__, _MOMENTS) for each in inside)
        return weights + (float32 if self.has_masters else 0) + moments * updated

    def _without_memory(self, local: LocalParameter) -> Twin:
        dtype = torch.float32 if self._in_float32 else local.tensor.dtype
        updated = nn.Parameter(without_memory(local.tensor, dtype, _CPU))
        return Twin(local, updated, without_memory(local.tensor, local.tensor.dtype, _CPU))


def _shares_memory(local: LocalParameter) -> bool:
    """Return whether what is updated is memory of the model's parameter, which the user can change."""
    own, of_model = local.tensor.untyped_storage(), local.parameter.untyped_storage()
    return bool(own._cdata == of_model._cdata)
