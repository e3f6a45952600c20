"""The numbers with which an engine goes on, of those that another one has saved.

Where all ranks step together, there is one of each. Asynchronous workers have numbers of their own:

    begun steps                     sync=all-reduce, …
    begun steps of worker 1         sync=async, beside `version`: how many updates the server has made
"""

from collections.abc import Mapping

from echelon.state.checkpoint.manifest import Number

_BEGUN, _STEPS, _SKIPPED, VERSION = "begun steps", "steps", "skipped steps", "version"


def numbers_of(numbers: Mapping[str, Number], worker: int | None, workers: int) -> dict[str, Number]:
    """Those of all ranks together, or of one of `workers` asynchronous workers, by their plain names.

    A worker goes on where it was if there are as many as before. Otherwise everybody begins at one step: the
    number of updates that were made, or of steps, if that is larger.
    """
    saved = _num_workers(numbers)
    plain = {name: value for name, value in numbers.items() if " of worker " not in name}
    if not saved:
        return {**plain, VERSION: numbers[_BEGUN]}
    if worker is not None and saved == workers:
        return {**plain, **_of_worker(numbers, worker)}
    begun = max([numbers[VERSION], *(numbers[f"{_BEGUN} of worker {each}"] for each in range(saved))])
    return {**plain, **_of_worker(numbers, 0), _BEGUN: begun, _STEPS: begun, _SKIPPED: 0}


def number_errors(numbers: Mapping[str, Number]) -> list[str]:
    """What `numbers_of`, and an engine that goes on with its result, would not find."""
    saved = _num_workers(numbers)
    whose = [f" of worker {each}" for each in range(saved)] or [""]
    needed = [f"{name}{each}" for each in whose for name in (_BEGUN, _STEPS)] + ([VERSION] if saved else [])
    needed += [
        name.replace("loss scale", "good steps", 1) for name in numbers if name.startswith("loss scale")
    ]
    return [
        f"numbers: there is no {name!r}, which every engine saves" for name in needed if name not in numbers
    ]


def _num_workers(numbers: Mapping[str, Number]) -> int:
    return sum(name.startswith(f"{_BEGUN} of worker ") for name in numbers)


def _of_worker(numbers: Mapping[str, Number], worker: int) -> dict[str, Number]:
    suffix = f" of worker {worker}"
    return {name.removesuffix(suffix): value for name, value in numbers.items() if name.endswith(suffix)}
