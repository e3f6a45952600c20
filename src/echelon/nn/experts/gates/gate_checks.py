"""What a gate, or experts, cannot be made with."""

import math
from collections.abc import Iterator


def gate_errors(num_experts: int, top_k: int, capacity: float | None) -> Iterator[str]:
    """Errors in what all gates have."""
    wrong = list(size_errors(num_experts=num_experts))
    yield from wrong
    if not _is_integer(top_k):
        yield f"top_k={top_k!r}: must be an integer, the number of experts that a token takes"
    elif top_k < 1:
        yield f"top_k={top_k}: each token needs an expert; use at least 1"
    elif not wrong and top_k > num_experts:
        yield (
            f"top_k={top_k} is above num_experts={num_experts}: a token can take each expert once; use at "
            f"most {num_experts}"
        )
    if capacity is not None and not (math.isfinite(capacity) and capacity > 0):
        yield (
            f"capacity={capacity}: a factor of the fair share of an expert, above 0 (1.25 is usual), or None "
            "to drop nothing"
        )


def size_errors(**sizes: int) -> Iterator[str]:
    """Numbers of which there must be one or more."""
    for name, size in sizes.items():
        if not _is_integer(size):
            yield f"{name}={size!r}: must be an integer"
        elif size < 1:
            yield f"{name}={size}: must be at least 1"


def _is_integer(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def weight_errors(**weights: float) -> Iterator[str]:
    """Weights of losses, and other numbers that cannot be negative."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            yield f"{name}={weight}: must be a finite number, at least 0"


def group_errors(num_experts: int, groups: int, top_groups: int, top_k: int) -> Iterator[str]:
    """Errors of a choice that is limited to a few groups of experts."""
    if groups < 1 or num_experts % groups:
        yield f"num_experts={num_experts} is not divisible by groups={groups}: groups must be of equal size"
        return
    if not 1 <= top_groups <= groups:
        yield f"top_groups={top_groups}: must be from 1 to groups={groups}"
    elif top_k > top_groups * (num_experts // groups):
        yield (
            f"top_k={top_k} is above the {top_groups * (num_experts // groups)} experts of "
            f"top_groups={top_groups} groups of {num_experts // groups}: use a larger top_groups"
        )


def normalize_errors(top_k: int, normalize: bool) -> Iterator[str]:
    """Errors of weights that are normalized to sum 1."""
    if top_k == 1 and normalize:
        yield (
            "top_k=1 normalize=True: a single weight would always be 1, and the gate would learn nothing of "
            "the loss; set normalize=False"
        )
