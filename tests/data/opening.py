"""Token files, and the errors of opening a corpus."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.data import open_corpus
from echelon.errors import UserError


def write_tokens(path: Path, ids: list[int], dtype: str) -> str:
    np.array(ids, dtype=dtype).tofile(path)
    return str(path)


def errors_of(*args: Any, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(UserError) as caught:
        open_corpus(*args, **kwargs)
    return caught.value.errors
