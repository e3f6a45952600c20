"""Models that were built under torch.device("meta"), where nobody recorded: modules that know their own
initial values give them again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from echelon.nn.huggingface import initializer
from echelon.nn.initialization.recording import recording
from echelon.nn.initialization.tape import Tape, Window, on_meta

_RESETS = ("reset_parameters", "_reset_parameters")  # the second is that of torch's attention and Transformer
_FLAG = "_is_hf_initialized"  # with which transformers notes that a module has its values


def record_resets(model: nn.Module) -> tuple[Tape, dict[str, str]]:
    """What modules do to reset their tensors, inner modules first, as they are built; and the names of
    tensors to which that gives no one value, with the reason."""
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    tape = Tape(kept=[tensor for tensor in tensors.values() if not on_meta(tensor)])
    owner: dict[int, nn.Module] = {}  # of a storage: the module that gave it values
    doubtful: set[int] = set()
    with recording(tape), torch.no_grad(), _flags_restored(model):
        for module, reset in _resets(model):
            before = tape.writers()
            reset()
            for storage, count in tape.writers().items():
                if count != before.get(storage, 0):
                    first = owner.setdefault(storage, module)
                    if first is not module and first not in set(module.modules()):
                        doubtful.add(storage)
    return tape, {
        name: "is tied, and several modules give it values; build the model with echelon.deferred(lambda: …)"
        for name, tensor in tensors.items()
        if on_meta(tensor) and Window.of(tensor).storage in doubtful
    }


def how_to_know(model: nn.Module, name: str, *, was_recorded: bool) -> str:
    """Why the initial values of a tensor are not known, and what to do."""
    if was_recorded:
        return "nothing gave it values while the model was built; initialise it there"
    owner = model.get_submodule(name.rpartition(".")[0])
    return (
        f"{type(owner).__name__} was built on the meta device and has no reset_parameters() that gives it "
        "values; build the model with echelon.deferred(lambda: …), or load weights"
    )


def _resets(module: nn.Module) -> Iterator[tuple[nn.Module, Callable[[], object]]]:
    if not any(map(on_meta, (*module.parameters(), *module.buffers()))):
        return  # it has its values
    initialize = initializer(module)
    if initialize is not None:  # a model of transformers initialises all of its modules
        yield module, initialize
        return
    for child in module.children():
        yield from _resets(child)
    for name in _RESETS:
        reset = getattr(module, name, None)
        if callable(reset):
            yield module, reset


@contextmanager
def _flags_restored(model: nn.Module) -> Iterator[None]:
    """The flags of transformers as they were: the values are not there yet."""
    flagged = {module for module in model.modules() if _FLAG in vars(module)}
    try:
        yield
    finally:
        for module in set(model.modules()) - flagged:
            vars(module).pop(_FLAG, None)
