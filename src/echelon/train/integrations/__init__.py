"""Other packages' loops on an engine: docs/integrations.md. A package is imported when its name is used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.train.integrations.fabric_strategy import FabricStrategy
    from echelon.train.integrations.hf_trainer import Trainer, WithPlan

__all__ = ["FabricStrategy", "Trainer", "WithPlan"]

_HOME = {"FabricStrategy": "fabric_strategy", "Trainer": "hf_trainer", "WithPlan": "hf_trainer"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
