"""The parameters of a unit as views of its flat memory, and changes of them that would be lost.

Whole weights that do not stay on the device (`Placement`) are shown while they are there, and hidden when
they are freed. What a pass writes into them is then gone, so it is refused: a write that autograd's version
counters tell of when the weights are hidden, any other by comparing this rank's part (`ChangedRuns`).
"""

from collections.abc import Container, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from echelon.collectives.agreement import device_fingerprint
from echelon.errors import UserError
from echelon.parallel.data.zero.weight_access import FreedParameter


class Placement(NamedTuple):
    """The place of weights while nothing uses them: in parts on all ranks, in host memory, or both."""

    sharded: bool
    offloaded: bool

    def __str__(self) -> str:
        fields = [name for name, is_set in zip(("zero=3", "offload=parameters"), self, strict=True) if is_set]
        return " and ".join(fields)

    @property
    def fix(self) -> str:
        """A change of the plan with which weights stay."""
        if self.offloaded:
            return "use zero=2 without offload=parameters" if self.sharded else "drop offload=parameters"
        return "use zero=2"


def lost_change(names: list[str], placement: Placement) -> UserError:
    """The error for weights that a pass has written to, of which no one keeps the new values."""
    without = " without offload=parameters" if placement.offloaded else ""
    return UserError(
        f"{', '.join(names)}: changed in place during a forward or backward pass, and with {placement} the "
        f"change is lost when the weight is freed; change weights in the optimizer, or use zero=0 and data=1"
        f"{without}"
    )


@final
class WeightViews:
    """Parameters whose memory is a place in a flat buffer each."""

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        flat: Tensor,
        places: Sequence[tuple[int, int]],
        placement: Placement,
    ) -> None:
        """Copy the parameters into the buffer, at `places`, and make them views of it."""
        self._parameters, self._places, self._placement = parameters, places, placement
        self._views: list[Tensor] = []
        for (_, parameter), (begin, end) in zip(parameters, places, strict=True):
            view = flat[begin:end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
            self._views.append(view)
        self._versions = self._current_versions()
        # What has no elements can be read at any time.
        self._kinds = [(parameter, type(parameter)) for _, parameter in parameters if parameter.numel()]

    def show(self) -> None:
        """The weights are there: the parameters are views of them, of the version that autograd has saved."""
        for parameter, kind in self._kinds:
            parameter.__class__ = kind
        for (_, parameter), view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        self._set_versions(self._versions)

    def hide(self) -> None:
        """The weights are to be freed: any read of a parameter asks its owner.

        Autograd reads what it has saved without asking. The version is then another than it has saved, and
        torch raises; where torch does not compare versions, it finds not-a-number.
        """
        first = self._views[0]
        has_nan = first.is_floating_point() or first.is_complex()
        # One element, expanded: takes no memory, and keeps none of the flat buffer alive.
        nothing = first.new_full((), float("nan") if has_nan else 0)
        for _, parameter in self._parameters:
            parameter.data = nothing.expand(parameter.shape)
        self._set_versions([version + 1 for version in self._versions])
        for parameter, _ in self._kinds:
            parameter.__class__ = FreedParameter

    def check_unchanged(self) -> None:
        """Raise if the weights were written to since they were shown, or given other memory."""
        current = self._current_versions()
        places = zip(self._parameters, current, self._versions, self._views, strict=True)
        names = [name for (name, p), now, before, view in places if now != before or not _lies_at(p, view)]
        if names:
            # The next step begins as if nothing had been written: the error is raised once.
            self._versions = current
            for (_, parameter), view in zip(self._parameters, self._views, strict=True):
                parameter.data = view
            raise lost_change(names, self._placement)

    def mark_updated(self, used: Container[nn.Parameter], *, is_shown: bool) -> None:
        """These were updated in a backward pass: torch refuses to go on with saved ones. Another version of
        others would say that the user has changed them."""
        self._versions = [p._version + (p in used) for _, p in self._parameters]
        if is_shown:
            self._set_versions(self._versions)

    def move_to(self, flat: Tensor) -> None:
        """`flat` has the same values in new memory: the parameters are views of that."""
        self._views = []
        for (_, parameter), (begin, end) in zip(self._parameters, self._places, strict=True):
            parameter.data = flat[begin:end].view(parameter.shape)
            self._views.append(parameter.data)

    @torch.no_grad()
    def take_over(self) -> None:
        """Copy parameters that the user has given other memory back into the buffer."""
        for (_, parameter), view in zip(self._parameters, self._views, strict=True):
            if not _lies_at(parameter, view):
                view.copy_(parameter)
                parameter.data = view

    def _current_versions(self) -> list[int]:
        return [parameter._version for _, parameter in self._parameters]

    def _set_versions(self, versions: list[int]) -> None:
        parameters = tuple(parameter for _, parameter in self._parameters)
        torch._C._autograd._unsafe_set_version_counter(parameters, tuple(versions))


@final
class ChangedRuns:
    """Finds runs of this rank's part that a pass has changed, which no version tells of. Flags stay on the
    device until `finish`: to read one would wait for all that was launched before."""

    def __init__(self, shards: Sequence[Tensor] | None, *, watches: bool = True) -> None:
        """`shards`: the runs as the rank keeps them on the device; None where it keeps them nowhere there,
        and fingerprints of what was shown are compared. `watches`: whether anything is compared at all."""
        self._shards = shards
        self._fingerprints: list[Tensor] = []
        self._flags: list[Tensor] = []
        self._is_finished, self._is_updated = not watches, False

    @property
    def is_watching(self) -> bool:
        """Return whether runs are compared: until `finish`, and in a step until their unit is updated."""
        return not self._is_finished and not self._is_updated

    def show(self, runs: Sequence[Tensor]) -> None:
        """Remember what weights in host memory are when they are there."""
        if self._shards is None:
            self._fingerprints = [device_fingerprint(run) for run in runs]

    @torch.no_grad()
    def compare(self, runs: Sequence[Tensor]) -> None:
        """Note which runs are not what they were."""
        if self._shards is not None:
            pairs = zip(runs, self._shards, strict=True)
            flags = [~torch.isclose(run, shard, rtol=0, atol=0, equal_nan=True).all() for run, shard in pairs]
        else:
            shown = zip(runs, self._fingerprints, strict=bool(self._fingerprints))
            flags = [(device_fingerprint(run) != before).any() for run, before in shown]
        before = self._flags or flags
        self._flags = [one | other for one, other in zip(before, flags, strict=True)]

    def start_update(self) -> None:
        """In a backward pass: from now on, whole weights may be those of before the update."""
        self._is_updated = True

    def start_step(self) -> None:
        """Forget changes of earlier passes: they are gone with the weights."""
        self._is_updated, self._flags = False, []

    def finish(self) -> list[bool]:
        """Stop comparing, and return which runs were changed, if any was compared. Reads the device."""
        self._is_finished = True
        flags, self._flags = self._flags, []
        return [bool(flag) for flag in flags]


def _lies_at(parameter: Tensor, view: Tensor) -> bool:
    return parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride()
