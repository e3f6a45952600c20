"""The calls of an engine about its state: whole weights, files of a model, checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from echelon.engine.core import EngineCore
from echelon.engine.saving.export import export, save_pretrained
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage_errors import RETRIES
from echelon.state.ownership import OwnedSlice
from echelon.state.weight_files.folder_writer import SHARD_BYTES


class StateCalls(EngineCore):
    """All ranks must make these calls, between steps."""

    def full_state_dict(self, *, to: str | None = None) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies).

        to="rank0" brings them to the host memory of rank 0, one after the other; the other ranks get none.
        """
        return self._whole.state_dict(to)

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        return self._whole.optimizer_state()

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Write weights and buffers as a Hugging Face folder, which transformers loads if it knows the model.

        All ranks must call this. Rank 0 writes one tensor after the other, and holds in host memory what the
        tensor is made of (query, key and value of GPT-2) beside it. Any other rank holds one at a time.
        """
        with self._watch.own_work():
            export(self.module, self._names, self._whole.weights(), folder, self.mesh.rank, shard_bytes)

    def save_pretrained(
        self, folder: str | Path, *, merged: bool = False, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Write a model of transformers as its own save_pretrained does: from_pretrained loads the folder. Of
        a model of peft, write its adapters; or (`merged`) the model inside, with the adapters in its weights.

        All ranks must call this; see `export`.
        """
        with self._watch.own_work():
            weights, rank = self._whole.weights(), self.mesh.rank
            save_pretrained(self.module, self._names, weights, folder, rank, shard_bytes, merged=merged)

    def save(
        self,
        path: str | Path,
        *,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        copy_behind: bool = False,
        then: Callable[[], None] | None = None,
        retries: int = RETRIES,
    ) -> None:
        """Write all that is needed to go on into a new folder; all ranks must call this, between steps.

        Any plan can load it. The path is a folder on a disk that all ranks share, or a URL that fsspec knows
        (s3://, gs://). A checkpoint that is there already is replaced when the new one is whole.

        `extra` is plain data of yours (JSON), the same on all ranks, which `load` returns.

        wait=False returns when the state is copied, and writes while training goes on; an error is raised by
        the next save, or by `finish_saving`. With copy_behind=True the copy, too, is made while the next step
        computes; until then nothing else may change weights or the optimizer's state.

        `then` is called on rank 0 when the checkpoint is whole. `retries`: how often a write is tried again
        after an error that may pass, as remote storage has them.
        """
        options = SaveOptions(wait, then, retries)
        self._checkpointing.save(path, extra or {}, options, copy_behind=copy_behind)

    def saved_state(self, extra: Mapping[str, Any]) -> tuple[list[OwnedSlice], Manifest]:
        """Return this rank's part of `save`; all must call this. The next step changes these tensors."""
        return self._checkpointing.saved_state(extra)

    def finish_saving(self) -> None:
        """Return when no checkpoint is being written; all ranks must call this. Raises what went wrong."""
        self._checkpointing.finish_saving()

    def load(
        self, path: str | Path, *, optimizer: bool = True, options: bool = True, verify: bool = True
    ) -> dict[str, Any]:
        """Go on from a checkpoint, whatever plan saved it; returns its `extra`. All ranks must call this.

        optimizer=False leaves the optimizer's state out: another optimizer begins with its own. options=False
        keeps the options of its groups (lr, weight_decay, …) as they are here. Every file is hashed before
        anything changes; verify=False is for a checkpoint that just was.

        If anything does not fit, all errors are raised and nothing has changed. An engine whose load fails
        later (a damaged file) trains no more until another one has succeeded.
        """
        with self._watch.own_work():
            extra = self._checkpointing.load(path, optimizer=optimizer, options=options, verify=verify)
            self._watch.forget()
        return extra

    def load_saved(self, saved: SavedState) -> dict[str, Any]:
        """As `load`, from a checkpoint that is open: for all ranks, or of copies in memory, one for each."""
        with self._watch.own_work():
            extra = self._checkpointing.load_saved(saved)
            self._watch.forget()
        return extra
