"""`Trainer` of transformers on an engine: its loop, its callbacks and its arguments, under any plan.

What the Trainer does         what does it here
-----------------------       -------------------------------------------------------------------------
its sampler and collator      the same, of the global batch; a rank reads its replica's part
training_step                 engine.step: forward, backward, sums over ranks, clipping, update
create_optimizer              the same class, options and groups, of the parameters that a rank holds
its schedule                  the same, over the engine's optimizer
evaluate, predict             engine.evaluate and engine.predict: every rank has the whole result
save_model, checkpoints       engine.save_pretrained; engine.save in checkpoint-N/engine, for any plan

Accelerate prepares nothing here: it would wrap the model, and cut batches by ranks and not by replicas.
"""

# ruff: noqa: ARG002 (the methods of a Trainer have its arguments)

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from echelon.engine import Engine, Metrics, parallelize
from echelon.errors import UserError, raise_errors
from echelon.plan import Plan
from echelon.train.integrations.hf_batches import loader_of_part

if TYPE_CHECKING:
    _Trainer: Any  # that of transformers; its types leave out what is there while it trains
else:
    _Trainer = object

STATE = "engine"  # the folder of the engine's checkpoint, in that of the Trainer
# Those whose `compute_loss` is the model's own loss, with numbers to log beside it.
_OWN_LOSS = ("transformers.trainer", "transformers.trainer_seq2seq", "trl.trainer.sft_trainer")


class WithPlan(_Trainer):  # type: ignore[misc]
    """Before a Trainer class: `class PlannedSFT(WithPlan, SFTTrainer)`. All ranks make the same calls.

    `engine_options` go to `parallelize`: loss, layers, audit, …
    """

    def __init__(
        self, *args: Any, plan: Plan | str, engine_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        self.args: Any
        self.optimizer: Any
        self._plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self._options = dict(engine_options or {})
        self._engine: Engine | None = None
        self._metrics_of_step: Metrics | None = None
        self._accumulated = 1
        super().__init__(*args, **kwargs)
        self._in_loop = ModelInLoop(self.model)

    @property
    def engine(self) -> Engine:
        """The engine; made by the first call of `train`, `evaluate` or `predict`, or here."""
        if self._engine is None:
            self._engine = self._make_engine()
        return self._engine

    def close(self) -> None:
        """Close the engine: the model is whole on every rank again. All ranks must call this."""
        if self._engine is not None:
            self._engine.close()

    def _make_engine(self) -> Engine:
        home = type(self).compute_loss.__module__
        if home not in _OWN_LOSS and "loss" not in self._options:
            if home.startswith("trl."):
                raise UserError(
                    f"{type(self).__name__}: its loss calls several models and gathers over ranks itself; of "
                    "TRL, SFTTrainer runs under a plan; examples/loops/dpo.py shows a loop of your own"
                )
            self._options.setdefault("objective", self._objective)
        forward = vars(self.model).get("forward")
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl."):
            # Returns numbers to log, for the `compute_loss` of TRL, which is not called here.
            del self.model.forward
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
            self.args, self.model
        )
        decayed = self.get_decay_parameter_names(self.model)
        make = optimizer_maker(self.model, kind, options, decayed, self.args.weight_decay)
        clip = self.args.max_grad_norm or None
        return parallelize(self.model, self._plan, optimizer=make, clip=clip, **self._options)

    def _objective(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The `compute_loss` of a subclass: a mean over the labels of a batch, or over its samples."""
        count = self._get_num_items_in_batch([batch], self.args.device)
        if count is None:
            count = len(next(value for value in batch.values() if isinstance(value, Tensor)))
        return self.compute_loss(model, batch) * count, count

    # --- what the constructor of a Trainer calls ---

    def create_accelerator_and_postprocess(self) -> None:
        self._accumulated = int(self.args.gradient_accumulation_steps)
        self.args, self._plan = taken_over(self.args, self._plan)
        super().create_accelerator_and_postprocess()
        state = self.args.distributed_state
        if dist.is_initialized() and state is not None and state.num_processes == 1:
            # Ranks of echelon.launch, of which Accelerate does not know: one of them writes.
            state.process_index = state.local_process_index = dist.get_rank()
        self.accelerator.prepare = lambda *objects: objects if len(objects) > 1 else objects[0]
        self.accelerator.prepare_model = lambda model, **_: model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine brings what a rank holds to its device."""

    # --- batches ---

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        *args: Any,
        is_training: bool = False,
        **kwargs: Any,
    ) -> "DataLoader[Any]":
        """Of the global batch: evaluation reads it whole on every rank, training this replica's part."""
        size = batch_size * self.engine.replicas * (self._accumulated if is_training else 1)
        whole = super()._get_dataloader(dataset, description, size, *args, is_training=is_training, **kwargs)
        part = loader_of_part(whole, self.engine.replica, self.engine.replicas) if is_training else whole
        return _in_order_of_epochs(part, self.accelerator)

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self._train_batch_size) * self._accumulated * self.engine.replicas

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Of this rank's batch: the engine counts over all ranks what a loss counts."""
        own, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return super()._get_num_items_in_batch(batch_samples, device)
        finally:
            self.args.average_tokens_across_devices = own

    # --- a step ---

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        if self.optimizer is not None and not isinstance(self.optimizer, EngineOptimizer):
            raise UserError(
                "Trainer(optimizers=…): an optimizer has whole parameters, and a rank may hold a part of "
                "them; give optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-4})"
            )
        self.optimizer = EngineOptimizer(self.engine)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        return super().create_scheduler(num_training_steps, self.engine.optimizer)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        _, loader = super()._prepare_for_training(*args, **kwargs)
        return self._in_loop, loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on this replica's part of the batch. The loss is that of the global batch, on every rank."""
        self.model.train()
        self._metrics_of_step = self.engine.step(inputs)
        return torch.tensor(self._metrics_of_step.loss, dtype=torch.float64, device=self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """The engine has clipped, by the norm over all ranks."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float | None:
        norm = self._metrics_of_step.grad_norm if self._metrics_of_step is not None else None
        return None if norm is None else float(norm)

    def floating_point_ops(self, inputs: Any) -> float:
        """Those of the global batch, by the parameters of the whole model."""
        tokens = next((value.numel() for value in inputs.values() if isinstance(value, Tensor)), 0)
        return float(6 * self._in_loop.count() * tokens)

    # --- evaluation: every rank has the whole batch, and the whole result ---

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.gather_function = _as_it_is
        self.accelerator.pad_across_processes = _as_it_is
        self.engine  # noqa: B018 (made before the loop looks at the model)
        return super().evaluation_loop(*args, **kwargs)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor | None, Any, Any]:
        part, labels = self.engine.local(inputs), inputs.get("labels")
        loss = None
        if labels is not None:
            loss = torch.tensor(self.engine.evaluate(part).loss, dtype=torch.float64, device=self.args.device)
        if prediction_loss_only:
            return loss, None, None
        return loss, self.engine.predict(part, _logits), labels

    # --- files ---

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the folder that `from_pretrained` loads. All ranks must call this."""
        folder = output_dir or self.args.output_dir
        self.engine.save_pretrained(folder)
        if self.engine.main and self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save(Path(output_dir) / STATE, extra={"schedule": _plain(self.lr_scheduler.state_dict())})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The engine loads the weights together with the state of the optimizer, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / STATE
        if not folder.exists():
            raise UserError(
                f"resume_from_checkpoint={checkpoint}: it has no folder '{STATE}', so that it was not saved "
                "under a plan, or with save_only_model=True; give its folder to from_pretrained, and begin"
            )
        extra = self.engine.load(folder)
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **extra["schedule"]})

    def _save_rng_state(self, output_dir: str) -> None:
        """The engine's checkpoint has the seeds of what a step draws."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """See `_save_rng_state`."""


class Trainer(WithPlan, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer` under a plan: Trainer(model, args, train_dataset=…, plan="data=2 zero=3")."""


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _logits(output: Any, _: Any) -> Any:
    return output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a schedule but for its functions, which are made again."""
    kept = (str, int, float, bool, list, type(None))
    return {name: value for name, value in state.items() if isinstance(value, kept) and name != "lr_lambdas"}


def _in_order_of_epochs(loader: "DataLoader[Any]", accelerator: Any) -> "DataLoader[Any]":
    """The loader that Accelerate makes for one process: it shuffles by the seed and the epoch."""
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(  # type: ignore[no-any-return]
        loader,
        num_processes=1,
        process_index=0,
        put_on_device=False,
        dispatch_batches=False,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
    )


# Argument → what to write in its place.
_IN_PLAN = {
    "bf16": "precision=bf16 in the plan",
    "fp16": "precision=fp16 in the plan",
    "gradient_checkpointing": "recompute=full in the plan",
    "fsdp": "zero=3 in the plan",
    "deepspeed": "zero=1, 2 or 3 in the plan",
    "torch_compile": "compile=true in the plan",
    "parallelism_config": "tensor=, context= or data= in the plan",
    "auto_find_batch_size": "a batch that fits: echelon plan predicts its memory",
    "label_smoothing_factor": "engine_options={'loss': a function of (output, targets)}",
    "full_determinism": "set_seed: masks of dropout do not depend on the plan",
    "load_best_model_at_end": "engine.load of the checkpoint that you choose",
}


def taken_over(args: Any, plan: Plan) -> tuple[Any, Plan]:
    """Return the arguments that are left to the Trainer, and the plan with what they ask of it.

    Gradient accumulation is microbatches of one larger batch.
    """
    errors = [
        f"TrainingArguments({name}={value!r}): the engine does this; write {fix}"
        for name, fix in _IN_PLAN.items()
        if (value := getattr(args, name, None))
    ]
    raise_errors("the arguments of a Trainer with a plan", errors)
    own = copy.copy(args)
    accumulated = int(args.gradient_accumulation_steps)
    own.gradient_accumulation_steps = 1
    own._n_gpu = min(1, args.n_gpu)  # DataParallel would call the model in threads
    return own, dataclasses.replace(plan, microbatches=plan.microbatches * accumulated)


def optimizer_maker(
    model: nn.Module, kind: Any, options: Mapping[str, Any], decayed: Iterable[str], weight_decay: float
) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Return the function that `parallelize` takes. Parameters decay by their names: no biases, no norms."""
    own = {"params", "model", "optimizer_dict"} & options.keys()
    if own or not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UserError(
            f"optim: {getattr(kind, '__name__', kind)} makes groups of whole parameters itself, and a rank "
            "may hold a part of them; use an optimizer of torch (optim='adamw_torch'), or one of "
            "echelon.optim by optimizer_cls_and_kwargs=(echelon.optim.Muon, {…})"
        )
    names = frozenset(decayed)

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        given = list(parameters)
        decays = {parameter for name, parameter in model.named_parameters() if name in names}
        groups = [
            {"params": [each for each in given if each in decays], "weight_decay": weight_decay},
            {"params": [each for each in given if each not in decays], "weight_decay": 0.0},
        ]
        return kind([group for group in groups if group["params"]], **options)

    return make


@final
class EngineOptimizer:
    """What a Trainer, its callbacks and its schedules see as the optimizer. The engine has made the update,
    with the sums over ranks and the clipping that belong to it, when `step` is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._engine.optimizer.param_groups

    def step(self, closure: None = None) -> None:
        if closure is not None:
            raise UserError("optimizer.step(closure): the engine calls the model; leave the closure out")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing waits: the update has taken the gradients."""


@final
class ModelInLoop:
    """What the loop of a Trainer sees as the wrapped model: it counts parameters, and drops gradients. Those
    of the model itself may be a part, on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self._shapes = [
            nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=each.requires_grad)
            for each in model.parameters()
        ]

    def parameters(self) -> list[nn.Parameter]:
        """Whole ones, without values."""
        return self._shapes

    def count(self) -> int:
        return sum(each.numel() for each in self._shapes)

    def zero_grad(self) -> None:
        """See `EngineOptimizer.zero_grad`."""
