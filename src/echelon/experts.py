"""The public name of `echelon.nn.experts`: the same module object."""

import sys

from echelon.nn import experts
from echelon.nn.experts import *  # noqa: F403  (type checkers read the names here)

sys.modules[__name__] = experts
