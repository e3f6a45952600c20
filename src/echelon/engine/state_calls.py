"""The calls of an engine about its state: whole weights, files of a model, checkpoints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from echelon.engine.core import EngineCore
from echelon.engine.saving.export import export, save_pretrained
from echelon.errors import UserError
from echelon.state.checkpoint.manifest import Manifest
from echelon.state.checkpoint.rank_save import SaveOptions
from echelon.state.checkpoint.saved import SavedState
from echelon.state.checkpoint.storage_errors import RETRIES
from echelon.state.ownership import OwnedSlice
from echelon.state.weight_files.weight_folder import SHARD_BYTES


class StateCalls(EngineCore):
    """All ranks must make these calls, between steps."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the weights are their averages (`average` of parallelize) for all that reads them, as
        `evaluate`; buffers are the newest. Afterwards the weights are what they were, in every bit."""
        averages = self._update.averages
        if averages is None:
            raise UserError("this engine keeps no averages; make it with parallelize(…, average=0.9999)")
        if averages.is_shown:
            yield
            return
        self._step.check_closed("engine.averaged()")
        with self._watch.other_weights(self._show_averages, averages.hide):
            yield

    def _show_averages(self) -> None:
        self._show_newest()
        self._checkpointing.before_update()
        assert self._update.averages is not None
        self._update.averages.show()

    def full_state_dict(self, *, to: str | None = None, averaged: bool = False) -> dict[str, Tensor]:
        """All weights and buffers, whole, under their original names, on every rank (copies).

        to="rank0" brings them to the host memory of rank 0, one after the other; the other ranks get none.
        averaged=True: the averages of the weights, in the type of these.
        """
        with self._averaged_if(averaged):
            return self._whole.state_dict(to)

    def _averaged_if(self, averaged: bool) -> AbstractContextManager[None]:
        return self.averaged() if averaged else nullcontext()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator of (name, tensor) over all weights and buffers, whole, under their original
        names, in the order of the model's state dict, on every rank: one at a time (docs/weights.md).

        All ranks must iterate in step; all may leave the loop early. A tensor is a copy on this rank's
        device, and its memory is taken for the next one: keep `tensor.clone()`. Tied weights come under each
        of their names. After a step, an update or a load, begin again.
        """
        begun = self._state_number()

        def check() -> None:
            self._check_open()
            if self._state_number() != begun:
                raise UserError(
                    "engine.weights() was begun before the last step or load, and would mix weights of "
                    "before and after it; finish the loop over weights first, or call engine.weights() again"
                )

        return self._whole.stream(check)

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Inside, the model is whole on every rank, and called as its author wrote it: to generate, evaluate
        or export. All ranks must enter and leave together; the engine's own calls are refused inside.

        What a rank holds whole is not copied; the rest is put together, and must fit beside it. Modes,
        buffers and attributes are as before afterwards. Weights may be changed inside as between steps where
        they are not copies; of a copy a change is refused.
        """
        self._check_open()
        self._show_newest()
        with self._whole_model.installed() as model, self._watch.plain():
            yield model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call `generate` of a model of transformers, with whole weights (see `whole`), in evaluation mode.

        Every rank returns what it generated: the same for the same inputs, also where tokens are sampled.
        """
        self._check_open()
        self._show_newest()
        return self._whole_model.generate(args, kwargs)

    def _state_number(self) -> tuple[int, int]:
        """Return a number that is another one after each step and load."""
        return self._counter.begun, self._checkpointing.num_loads

    def full_optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state of each parameter, whole, under every original name (copies)."""
        return self._whole.optimizer_state()

    def export(self, folder: str | Path, *, shard_bytes: int = SHARD_BYTES, averaged: bool = False) -> None:
        """Write weights and buffers as a Hugging Face folder, which transformers loads if it knows the model.

        All ranks must call this. Rank 0 writes one tensor after the other, and holds in host memory what the
        tensor is made of (query, key and value of GPT-2) beside it. Any other rank holds one at a time.

        averaged=True writes the averages of the weights, in the type of these.
        """
        with self._averaged_if(averaged), self._watch.own_work():
            export(self.module, self._names, self._whole.weights(), folder, self.mesh.rank, shard_bytes)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        merged: bool = False,
        shard_bytes: int = SHARD_BYTES,
        averaged: bool = False,
    ) -> None:
        """Write a model of transformers as its own save_pretrained does: from_pretrained loads the folder. Of
        a model of peft, write its adapters; or (`merged`) the model inside, with the adapters in its weights.

        All ranks must call this; see `export`.
        """
        with self._averaged_if(averaged), self._watch.own_work():
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
