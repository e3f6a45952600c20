"""engine.load: an engine goes on from a checkpoint, whatever plan saved it.

All goes by names and boxes of whole tensors. First everything is compared with what the engine has; if
anything does not fit, nothing changes. Then each rank reads what it holds:

    weights       `Sharing.first_weights`, as a deferred start fills them; from the master where that is finer
    buffers       whole
    optimizer     each local parameter asks for its boxes of every part (`Stepper.load`)
    numbers       counters of steps, loss scale, normaliser
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from echelon.engine.saving.checkpoints import EXTRA_STATE, JSON, RANDOM, extra_state_modules, gather
from echelon.engine.saving.engine_state import EngineState
from echelon.engine.saving.group_options import apply_options, option_errors
from echelon.engine.saving.learned import LEARNED, restore_learned
from echelon.engine.saving.state_checks import name_errors, optimizer_errors, value_errors
from echelon.errors import UserError, raise_errors
from echelon.launching.group import check_on_every_rank
from echelon.state.bounded_json import parse_json
from echelon.state.checkpoint import SavedState, number_errors
from echelon.state.ownership import VALUE, OwnedSlice, Slice
from echelon.state.weight_files.pieces import whole


@final
class Loading(NamedTuple):
    """A checkpoint, and the engine that it is loaded into."""

    saved: SavedState
    state: EngineState
    temporary_buffers: Sequence[OwnedSlice]

    def check(self, *, optimizer: bool, options: bool) -> None:
        """Raise, on every rank, all reasons why the engine cannot take the checkpoint. Changes nothing."""
        values = [*self.state.values(), *self.temporary_buffers]
        errors = [*name_errors(self.saved, self.state.names), *value_errors(self.saved, values)]
        errors += number_errors(self.saved.manifest.numbers)
        if optimizer:
            errors += optimizer_errors(self.saved, self.state.update)
        if optimizer and options:
            errors += option_errors(self.saved.manifest.groups, self.state.update)
        found = dict.fromkeys(error for of_rank in gather(self.state.mesh, errors) for error in of_rank)
        raise_errors(f"checkpoint {self.saved.path} for this engine", list(found))

    def compare_seed(self) -> None:
        """Warn, once, if random numbers will not go on as they were; -1: nothing was seeded."""
        seed = self.state.seed_number
        saved = self.saved.manifest.numbers.get("seed", seed)
        if saved != seed and self.state.mesh.rank == 0:
            warnings.warn(
                f"checkpoint {self.saved.path} was saved with seed={_shown(saved)}, and this engine has "
                f"seed={_shown(seed)}: random numbers, as those of dropout, will be others than if the "
                "training had gone on",
                stacklevel=2,
            )

    def read(self, *, optimizer: bool) -> None:
        """Each rank reads what it holds; then those that hold less than they use exchange it."""
        check_on_every_rank(lambda: self._read(optimizer=optimizer))
        for sharing in dict.fromkeys(self.state.local.sharings):
            sharing.share_first_weights()

    @torch.no_grad()
    def _read(self, *, optimizer: bool) -> None:
        self._read_weights()
        for each in (*self.state.buffers(), *self.temporary_buffers):
            is_saved = each.slice.part in self.saved.parts(each.slice.name)
            if is_saved and not each.slice.name.endswith(EXTRA_STATE):
                self.saved.read(each.slice, each.tensor)
        self._read_extra_state()
        self.state.update.load(self.saved, self.state.in_whole, state=optimizer)

    def _read_weights(self) -> None:
        for sharing in dict.fromkeys(self.state.local.sharings):
            for each in sharing.first_weights():
                boxes = self.state.in_whole(each)
                if sum(box.tensor.numel() for box in boxes) < each.tensor.numel():
                    each.tensor.zero_()  # what is left of it is padding
                for box in boxes:
                    part = self.saved.value_part(box.slice.name, box.tensor.dtype)
                    self.saved.read(box.slice._replace(part=part), box.tensor)

    def _read_extra_state(self) -> None:
        for name, module in extra_state_modules(self.state.module).items():
            is_plain = JSON in self.saved.parts(name)
            module.set_extra_state(self._plain(name, JSON) if is_plain else self._whole(name, VALUE))

    def restore_options(self) -> None:
        apply_options(self.saved.manifest.groups, self.state.update)

    @property
    def is_same_plan(self) -> bool:
        """Whether as many ranks go on as they were."""
        saved = self.saved.manifest
        return (saved.plan, saved.ranks) == (str(self.state.mesh.plan), self.state.mesh.plan.ranks)

    def restore_learned(self) -> None:
        if f"rank {self.state.mesh.rank}" in self.saved.parts(LEARNED):
            with self._refusing_strangers(LEARNED):
                restore_learned(self.state.local, self._plain(LEARNED, f"rank {self.state.mesh.rank}"))

    def restore_random(self) -> None:
        """Random states are there if nothing was seeded."""
        parts, rank = self.saved.parts(RANDOM), self.state.mesh.rank
        with self._refusing_strangers(RANDOM):
            if f"cpu of rank {rank}" in parts:
                torch.set_rng_state(self._whole(RANDOM, f"cpu of rank {rank}"))
            if f"cuda of rank {rank}" in parts and self.state.mesh.device.type == "cuda":
                torch.cuda.set_rng_state(self._whole(RANDOM, f"cuda of rank {rank}"), self.state.mesh.device)

    def _plain(self, name: str, part: str) -> Any:
        """A small tensor of bytes that are JSON."""
        with self._refusing_strangers(name):
            return parse_json(self._whole(name, part).numpy().tobytes())

    @contextmanager
    def _refusing_strangers(self, name: str) -> Iterator[None]:
        """What no engine has saved is an error of the checkpoint, not of this program."""
        try:
            yield
        except UserError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise UserError(f"{self.saved.path}: {name} is not what an engine saves: {reason}") from error

    def _whole(self, name: str, part: str) -> Tensor:
        """All of a small tensor, in host memory."""
        saved = self.saved.parts(name)[part]
        out = torch.empty(saved.shape, dtype=saved.dtype)
        self.saved.read(Slice(name, part, saved.shape, *whole(saved.shape)), out)
        return out


def _shown(seed: float) -> str:
    return "None" if seed == -1 else str(seed)
