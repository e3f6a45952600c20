"""The inputs of a transformers model that runs layer by layer.

Its first layer takes tokens. A padding mask and positions are for every layer, on every stage; all ranks of a
replica have the same batch, so each has them already. What no layer can take is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from echelon.errors import UserError, raise_errors
from echelon.nn.batch import Inputs
from echelon.nn.losses import IGNORED_TARGET
from echelon.nn.sequence import POSITIONS

MASK = "attention_mask"
CACHE = "use_cache"  # for generation: with one, transformers does not tell sequences in a row apart
_TOKENS = "input_ids"
# Options that change nothing at these values: layers have no caches and return only logits.
_DEFAULTS: Mapping[str, tuple[object, ...]] = {
    CACHE: (True, False),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_router_logits": (False,),
    "return_dict": (True,),
}


def layer_inputs(arguments: Mapping[str, Any], targets: Any, *, context: int) -> Inputs:
    """Return the arguments of a model's forward, by name, as its layers take them."""
    given = {name: value for name, value in arguments.items() if not _is_default(name, value)}
    tokens, mask, positions = given.pop(_TOKENS, None), given.pop(MASK, None), given.pop(POSITIONS, None)
    if not isinstance(tokens, Tensor) or given:
        _refuse(sorted(given), has_tokens=isinstance(tokens, Tensor))
    shared: dict[str, Any] = {}
    if mask is not None and not _is_all_ones(mask):
        _check_shape(MASK, mask, tokens, _MASK_FIX)
        if context > 1:
            _check_padding(mask, targets, context)
        else:
            shared[MASK] = mask
    if positions is not None:
        _check_shape(
            POSITIONS, positions, tokens, "they must have the same shape; expand them to one row per sample"
        )
        if context > 1:
            raise UserError(
                f"{POSITIONS} with context={context}: ranks that share a sequence count its positions "
                "themselves; drop them, or use context=1"
            )
        shared |= {POSITIONS: positions, CACHE: False}  # for the model's own forward, if that is called
    return Inputs(tokens).for_layers(shared)


def _is_default(name: str, value: object) -> bool:
    return value is None or any(value is default for default in _DEFAULTS.get(name, ()))


def _refuse(names: list[str], *, has_tokens: bool) -> None:
    errors = [
        f"{name}: the layers take {_TOKENS}, {MASK} and {POSITIONS}, and would leave it out; drop it, or use "
        "a plan that calls the model's own forward: data, with tensor or not, and zero=0"
        for name in names
    ]
    if not has_tokens:
        errors.append(f"{_TOKENS}: is missing; the first layer takes them")
    raise_errors("the batch of a transformers model that runs layer by layer", errors)


def _is_all_ones(mask: Any) -> bool:
    """Return True if a mask leaves out nothing. A mask on a device is not read: that would stop the host."""
    return isinstance(mask, Tensor) and mask.is_cpu and bool(mask.all())


_MASK_FIX = (
    "where a model runs layer by layer, they must have the same shape, [samples, positions], with 0 at "
    "padding; masks of more dims need a plan that calls the model's own forward (zero=0, without pipeline, "
    "sequence and context)"
)


def _check_shape(name: str, value: Any, tokens: Tensor, fix: str) -> None:
    if not isinstance(value, Tensor) or value.shape != tokens.shape:
        form = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"{name} is {form} and {_TOKENS} {list(tokens.shape)}: {fix}")


def _check_padding(mask: Tensor, targets: Any, context: int) -> None:
    """Refuse padding that positions could see, where ranks share a sequence. Attention is causal: padding at
    the end is seen by padding alone. What is computed there must not count."""
    reason = _reason_of_padding(mask, targets)
    if reason:
        raise UserError(
            f"context={context} with padding: {reason}; pad at the end of sequences (padding_side='right') "
            f"and give padding the label {IGNORED_TARGET}, or use context=1"
        )


def _reason_of_padding(mask: Tensor, targets: Any) -> str:
    if not mask.is_cpu:
        return f"{MASK} is on {mask.device}, and it must be in host memory to be looked at"
    padding = mask == 0
    if bool((padding[:, :-1] & ~padding[:, 1:]).any()):
        return "some sequences have it before their tokens, and ranks that share a sequence attend to it"
    is_labelled = isinstance(targets, Tensor) and targets.is_cpu and targets.shape == mask.shape
    if not is_labelled or bool((targets[padding] != IGNORED_TARGET).any()):
        return "some of it has labels that count"
    return ""
