"""A stage: one position of the pipeline on this rank, and the seam at which strategies meet.

Its layers are called in order; its parameter sets are each shared in a way of their own (`Sharing`). The
interpreter speaks to stages alone. What a rank does with all of its stages at once is in `LocalStages`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from echelon.nn.autograd.leaves import used_once
from echelon.nn.batch import call_stage
from echelon.nn.forward_state import NumberSlot, attributes, attributes_as
from echelon.nn.layering import listed_layers
from echelon.parallel.data.buffers import Buffers
from echelon.parallel.data.gradients import sum_tied, sum_within_stage
from echelon.parallel.data.sharing import Problem, Sharing, Storages
from echelon.parallel.data.zero.units import SMALLEST as SMALLEST_UNIT
from echelon.parallel.data.zero.units import unit_modules
from echelon.plan import Plan
from echelon.program import Program
from echelon.state.ownership import LocalParameter, OwnedSlice


class Stage:
    """The layers of one stage, and how each of its parameter sets is shared."""

    def __init__(
        self,
        index: int,
        module: nn.Module,
        sharings: Sequence[Sharing],
        buffers: Buffers,
        smallest_unit: int = SMALLEST_UNIT,
    ) -> None:
        self.index, self.module, self.sharings, self._buffers = index, module, list(sharings), buffers
        self._smallest_unit = smallest_unit
        self._iterated = iterated_modules(module)
        self.counted: list[NumberSlot] = []  # numbers that count steps, as audits have found
        self._counted_before: dict[NumberSlot, Any] = {}  # the first forward pass of this step
        self._num_forwards = 0  # in this step
        self._has_seen_graph = False
        reducers = [sharing.reducer for sharing in sharings if sharing.reducer is not None]
        for previous, following in pairwise(reducers):
            following.follow(previous)

    @property
    def lockstep(self) -> bool:
        """Return whether replicas communicate in every microbatch: each must run the same number of them."""
        return any(sharing.lockstep for sharing in self.sharings)

    def layers(self) -> list[nn.Module]:
        """Return the layers that memory savers wrap: those that the module lists, or else its units, of any
        size if none is large, or itself if it has no children. A unit inside of another is left to that."""
        listed = listed_layers(self.module)
        if listed:
            return listed
        units = unit_modules(self.module, self._smallest_unit) or unit_modules(self.module, 1)
        inside = {each for unit in units for each in unit.modules() if each is not unit}
        return [unit for unit in units if unit not in inside] or [self.module]

    def wrapped_layers(self, plan: Plan) -> list[nn.Module]:
        """Return what is compiled or compressed: the layers, or the module where nothing is about layers."""
        is_by_layer = plan.recompute not in ("none", "selective") or "activations" in plan.offload
        own = set(self.module.modules())
        layers = self.layers() if is_by_layer else listed_layers(self.module)
        return [layer for layer in layers if layer in own] or [self.module]

    def start_step(self) -> None:
        self._num_forwards = 0

    def mark_run(self) -> None:
        self._num_forwards += 1

    def forward(self, value: Any) -> Any:
        self.mark_run()
        if self._num_forwards == 1:
            self._counted_before = attributes(self.counted)
        elif self._iterated or self._counted_before:
            with no_iteration(self._iterated), attributes_as(self._counted_before):
                return call_stage(self.module, value)
        return call_stage(self.module, value)

    def start_backward(self, *, last: bool) -> None:
        for sharing in self.sharings:
            sharing.start_backward(last=last)

    def see_graph(self, outputs: Sequence[GradientEdge]) -> None:
        """A backward pass from `outputs` is next: the first one shows which parameters it uses once."""
        if not self._has_seen_graph:
            self._has_seen_graph = True
            once = used_once(outputs)
            for sharing in self.sharings:
                sharing.keep_products(once)

    def convert_products(self) -> None:
        """A backward pass leads through several forward passes, where that of `see_graph` led through one."""
        self._has_seen_graph = True
        for sharing in self.sharings:
            sharing.convert_products()

    def start_early_backward(self) -> None:
        """Gradients may come before the backward pass that reduces them: they only add up."""
        for sharing in self.sharings:
            sharing.start_early_backward()

    def finish_backward(self) -> None:
        for sharing in self.sharings:
            sharing.finish_backward()

    def make_up_round(self, *, last: bool) -> None:
        """Take part in a backward pass of other replicas, where they talk in each. `last`: of this step."""
        for sharing in self.sharings:
            if sharing.lockstep:
                sharing.start_backward(last=last)
                sharing.finish_backward()

    def gather(self, *, backward: bool) -> None:
        for sharing in self.sharings:
            sharing.gather(backward=backward)

    def free(self) -> None:
        for sharing in self.sharings:
            sharing.free()

    @contextmanager
    def second_run(self, layer: nn.Module) -> Iterator[None]:
        with ExitStack() as around:
            for sharing in self.sharings:
                around.enter_context(sharing.second_run(layer))
            yield

    def abandon_pass(self) -> None:
        """A pass has raised, and the stage does not run any more."""
        for sharing in self.sharings:
            sharing.abandon_pass()

    def reduce(self) -> None:
        """Return when the gradients of the stage are summed."""
        for sharing in self.sharings:
            sharing.start_reductions()
        for sharing in self.sharings:
            sharing.reduce()
        sum_within_stage(self.sharings)

    def publish(self) -> None:
        for sharing in self.sharings:
            sharing.publish()
        self.share_buffers()

    def share_buffers(self) -> None:
        self._buffers.share()

    def differing_buffers(self) -> list[str]:
        """Buffers of which replicas that have run this step hold other values; all of them must ask."""
        return self._buffers.differing(has_run=self._num_forwards > 0)

    def describe(self) -> str:
        """'stage 1: dense 1,234,567 parameters over data (2), Zero'."""
        sets = "; ".join(
            f"{sharing.parameter_set.describe()}, {type(sharing).__name__}" for sharing in self.sharings
        )
        return f"stage {self.index}: {sets}"


@final
@dataclass(frozen=True)
class LocalStages:
    """The stages of this rank; `program` is that of a step, which also says where every stage is."""

    stages: Mapping[int, Stage]
    program: Program
    boundaries: list[int]  # the layers before which stages begin

    @property
    def sharings(self) -> list[Sharing]:
        return [sharing for stage in self.stages.values() for sharing in stage.sharings]

    @property
    def modules(self) -> list[nn.Module]:
        return [stage.module for stage in self.stages.values()]

    @property
    def lockstep(self) -> bool:
        return any(stage.lockstep for stage in self.stages.values())

    def trained(self) -> list[nn.Parameter]:
        """The model's trained parameters, as the user's optimizer is to see them."""
        return [p for sharing in self.sharings for _, p in sharing.parameter_set.trained]

    def local_parameters(self) -> list[LocalParameter]:
        return [local for sharing in self.sharings for local in sharing.local_parameters()]

    def start_step(self) -> None:
        for sharing in self.sharings:
            sharing.start_step()

    def sum_tied_gradients(self) -> None:
        sum_tied(self.sharings)

    def problem_flags(self, device: torch.device) -> Tensor:
        """Return how many sharings found each `Problem` in this step, and another place, which is 0."""
        flags = torch.zeros(len(Problem) + 1, dtype=torch.float64, device=device)
        for sharing in self.sharings:
            for problem, flag in sharing.problems().items():
                flags[list(Problem).index(problem)].add_(flag)
        return flags

    def has_problems(self) -> bool:
        """Return whether a sharing has looked for one in this step."""
        return any(sharing.problems() for sharing in self.sharings)

    def norm_share(self) -> list[Tensor]:
        return [gradient for sharing in self.sharings for gradient in sharing.norm_share()]

    def publish(self) -> None:
        for stage in self.stages.values():
            stage.publish()

    def share_buffers(self) -> None:
        for stage in self.stages.values():
            stage.share_buffers()

    def reallocate(self) -> None:
        for sharing in self.sharings:
            sharing.reallocate()

    def owned_weights(self) -> list[OwnedSlice]:
        return [owned for sharing in self.sharings for owned in sharing.owned()]

    def slices(self) -> Iterator[tuple[Sharing, LocalParameter]]:
        """Each local parameter with the sharing that knows where it lies in the whole."""
        for sharing in self.sharings:
            for local in sharing.local_parameters():
                yield sharing, local

    def storages(self) -> Storages:
        each = [sharing.storages() for sharing in self.sharings]
        return Storages(
            [tensor for storages in each for tensor in storages.parameters],
            [tensor for storages in each for tensor in storages.gradients],
        )

    def close(self) -> None:
        for sharing in self.sharings:
            sharing.close()


# Spectral norms, which improve an estimate in every forward pass: once per step, however the batch is cut.
#
# On one device a step is one forward pass, and iterates once. Where it has several, one for each microbatch,
# only the first iterates, and all of them use the weight of the same estimate.


def iterated_modules(module: nn.Module, *, recurse: bool = True) -> list[nn.Module]:
    """The modules that iterate in the forward of `module` while they are in training mode."""
    found = []
    for each in module.modules() if recurse else [module]:
        if isinstance(each, _SpectralNorm) or _hooks(each):
            found.append(each)
    return found


@contextmanager
def no_iteration(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Estimates stay as they are inside. A layer with a hook goes on to drop out."""
    training = [module for module in modules if isinstance(module, _SpectralNorm) and module.training]
    hooks = {hook: hook.n_power_iterations for module in modules for hook in _hooks(module)}
    for module in training:
        module.training = False
    for hook in hooks:
        hook.n_power_iterations = 0
    try:
        yield
    finally:
        for module in training:
            module.training = True
        for hook, number in hooks.items():
            hook.n_power_iterations = number


def _hooks(module: nn.Module) -> list[SpectralNorm]:
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
