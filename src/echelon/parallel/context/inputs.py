"""What attention over several ranks demands of its inputs."""

from torch import Tensor

from echelon.collectives import Group
from echelon.errors import raise_errors
from echelon.parallel.context.parts import check_length


def check_inputs(name: str, query: Tensor, key: Tensor, value: Tensor, group: Group) -> None:
    """Refuse shapes and types that do not go together, all errors at once."""
    errors = []
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if query.ndim != 4 or key.ndim != 4 or key.shape != value.shape:
        errors.append(
            f"{shapes}: all must be [batch, heads, sequence, width], key and value of the same shape; "
            "reshape them"
        )
    elif (query.shape[0], *query.shape[2:]) != (key.shape[0], *key.shape[2:]):
        errors.append(
            f"{shapes}: only the number of heads may differ; give all three the same batch, sequence and "
            "width"
        )
    elif query.shape[1] % key.shape[1]:
        errors.append(
            f"{shapes}: {query.shape[1]} heads are not divisible by {key.shape[1]} key/value heads; make the "
            "number of heads a multiple"
        )
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        dtypes = f"query {query.dtype}, key {key.dtype}, value {value.dtype}"
        errors.append(f"{dtypes}: all must have one dtype; cast them")
    raise_errors(name, errors)
    check_length(query.shape[2] * group.size, group.size)
