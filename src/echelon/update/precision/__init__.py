"""Types of numbers: what a plan computes in, float32 masters below that, and loss scaling for fp16."""

from echelon.update.precision.loss_scaling import DynamicScale, LossScale, LossScaling, make_loss_scaling
from echelon.update.precision.rounding import KeyedRounding, Placement, RoundingStepper
from echelon.update.precision.stepper import (
    DirectStepper,
    LocalStepper,
    MasterStepper,
    Stepper,
    check_takes_units,
    with_gradients,
)
from echelon.update.precision.whole_stepper import WholeStepper

__all__ = [
    "DirectStepper",
    "DynamicScale",
    "KeyedRounding",
    "LocalStepper",
    "LossScale",
    "LossScaling",
    "MasterStepper",
    "Placement",
    "RoundingStepper",
    "Stepper",
    "WholeStepper",
    "check_takes_units",
    "make_loss_scaling",
    "with_gradients",
]
