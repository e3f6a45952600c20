"""The runtime: stages, the interpreter that runs a program over them, and the update at the end of a step.

It runs every plan; a model in one stage is the smallest pipeline.
"""

from echelon.runtime.interpreter import Interpreter, StageRuntime
from echelon.runtime.microbatch import Microbatch, MicrobatchLoss
from echelon.runtime.numbers import GateNumbers, Outcome, StepNumbers
from echelon.runtime.parameters_stepper import ParametersStepper
from echelon.runtime.scaling import Number
from echelon.runtime.script import Script, Slot
from echelon.runtime.stage import LocalStages, Stage
from echelon.runtime.structure import Spec
from echelon.runtime.synchronous_update import SynchronousUpdate
from echelon.runtime.update import InWhole, Push, Update
from echelon.runtime.versions import Versions
from echelon.runtime.wire import Wire

__all__ = [
    "GateNumbers",
    "InWhole",
    "Interpreter",
    "LocalStages",
    "Microbatch",
    "MicrobatchLoss",
    "Number",
    "Outcome",
    "ParametersStepper",
    "Push",
    "Script",
    "Slot",
    "Spec",
    "Stage",
    "StageRuntime",
    "StepNumbers",
    "SynchronousUpdate",
    "Update",
    "Versions",
    "Wire",
]
