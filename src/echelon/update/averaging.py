"""Weight averaging: an exponential moving average of every trained weight, sharded with it.

    after update 1     average = weight
    after update t     average = decay · average + (1 − decay) · weight

That is torch's AveragedModel with get_ema_multi_avg_fn(decay). Each rank averages what it updates: shards of
ZeRO, parts of matrices, its own stage; float32 masters, where there are any; in float32, where weights are
coarser; in host memory, where the host updates (offload=optimizer). Before the first update averages are what
the weights are, and take no memory. An update that changes no weight is not averaged, and no flag is read
from a device for that, but for the first update, as by the optimizer.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from echelon.collectives.buffer_layout import portions
from echelon.errors import UserError
from echelon.parallel.stage import LocalStages
from echelon.state.checkpoint.saved import SavedParameter
from echelon.state.ownership import AVERAGE, LocalParameter
from echelon.update.numbers import Flag
from echelon.update.precision.stepper import Stepper

_PORTION = 16 * 2**20  # bytes of float32 copies of weights that are coarser than their averages


@final
class WeightAverages:
    """The averages of what this rank updates. `show` puts them in the place of the weights, until `hide`."""

    def __init__(self, decay: float, stages: LocalStages, stepper: Stepper) -> None:
        self._rate, self._stages, self._stepper = 1 - decay, stages, stepper
        self._averages: dict[nn.Parameter, Tensor] = {}  # by local parameter
        self._averaged: set[nn.Parameter] = set()  # one unit after the other, in this update
        self._weights: list[Tensor] = []  # while averages are in their place
        self.is_shown = False
        self._must_share = False
        stepper.after_unit = self._average_unit

    # After an update.

    def after_update(self, skip: Flag) -> None:
        """All weights are updated; where `skip`, none was."""
        self._averaged.clear()
        if not self._stepper.by_unit:
            average = partial(self._average, self._stages.local_parameters())
            self._stepper.after_updates(average, skip)

    def _average_unit(self, unit: Sequence[LocalParameter], skip: Flag) -> None:
        """A unit is updated that may leave the device. What waits for other sums may lie in the same memory,
        and is updated later in the same update."""
        if self._stepper.by_unit:
            local = [each for each in unit if each.tensor not in self._averaged]
            self._averaged.update(each.tensor for each in local)
            self._average(local, skip)

    @torch.no_grad()
    def _average(self, local: Sequence[LocalParameter], skip: Flag) -> None:
        known = [each for each in local if each.tensor in self._averages]
        averages = [self._averages[each.tensor] for each in known]
        move(averages, [self._stepper.newest(each) for each in known], self._rate, skip)
        if len(known) < len(local) and not skip:
            for each in local:
                if each.tensor not in self._averages:
                    self._averages[each.tensor] = self._empty(each).copy_(self._stepper.newest(each))

    def _empty(self, local: LocalParameter) -> Tensor:
        dtype = average_dtype(local.tensor)
        device = torch.device("cpu") if self._stepper.on_host else local.tensor.device
        return torch.empty_like(local.tensor, dtype=dtype, device=device, requires_grad=False)

    # State.

    def state(self, local: LocalParameter) -> dict[str, Tensor]:
        """Return the average of a local parameter; none before the first update."""
        average = self._averages.get(local.tensor)
        return {} if average is None else {AVERAGE: average}

    @torch.no_grad()
    def load(self, local: LocalParameter, saved: SavedParameter) -> None:
        """Take the average of a checkpoint; without one, begin again with the next update."""
        self._averages.pop(local.tensor, None)
        if AVERAGE in saved.parts:
            average = self._averages[local.tensor] = self._empty(local)
            saved.fill(AVERAGE, average)

    def storages(self) -> list[Tensor]:
        return list(self._averages.values())

    # In the place of the weights. Nothing is under way, and all ranks call alike.

    def show(self) -> None:
        """Bring the averages to all ranks that use the weights. Keeps a copy of what this rank updates."""
        self._weights = [values.clone() for values in self._stored()]
        self.is_shown = True
        for (_, local), values in zip(self._stages.slices(), self._stored(), strict=True):
            average = self._averages.get(local.tensor)
            if average is not None:
                values.copy_(average)
        self._share()

    def hide(self, shares: bool) -> None:
        """Bring the weights back, bit for bit. Without `shares` no other rank is waited for: it may have
        failed; `finish_hiding` follows before weights are used."""
        for values, kept in zip(self._stored(), self._weights, strict=True):
            values.copy_(kept)
        self._weights, self.is_shown, self._must_share = [], False, True
        if shares:
            self.finish_hiding()

    def finish_hiding(self) -> None:
        if self._must_share:
            self._must_share = False
            self._share()

    def _stored(self) -> list[Tensor]:
        """Return the memory of weights between steps. A write through `.data` is no change of the user's."""
        for sharing, local in self._stages.slices():
            run = sharing.host_run(local)
            if run is not None:
                run.join()
        return [sharing.stored_values(local).data for sharing, local in self._stages.slices()]

    def _share(self) -> None:
        for sharing in dict.fromkeys(self._stages.sharings):
            sharing.share_first_weights()

    def check_hidden(self) -> None:
        if self.is_shown:
            raise UserError(
                "inside `with engine.averaged()` the weights are their averages, for evaluate, forward, "
                "full_state_dict, export, save_pretrained, and engine(x) under torch.no_grad(); train, "
                "synchronize, save, load and close after the block"
            )


def average_dtype(weight: Tensor) -> torch.dtype:
    """Return the type of a weight's average: in few bits, 0.0001 of a difference would round to nothing."""
    return torch.promote_types(weight.dtype, torch.float32)


def average_bytes(local: Iterable[LocalParameter]) -> int:
    """Return the bytes that averages of local parameters take."""
    return sum(each.tensor.numel() * average_dtype(each.tensor).itemsize for each in local)


def move(averages: Sequence[Tensor], weights: Sequence[Tensor], rate: float, skip: Flag) -> None:
    """Move averages towards weights by `rate` of the difference, unless `skip`."""
    if not isinstance(skip, Tensor) and skip:
        return

    def by_element(averages: list[Tensor], weights: list[Tensor]) -> None:
        if isinstance(skip, Tensor):
            move_on_device(averages, weights, rate, skip)
        else:
            torch._foreach_lerp_(averages, weights, rate)

    pairs = list(zip(averages, weights, strict=True))
    same = [(average, weight) for average, weight in pairs if average.dtype == weight.dtype]
    if same:
        by_element(*map(list, zip(*same, strict=True)))
    coarse = [(average, weight) for average, weight in pairs if average.dtype != weight.dtype]
    for portion in portions(coarse, lambda pair: pair[0].nbytes, _PORTION):
        by_element(
            [average for average, _ in portion], [weight.to(average.dtype) for average, weight in portion]
        )


def move_on_device(averages: list[Tensor], weights: list[Tensor], rate: float, skip: Tensor) -> None:
    """Move averages with one kernel for each type, which reads the flag on the device. No `_foreach_lerp_`
    takes a flag. The fused SGD does, by the protocol of GradScaler, and with these numbers it is the same:
    average −= rate · (1 · average − weight)."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(map(_as_real, averages), map(_as_real, weights), strict=True):
        of_type = by_type.setdefault(average.dtype, ([], []))
        of_type[0].append(average)
        of_type[1].append(weight)
    for targets, gradients in by_type.values():
        torch._fused_sgd_(
            targets,
            gradients,
            [],
            weight_decay=1.0,
            momentum=0.0,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=True,
            is_first_step=False,
            grad_scale=None,
            found_inf=skip.float(),
        )


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
