"""An engine for verl: its batches, losses and training loop, under any plan.

verl's worker makes an engine, and calls the methods of its BaseEngine (verl/workers/engine/base.py, read in
version 0.9.1). `register()` makes this one the backend "echelon" of causal language models:

    register()                                  in every worker, before verl asks for its engine
    engine_config.strategy = "echelon"
    engine_config.plan = "data=4 pipeline=2 microbatches=4 zero=1"

A batch of verl is packed: one jagged tensor for each field. A plan cuts batches by rows and sends outputs
from stage to stage. So fields are padded to rows here, travel beside the model's inputs as targets, and are
packed again around verl's loss. The plan says how many microbatches there are, and what lies in host memory.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import echelon
from echelon.collectives.layout import Layout

Rows = dict[str, Tensor]


def register(model_type: str = "language_model", backend: str = "echelon") -> type:
    """Enter the engine into verl's registry; returns its class."""
    from verl.workers.engine.base import BaseEngine, EngineRegistry

    engine = type("EchelonEngine", (VerlCalls, BaseEngine), {})
    EngineRegistry.register(model_type, backend, device=["cpu", "cuda"])(engine)
    return engine


class VerlCalls:
    """What verl calls. All ranks call the same, in the same order."""

    is_param_offload_enabled = False  # that verl would have to move: offload= of the plan does that
    is_optimizer_offload_enabled = False

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, **_: Any) -> None:
        self._model_config, self._optimizer_config = model_config, optimizer_config
        self._plan = echelon.Plan.parse(engine_config.plan)
        # verl asks for the place of this rank before it asks for the model.
        self._position = Layout(self._plan).position(int(os.environ.get("RANK", "0")))
        self.mode: str | None = None

    def initialize(self) -> None:
        config = self._optimizer_config
        self.engine = echelon.parallelize(
            self.build_model(),
            self._plan,
            optimizer=partial(
                torch.optim.AdamW, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
            ),
            loss=_no_loss,
            clip=config.clip_grad,
            nonfinite="skip",
        )
        warmup = max(1, config.lr_warmup_steps)
        data = self.engine.mesh.group("data")
        alone = [[rank] for rank in range(self._plan.ranks)]
        self._replicas = data.process_group if data.size > 1 else dist.new_subgroups_by_enumeration(alone)[0]
        self._rates = torch.optim.lr_scheduler.LambdaLR(
            self.engine.optimizer, lambda step: min(1.0, (step + 1) / warmup)
        )

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForCausalLM

        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(self._model_config.local_path)
        return model

    # Modes.

    @contextmanager
    def train_mode(self, zero_grad_on_exit: bool = True, **_: Any) -> Iterator[None]:
        with self._mode("train"):
            try:
                yield
            finally:
                if zero_grad_on_exit:
                    self.optimizer_zero_grad()

    def eval_mode(self, **_: Any) -> Any:
        return self._mode("eval")

    @contextmanager
    def _mode(self, mode: str) -> Iterator[None]:
        self.mode = mode
        self.engine.module.train(mode == "train")
        try:
            yield
        finally:
            self.mode = None

    # A step.

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Return the outputs of this replica's samples on all of its ranks; losses and metrics of each
        microbatch on those ranks that have the last stage."""
        engine, rows, constants = self.engine, *unpack(data)
        constants["dp_size"] = engine.replicas
        tokens = engine.average(float(rows["loss_mask"].sum())) * engine.replicas
        constants["batch_num_tokens"] = round(tokens)
        lengths, width = rows["input_ids/lengths"], rows["input_ids"].shape[1]
        inputs = {"input_ids": rows["input_ids"], "attention_mask": torch.arange(width) < lengths[:, None]}
        inputs["attention_mask"] = inputs["attention_mask"].long()
        results: list[tuple[float, dict[str, Any]]] = []
        latest: list[Any] = [None]

        def judge(output: Any, targets: Rows) -> Tensor:
            if loss_function is None:
                return output.logits.new_ones(())
            found = pack_output(predict(output.logits, targets, constants), targets)
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=found, data=pack(targets, constants), dp_group=group)
            latest[0] = (loss.detach().item(), metrics)
            return loss

        def collect(output: Any, targets: Rows) -> Rows:
            if forward_only:
                judge(output, targets)
            if latest[0] is not None:
                results.append(latest[0])
            return predict(output.logits.detach(), targets, constants)

        if forward_only:
            found = engine.forward((inputs, rows), collect)
        else:
            # verl's losses add up over microbatches, and are means over replicas.
            found = engine.forward_backward(
                (inputs, rows),
                lambda output, targets: echelon.Sum(judge(output, targets) / engine.replicas),
                collect=collect,
            ).outputs
        metrics: dict[str, list[Any]] = {}
        for _, each in results:
            for name, value in each.items():
                metrics.setdefault(name, []).append(value)
        losses = [loss for loss, _ in results]
        return {"model_output": pack_output(found, rows), "loss": losses, "metrics": metrics}

    def optimizer_zero_grad(self) -> None:
        self.engine.zero_grad()

    def optimizer_step(self) -> float:
        return self.engine.update().grad_norm

    def lr_scheduler_step(self) -> float:
        self._rates.step()
        return float(self._rates.get_last_lr()[0])

    # Weights.

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        return self.engine.weights(), None

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        self.engine.save(Path(local_path), extra={"rates": self._rates.last_epoch})

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        rates = self.engine.load(Path(local_path))["rates"]
        self._rates.last_epoch = rates

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing moves: the plan says what lies where."""

    # The place of this rank.

    def get_data_parallel_rank(self) -> int:
        return self._position.replica

    def get_data_parallel_size(self) -> int:
        return self._plan.data

    def get_data_parallel_group(self) -> Any:
        return self._replicas

    def is_mp_src_rank_with_outputs(self) -> bool:
        position = self._position
        return position.pipeline == self._plan.stages - 1 and position.tensor == position.context == 0


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("verl gives a loss with each batch")


def predict(logits: Tensor, rows: Rows, constants: dict[str, Any]) -> Rows:
    """The log probability of each next token, and the entropy if verl asks for it; what follows the last
    token of a sample has no meaning, and no mask of verl's lets it count."""
    temperature = constants.get("temperature", 1.0)
    if "temperature" in rows:  # one for each sample
        temperature = rows["temperature"].view(-1, 1, 1)
    scores = (logits / temperature).log_softmax(-1)
    labels = rows["input_ids"].roll(-1, 1)[..., None]
    found = {"log_probs": scores.gather(-1, labels).squeeze(-1)}
    if constants.get("calculate_entropy", False):
        found["entropy"] = -(scores.exp() * scores).sum(-1)
    return found


# Between packed fields and rows.


def unpack(data: Any) -> tuple[Rows, dict[str, Any]]:
    """The tensors of a batch as rows, each packed one beside its lengths; and all else."""
    from verl.utils import tensordict_utils

    rows, constants = Rows(), {}
    for name in data.keys():  # noqa: SIM118  (iterating over a TensorDict is over its rows)
        value = tensordict_utils.get(data, name)
        if not isinstance(value, Tensor):
            constants[name] = value
        elif value.is_nested:
            rows[name] = torch.nested.to_padded_tensor(value, 0)
            rows[f"{name}/lengths"] = value.offsets().diff()
        else:
            rows[name] = value
    return rows, constants


def pack(rows: Rows, constants: dict[str, Any]) -> Any:
    """A batch of verl of these rows."""
    from verl.utils import tensordict_utils

    names = [name for name in rows if not name.endswith("/lengths")]
    packed = {name: _pack(rows[name], rows.get(f"{name}/lengths")) for name in names}
    return tensordict_utils.get_tensordict(packed, dict(constants))


def pack_output(found: Rows, rows: Rows) -> Rows:
    return {name: _pack(value, rows["input_ids/lengths"]) for name, value in found.items()}


def _pack(rows: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is None:
        return rows
    samples = [row[:length] for row, length in zip(rows, lengths.tolist(), strict=True)]
    return torch.nested.as_nested_tensor(samples, layout=torch.jagged)
