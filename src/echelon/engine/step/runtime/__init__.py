"""The runtime: the interpreter that runs a program over stages, messages between them, versions of weights.

It runs every plan; a model in one stage is the smallest pipeline.
"""

from echelon.engine.step.runtime.flight import Microbatch, MicrobatchLoss
from echelon.engine.step.runtime.interpreter import Interpreter
from echelon.engine.step.runtime.message import Spec
from echelon.engine.step.runtime.script import Script, Slot
from echelon.engine.step.runtime.versions import Versions
from echelon.engine.step.runtime.wire import Wire

__all__ = [
    "Interpreter",
    "Microbatch",
    "MicrobatchLoss",
    "Script",
    "Slot",
    "Spec",
    "Versions",
    "Wire",
]
