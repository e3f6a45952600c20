"""The first import of the fork server: settings for the modules that it imports after this.

CUDA: a rank cannot use it if the process that it was forked from has started it. If a module asks torch
whether CUDA is available while it is imported, NVML must answer. Ranks have the user's environment instead.

Garbage: what a module makes while it is imported mostly lives forever, and the collector would look through
it again and again, for a quarter of the time. Ranks collect garbage (`fork_server.leave_server`).
"""

import gc
import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
gc.disable()
