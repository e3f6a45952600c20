"""Hashes that are the same on every device: splitmix64 of a counter, in int64 that wraps around.

What is drawn at random by them depends on what it is for (a key) and on nothing else: not on the plan, the
device, or what was drawn before.
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

WEYL = 0x9E3779B97F4A7C15
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # shift right and xor, multiply
_ALL = (1 << 64) - 1


def hash_of(*numbers: int, start: int = 0) -> int:
    """Return a hash of 64 bits of integers of any size and sign; their order matters.

    hash_of(1, 2, 3) == hash_of(3, start=hash_of(1, 2))
    """
    state = start
    for number in numbers:
        state = mix(state + number + WEYL)
    return state


@lru_cache(maxsize=4096)
def hash_text(text: str) -> int:
    """Return a hash of 64 bits: the number of a layer, of its name."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(number: int) -> int:
    """Hash an unsigned number: splitmix64."""
    number &= _ALL
    for shift, factor in ROUNDS:
        number ^= number >> shift
        number = number * factor & _ALL
    return number


def mix_(numbers: Tensor) -> Tensor:
    """Hash every element as `mix` does, in place."""
    for shift, factor in ROUNDS:
        # The shift of an int64 copies its sign; the mask removes the copies.
        numbers ^= (numbers >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        if factor != 1:
            numbers *= signed(factor)
    return numbers


def hash_on_device(*numbers: int, start: Tensor) -> Tensor:
    """Return the int64 of the bits of `hash_of`, where `start` is such an int64 on a device."""
    state = start
    for number in numbers:
        state = mix_(state + signed((number + WEYL) & _ALL))
    return state


def signed(number: int) -> int:
    """Return the int64 of the same 64 bits."""
    return number - (1 << 64) if number >> 63 else number


def signed_key(key: int | Tensor) -> int | Tensor:
    """Return the int64 of a hash; one on a device is that already."""
    return key if isinstance(key, Tensor) else signed(key)


def moved(number: int | Tensor, device: torch.device | str) -> int | Tensor:
    """Return the number where `device` can compute with it: a model on a GPU may draw on the host."""
    return number.to(device) if isinstance(number, Tensor) else number
