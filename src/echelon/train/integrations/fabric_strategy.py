"""A strategy of Lightning Fabric that trains on an engine: Fabric(strategy=FabricStrategy("data=2 zero=3")).

The loop stays as it is: setup, model(x), fabric.backward(loss), optimizer.step(). Fabric or torchrun starts
ranks; the engine shares weights, sums gradients and updates. fabric.save writes the engine's checkpoint.
"""

# ruff: noqa: ARG002 (the methods of a strategy have Fabric's arguments)

import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from echelon.collectives.layout import Layout
from echelon.engine import Engine, parallelize
from echelon.errors import UserError
from echelon.plan import Plan

if TYPE_CHECKING:
    _DDPStrategy: Any  # there are two, in packages with the same code
else:
    # Fabric accepts strategies of its own package alone.
    _name = "lightning_fabric" if "lightning_fabric" in sys.modules else "lightning.fabric"
    try:
        _DDPStrategy = import_module(f"{_name}.strategies").DDPStrategy
    except ImportError:
        _DDPStrategy = import_module("lightning_fabric.strategies").DDPStrategy


@final
class _EngineModule(nn.Module):
    """The model as Fabric calls it."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine(*args, **kwargs)


@final
class _NoSync:
    """Gradients are summed by the update alone."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()


class FabricStrategy(_DDPStrategy):  # type: ignore[misc]
    """Any plan without stages. `engine_options` go to `parallelize`: clip, average, audit, …"""

    def __init__(self, plan: Plan | str, **engine_options: Any) -> None:
        super().__init__()
        self._plan = Plan.parse(plan) if isinstance(plan, str) else plan
        self._options = engine_options
        self._engines: list[Engine] = []
        self._backward_sync_control = _NoSync()
        if self._plan.stages > 1:
            raise UserError(
                f"FabricStrategy with plan '{self._plan}': the loop of Fabric calls the whole model, and no "
                "rank of a pipeline has it; use data, zero and tensor, or a loop with engine.step(batch)"
            )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Ranks of one replica take the same samples."""
        position = Layout(self._plan).position(dist.get_rank() if dist.is_initialized() else 0)
        return {"num_replicas": self._plan.data, "rank": position.replica}

    def module_to_device(self, module: nn.Module) -> None:
        """The engine brings what a rank holds to its device."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        raise UserError(
            "fabric.setup(model): this strategy needs its optimizer beside it; write model, optimizer = "
            "fabric.setup(model, optimizer)"
        )

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        (optimizer, *others) = optimizers
        if others:
            raise UserError(
                f"fabric.setup(model, …): {len(optimizers)} optimizers for one model; give one with several "
                "groups, or use echelon.parallelize, whose function may return several"
            )
        engine = parallelize(module, self._plan, optimizer=_take(module, optimizer), **self._options)
        self._engines.append(engine)
        return _EngineModule(engine), [engine.optimizer], scheduler

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, _EngineModule):
            engine = module.engine
        elif len(self._engines) == 1:
            (engine,) = self._engines
        else:
            raise UserError(
                f"fabric.backward(loss): {len(self._engines)} models are set up; say which one gets "
                "gradients: fabric.backward(loss, model=model)"
            )
        engine.backward(tensor, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> None:
        if kwargs.get("closure") is not None:
            raise UserError("optimizer.step(closure): call the model before, and step without a closure")
        (engine,) = [each for each in self._engines if each.optimizer is optimizer]
        engine.update()

    def clip_gradients_norm(self, *args: Any, **kwargs: Any) -> Tensor:
        raise UserError(
            "fabric.clip_gradients: the norm is over all ranks, and known in the update; write "
            "FabricStrategy(plan, clip=1.0)"
        )

    def clip_gradients_value(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients_norm()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Tensor]:
        """Whole weights, on every rank; all ranks must call this."""
        return module.engine.full_state_dict() if isinstance(module, _EngineModule) else module.state_dict()

    def save_checkpoint(self, path: Any, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Write the checkpoint of the model's engine, which any plan can load, with what is beside it."""
        self._engine_of(state).save(path, extra=_beside(state))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        extra = self._engine_of(state).load(path)
        for name in state.keys() & extra.keys():
            saved = extra.pop(name)
            if _has_state(state[name]):
                state[name].load_state_dict(saved)
            else:
                state[name] = saved
        return extra

    def _engine_of(self, state: Any) -> Engine:
        values = state.values() if isinstance(state, Mapping) else [state]
        engines = [each.engine for each in values if isinstance(each, _EngineModule)]
        if len(engines) != 1:
            raise UserError(
                f"fabric.save, fabric.load: the state has {len(engines)} models; give one, as it came from "
                "fabric.setup, its optimizer and plain data beside it: {'model': model, 'step': 3}"
            )
        return engines[0]

    def close(self) -> None:
        """Close the engines: models are whole on every rank again. All ranks must call this."""
        for engine in self._engines:
            engine.close()


def _take(model: nn.Module, optimizer: Optimizer) -> Any:
    """Return the function that `parallelize` takes, for an optimizer that was made of the whole model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [[names.get(each) for each in group["params"]] for group in optimizer.param_groups]
    if any(name is None for group in groups for name in group):
        raise UserError(
            "fabric.setup(model, optimizer): the optimizer has parameters that are not the model's; make it "
            "of model.parameters()"
        )

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        own = dict(model.named_parameters())  # tensor has put parts in the place of some
        given = set(parameters)
        for group, wanted in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [own[name] for name in wanted if name is not None and own[name] in given]
        return optimizer

    return make


def _beside(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a state has beside model and optimizer: plain data, and the state of schedules and the like."""
    others = {k: v for k, v in state.items() if not isinstance(v, nn.Module | Optimizer)}
    return {name: value.state_dict() if _has_state(value) else value for name, value in others.items()}


def _has_state(value: object) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
