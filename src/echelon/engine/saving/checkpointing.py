"""`engine.save` and `engine.load`: what all ranks call together, and how far the last load has come."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from echelon.engine.saving.engine_state import EngineState
from echelon.engine.saving.loading import Loading
from echelon.engine.step.runner import StepRunner
from echelon.errors import UserError
from echelon.parallel.observer import StepObserver
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.save import Saver
from echelon.state.checkpoint.saved import SavedState, open_whole
from echelon.state.ownership import OwnedSlice


@final
class Checkpointing(StepObserver):
    """Saves the state of one engine, and loads into it. All ranks must make the same calls."""

    def __init__(self, state: EngineState, runner: StepRunner, synchronize: Callable[[], None]) -> None:
        """`synchronize`: brings every rank to the newest weights; raises if the engine cannot go on."""
        self._state, self._runner, self._synchronize = state, runner, synchronize
        mesh = state.mesh
        self._saver = Saver(mesh.group("all"), mesh.device, has_server=mesh.plan.sync == "async")
        runner.observers.add(self)
        self._unfinished_load = ""  # the path of a checkpoint that was loaded in part
        self.num_loads = 0  # those that have begun to change the engine

    # Saving.

    def before_update(self) -> None:
        """A copy that is made behind the passes of this step must be done."""
        self._saver.before_changes()

    def save(
        self, path: str | Path, extra: Mapping[str, Any], options: SaveOptions, *, copy_behind: bool
    ) -> None:
        if copy_behind and self._runner.updates_last:
            # Buffers, and whatever else is saved, may change in the forward pass.
            options = options._replace(later=lambda box: box.name in self._state.names.parameters)
        self._saver.save(path, *self.saved_state(extra), options)

    def saved_state(self, extra: Mapping[str, Any]) -> tuple[list[OwnedSlice], Manifest]:
        self._synchronize()
        return self._state.saved(self._runner.counters()), self._state.manifest(extra)

    def finish_saving(self) -> None:
        self._saver.finish()

    def saving_error(self) -> UserError | None:
        """Finish the save that is under way, and return what went wrong."""
        try:
            self._saver.finish()
        except UserError as error:
            return error
        return None

    def abandon_saving(self) -> None:
        """After a failure: without a word to other ranks, which may be gone."""
        self._saver.abandon()

    # Loading.

    @property
    def is_loaded_in_part(self) -> bool:
        """Return whether a load has failed after it had begun to change the engine."""
        return self._unfinished_load != ""

    def check_loaded(self) -> None:
        """Raise if a part of the state is a checkpoint's, and a part is not."""
        if self.is_loaded_in_part:
            raise UserError(
                f"this engine has a part of its state from {self._unfinished_load}, whose load has failed, "
                "and a part from before; load a whole checkpoint with engine.load, or start again"
            )

    def load(self, path: str | Path, *, optimizer: bool, options: bool, verify: bool) -> dict[str, Any]:
        return self._load(lambda: open_whole(path, verify=verify), optimizer=optimizer, options=options)

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        return self._load(lambda: saved, optimizer=True, options=True)

    def _load(
        self, open_saved: Callable[[], SavedState], *, optimizer: bool, options: bool
    ) -> dict[str, Any]:
        failed, self._unfinished_load = self._unfinished_load, ""
        try:
            self._synchronize()
            loading = Loading(open_saved(), self._state, optimizer=optimizer, options=optimizer and options)
            loading.check()
            failed = str(loading.saved.path)
            self._saver.before_changes()
            self.num_loads += 1
            loading.read()
            loading.restore(self._runner)
            failed = ""
        finally:
            self._unfinished_load = failed
        return loading.saved.manifest.extra
