"""The public name of `echelon.train.integrations`: the same module object."""

import sys
from typing import TYPE_CHECKING

from echelon.train import integrations

if TYPE_CHECKING:
    from echelon.train.integrations import *  # noqa: F403

sys.modules[__name__] = integrations
