"""Models that were built under torch.device("meta"), where nobody recorded: modules that know their own
initial values give them again."""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from echelon.huggingface import initializer
from echelon.initialization.recording import recording
from echelon.initialization.tape import Tape, on_meta

_RESETS = (
    "reset_parameters",
    "_reset_parameters",
)  # the second is that of torch's attention and transformers


def record_resets(model: nn.Module) -> Tape:
    """What each module does to reset its tensors, inner modules first, as they are built."""
    tape = Tape()
    with recording(tape), torch.no_grad():
        for reset in _resets(model):
            reset()
    return tape


def how_to_know(model: nn.Module, name: str, *, was_recorded: bool) -> str:
    """Why the initial values of a tensor are not known, and what to do."""
    if was_recorded:
        return "nothing gave it values while the model was built; initialise it there"
    owner = model.get_submodule(name.rpartition(".")[0])
    return (
        f"{type(owner).__name__} was built on the meta device and has no reset_parameters() that gives it "
        "values; build the model with echelon.deferred(lambda: …), or load weights"
    )


def _resets(module: nn.Module) -> Iterator[Callable[[], object]]:
    if not any(map(on_meta, (*module.parameters(), *module.buffers()))):
        return  # it has its values
    initialize = initializer(module)
    if initialize is not None:  # a model of transformers initialises all of its modules
        yield initialize
        return
    for child in module.children():
        yield from _resets(child)
    if any(map(on_meta, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
        known = (getattr(module, name, None) for name in _RESETS)
        yield from filter(callable, known)
