"""Gates written from their formulas, with plain loops over floats: what the real ones are compared with.

A token is a list of floats. A slot is (expert, weight).
"""

import math
from collections.abc import Sequence

Vector = Sequence[float]
Matrix = Sequence[Vector]
Slots = list[tuple[int, float]]


def dot(matrix: Matrix, x: Vector) -> list[float]:
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix]


def softmax(logits: Vector) -> list[float]:
    exponentials = [math.exp(each) for each in logits]
    return [each / sum(exponentials) for each in exponentials]


def top(values: Vector, k: int) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def softplus(x: float) -> float:
    return math.log(1 + math.exp(x))


def normal_cdf(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def cv_squared(values: Vector) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values) / mean**2


def softmax_top_k(logits: Vector, k: int, *, normalize: bool) -> Slots:
    probabilities = softmax(logits)
    chosen = top(probabilities, k)
    total = sum(probabilities[i] for i in chosen) if normalize else 1.0
    return [(i, probabilities[i] / total) for i in chosen]


def noisy_top_k(clean: Vector, spread: Vector, noise: Vector, k: int) -> tuple[Slots, list[float]]:
    """The slots of a token, and P(x, i) of each expert."""
    noisy = [c + e * softplus(s) for c, s, e in zip(clean, spread, noise, strict=True)]
    chosen = top(noisy, k)
    weights = softmax([noisy[i] for i in chosen])
    load = []
    for i, value in enumerate(clean):
        others = sorted((noisy[j] for j in range(len(noisy)) if j != i), reverse=True)
        threshold = others[k - 1] if k <= len(others) else -math.inf
        load.append(normal_cdf((value - threshold) / softplus(spread[i])))
    return list(zip(chosen, weights, strict=True)), load


def sigmoid_top_k(logits: Vector, bias: Vector, k: int, groups: int, top_groups: int, scale: float) -> Slots:
    scores = [1 / (1 + math.exp(-each)) for each in logits]
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    best = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    allowed = top(best, top_groups)
    chosen = top([b if i // size in allowed else -math.inf for i, b in enumerate(biased)], k)
    total = sum(scores[i] for i in chosen)
    return [(i, scale * scores[i] / total) for i in chosen]


def drop_over_capacity(sample: list[Slots], capacity: int, none: int) -> list[Slots]:
    """First choices of all positions, then second ones: an expert takes the first `capacity` of them."""
    taken: dict[int, int] = {}
    kept = [list(slots) for slots in sample]
    for turn in range(len(sample[0])):
        for position, slots in enumerate(sample):
            expert = slots[turn][0]
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > capacity:
                kept[position][turn] = (none, 0.0)
    return kept


def entropy(probabilities: Vector) -> float:
    return -sum(p * math.log(p) for p in probabilities if p > 0)
