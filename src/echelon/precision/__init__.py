"""Types of numbers: what a plan computes in, and float32 masters below that."""

import torch

from echelon.precision.rounding import KeyedRounding, Placement
from echelon.precision.rounding_stepper import RoundingStepper
from echelon.precision.stepper import DirectStepper, LocalStepper, MasterStepper, Stepper, takes_units
from echelon.precision.whole_stepper import WholeStepper

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

__all__ = [
    "DTYPES",
    "DirectStepper",
    "KeyedRounding",
    "LocalStepper",
    "MasterStepper",
    "Placement",
    "RoundingStepper",
    "Stepper",
    "WholeStepper",
    "takes_units",
]
