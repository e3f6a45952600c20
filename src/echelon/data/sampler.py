"""The global batch of a step: which windows of a corpus make it.

This depends only on (seed, step) and the shape of the batch. So every layout sees the same batches, and a
resumed run continues exactly where it stopped: there is no state to save.

    corpus   ├──────────────── train ────────────────┤├─ validation ─┤
    windows  [0 ..... s]    [2s ..... 3s]      s+1 tokens at stride s: each token but
                     [s ..... 2s]     …        the first is the target of just one window
    sample   k = step * batch + row  is window  shuffle(k % windows)  of epoch  k // windows
"""

from dataclasses import dataclass
from math import ceil, isqrt
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from echelon.data.corpus import Corpus
from echelon.data.packing import row_positions, without_next_documents
from echelon.errors import did_you_mean, raise_errors
from echelon.nn.batch import Inputs
from echelon.nn.hashing import ROUNDS

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

Places = npt.NDArray[np.int64]


# [Note: a permutation without an array]
# A place below n is written as two digits (left, right) in base `side`, the smallest with side² ≥ n. One
# round of a Feistel network, (left, right) -> (right, left + hash(right) mod side), is invertible for any
# hash, so a few rounds permute the places below side². A place that maps to n … side² is mapped again until
# it is below n: that follows a cycle of the permutation, so it permutes the places below n.
#
#     shuffle(np.arange(10), 10, seed=0, epoch=0)  ->  [5 3 6 9 1 0 4 2 8 7]
#     shuffle(np.arange(10), 10, seed=0, epoch=1)  ->  [1 2 5 8 9 0 6 7 4 3]
def shuffle(places: Places, n: int, seed: int, epoch: int) -> Places:
    """Map each of `places` (below n) by the pseudo-random permutation of (seed, epoch)."""
    side = isqrt(n - 1) + 1
    # Measured: with eight rounds the distances between neighbours are as even as chance from n = 40 on, and
    # slightly uneven below (χ² per degree of freedom 1.5 at n = 16, where six rounds have 4.2).
    keys = np.random.SeedSequence([seed, epoch]).generate_state(8, np.uint64).astype(np.uint64)
    moved = _feistel(places, side, keys)
    while (outside := moved >= n).any():
        moved[outside] = _feistel(moved[outside], side, keys)
    return moved


def _feistel(places: Places, side: int, keys: npt.NDArray[np.uint64]) -> Places:
    left, right = np.divmod(places, side)
    for key in keys:
        # Each digit is hashed to a number below `side`: the steps of splitmix64, which wrap at 64 bits.
        z = right.astype(np.uint64) ^ key
        for shift, factor in ROUNDS:
            z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
        left, right = right, (left + (z % np.uint64(side)).astype(np.int64)) % side
    return left * side + right


@dataclass(frozen=True)
class Batches:
    """The global batches of a job, by step.

        batches = Batches(corpus, batch=8, sequence=128, seed=0)
        inputs, targets = batches.at(step)                    # the whole global batch: int64 [8, 128] each
        inputs, targets = batches.at(step, part=(0, 2))       # only the rows of replica 0 of 2

    The end of the corpus, `validation_fraction` of it, is kept for `split="validation"`; no window is in both
    splits. A split with fewer windows than one batch is refused: use a smaller batch for a short validation
    split.
    """

    corpus: Corpus
    batch: int
    sequence: int
    seed: int
    split: Split = "train"
    validation_fraction: float = 0.05

    def __post_init__(self) -> None:
        subject = f"the {self.split} batches of corpus '{self.corpus.name}'"
        raise_errors(subject, _argument_errors(self))
        needed = self.batch * self.sequence + 1
        if self.windows < self.batch:
            short = (
                f"the {self.split} split has {self.tokens:,} tokens; one batch ({self.batch} × "
                f"{self.sequence} + 1) needs {needed:,}: {_length_fix(self, needed)}"
            )
            raise_errors(subject, [short])

    @property
    def tokens(self) -> int:
        return _num_tokens(len(self.corpus), self.split, self.validation_fraction)

    @property
    def num_batches(self) -> int:
        """Whole batches in one epoch."""
        return self.windows // self.batch

    @property
    def windows(self) -> int:
        return num_windows(len(self.corpus), self.sequence, self.split, self.validation_fraction)

    def at(self, step: int, part: tuple[int, int] = (0, 1)) -> tuple[Any, torch.Tensor]:
        """Return (inputs, targets) of `step`, int64 [rows, sequence]; `part=(i, n)`: those of replica i of n.

        Of a corpus of documents, inputs are `Inputs(tokens, position_ids=…)`, whose positions start again
        with each document; the last token of one has no target (-100).

        Rows are split as numpy.array_split does: if the batch is not divisible by n, the first replicas have
        one row more.
        """
        index, parts = part
        errors = integer_errors(("step", step, 0))
        if not (_is_integer(parts, 1) and _is_integer(index, 0) and index < parts):
            errors.append(f"part=({index}, {parts}): must be (i, n) with 0 <= i < n, replica i of n")
        raise_errors(f"step {step}, part {part}", errors)
        samples = step * self.batch + rows_of_part(self.batch, *part)
        windows = order_samples(samples, self.windows, self.seed)
        first_token = len(self.corpus) - self.tokens if self.split == "validation" else 0
        starts = first_token + windows * self.sequence
        block = self.corpus.windows(starts, self.sequence + 1)
        inputs, targets = torch.from_numpy(block[:, :-1].copy()), block[:, 1:]
        if self.corpus.starts is None:
            return inputs, torch.from_numpy(targets.copy())
        places = starts[:, None] + np.arange(self.sequence + 1)
        positions = row_positions(places, self.corpus.starts)
        targets = without_next_documents(targets, positions)
        position_ids = torch.from_numpy(positions[:, :-1].copy())
        return Inputs(inputs, position_ids=position_ids), torch.from_numpy(targets)


def order_samples(samples: Places, n: int, seed: int) -> Places:
    """Return which of n things each sample is; a batch may begin in one epoch and end in the next."""
    epochs, places = np.divmod(samples, n)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        places[in_epoch] = shuffle(places[in_epoch], n, seed, int(epoch))
    return places


def rows_of_part(batch: int, part: int, parts: int) -> Places:
    """Return the rows of one part of a batch, split as numpy.array_split does."""
    size, extra = divmod(batch, parts)
    start = part * size + min(part, extra)
    return np.arange(start, start + size + (part < extra), dtype=np.int64)


def num_windows(corpus_tokens: int, sequence: int, split: Split, validation_fraction: float) -> int:
    """Return how many samples one epoch of the split has: no batch of it can be larger."""
    return max(0, _num_tokens(corpus_tokens, split, validation_fraction) - 1) // sequence


def _num_tokens(corpus_tokens: int, split: Split, validation_fraction: float) -> int:
    # Not int(): 0.29 of 100 is 28.999… in floating point.
    held_back = round(corpus_tokens * validation_fraction)
    return held_back if split == "validation" else corpus_tokens - held_back


def integer_errors(*arguments: tuple[str, Any, int]) -> list[str]:
    """List the arguments (name, value, least) that are no integers, or too small."""
    return [
        f"{name}={value!r}: must be an integer, at least {least}"
        for name, value, least in arguments
        if not _is_integer(value, least)
    ]


def _argument_errors(batches: Batches) -> list[str]:
    errors = integer_errors(
        ("batch", batches.batch, 1), ("sequence", batches.sequence, 1), ("seed", batches.seed, 0)
    )
    if batches.split not in SPLITS:
        errors.append(f"split '{batches.split}' is not known{did_you_mean(batches.split, SPLITS)}")
    if not 0 <= batches.validation_fraction < 1:
        errors.append(f"validation_fraction={batches.validation_fraction}: must be at least 0 and below 1")
    return errors


def _length_fix(batches: Batches, needed: int) -> str:
    total = len(batches.corpus)
    enough = ceil(1000 * needed / total) / 1000 if total else 1.0
    fixes = []
    if batches.windows > 0:
        fixes.append(f"lower the batch to {batches.windows}")
    if batches.split == "validation" and enough < 1:
        fixes.append(f"raise validation_fraction to {enough}")
    if batches.split == "train" and total >= needed:
        fixes.append("lower validation_fraction")
    fixes.append("shorten the sequence, or use a larger corpus")
    return "; or ".join(fixes)


def _is_integer(value: Any, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
