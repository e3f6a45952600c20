"""Types of numbers: what a plan computes in, and float32 masters below that."""

import torch

from echelon.precision.stepper import DirectStepper, LocalStepper, MasterStepper, Stepper
from echelon.precision.whole_stepper import WholeStepper

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

__all__ = ["DTYPES", "DirectStepper", "LocalStepper", "MasterStepper", "Stepper", "WholeStepper"]
