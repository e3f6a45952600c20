"""Which files of the library a batch, a gradient or a weight passes in one step."""

import sys
import threading
from types import FrameType
from typing import Any

from torch import Tensor

import echelon
from echelon.models import ExpertsConfig, ModelConfig, build
from tests.cases import adamw
from tests.contract_models import SEQUENCE, VOCAB, gpt, token_loss, tokens

_SOURCES = "/src/echelon/"
_MIXTURE = ModelConfig(
    "llama",
    2,
    16,
    4,
    vocab=VOCAB,
    sequence=SEQUENCE,
    kv_heads=2,
    experts=ExpertsConfig(4, 2, 8, balance=0.01),
)
_STEPS = 7  # in the seventh, nothing is tried out or audited any more


def _holds_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        value = list(value.values())
    return (
        isinstance(value, list | tuple) and depth < 3 and any(_holds_tensor(v, depth + 1) for v in value[:8])
    )


def files_of_a_step(plan: str) -> list[str]:
    """The files, but for the model's own, with a function that is given a tensor, or returns one."""
    found: set[str] = set()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        _, _, name = frame.f_code.co_filename.partition(_SOURCES)
        if not name or name in found or name.startswith("models/"):
            return
        if event == "call":
            code = frame.f_code
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            if any(_holds_tensor(frame.f_locals.get(each)) for each in arguments if each != "self"):
                found.add(name)
        elif event == "return" and _holds_tensor(argument):
            found.add(name)

    model = build(_MIXTURE) if "expert" in plan else gpt()
    with echelon.parallelize(model, plan, optimizer=adamw, loss=token_loss, clip=1.0) as engine:
        for step in range(_STEPS):
            batch = engine.local(tokens(step))
            if step == _STEPS - 1:
                threading.setprofile(see)
                sys.setprofile(see)
            try:
                engine.step(batch)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(found)
