"""What an engine has learned in its first step, and computes by from then on: a restart must know it too.

columns    which matrices have one input, and sum its gradient together (parallel/tensor/regions.py)
buckets    in which order gradients come, and lie in buckets: with three ranks or more, the place of a number
           may decide in which order it is summed

None of it changes what is computed but for rounding. So it matters to the same plan alone, which goes on in
every bit as if it had not stopped.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from echelon.nn.wrapping import find_wrapper
from echelon.parallel.data.all_reduce import Bucketed
from echelon.parallel.stage import LocalStages
from echelon.parallel.tensor.modules import Column
from echelon.parallel.tensor.regions import Multiplier

LEARNED = "(learned)"  # the name in a checkpoint; no parameter can have it


def learned(local: LocalStages) -> dict[str, Any]:
    """As plain data."""
    columns = dict(_columns(local))
    names: dict[Multiplier, str] = {column: name for name, column in columns.items()}
    sharing = {
        names[first]: [names[each] for each in together]
        for shared in {column.region.shared_input for column in columns.values()}
        for first, together in shared.learned.items()
    }
    return {"columns": sharing, "buckets": [each.learned_order() for each in _bucketed(local)]}


def restore_learned(local: LocalStages, data: dict[str, Any]) -> None:
    """Begin with what another engine of the same plan has learned."""
    columns = dict(_columns(local))
    for first, together in data["columns"].items():
        if all(name in columns for name in (first, *together)):
            columns[first].region.shared_input.learned[columns[first]] = [columns[name] for name in together]
    for each, order in zip(_bucketed(local), data["buckets"], strict=False):
        each.restore_order(order)


def _columns(local: LocalStages) -> Iterator[tuple[str, Column]]:
    for index, stage in local.stages.items():
        for path, module in stage.module.named_modules():
            column = find_wrapper(module, Column)
            if column is not None:
                yield f"{index}/{path}", column


def _bucketed(local: LocalStages) -> Sequence[Bucketed]:
    return [sharing for sharing in dict.fromkeys(local.sharings) if isinstance(sharing, Bucketed)]
