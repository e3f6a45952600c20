"""Importing this imports torchao, from a folder that only tests of precision=fp8 look into: transformers
imports a torchao that it finds, which takes seconds and writes lines about kernels that it cannot load.

`emulated`: on a CPU the products of precision=fp8 are computed in float32, of the same rounded numbers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch
from warnings import catch_warnings

from echelon.nn import float8

_folder = str(Path(sys.prefix) / "foreign")
_is_separate = find_spec("torchao") is None
if _is_separate:
    sys.path.append(_folder)
try:
    with catch_warnings(action="ignore"):  # a file of torchao has an escape sequence that Python warns of
        import torchao.float8  # noqa: F401
finally:
    if _is_separate:
        sys.path.remove(_folder)


@contextmanager
def emulated() -> Iterator[None]:
    """Inside, precision=fp8 runs on any device, and takes matrices of any width."""
    with patch.multiple(float8, EMULATES=True, NARROW=0):
        yield
