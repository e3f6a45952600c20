"""The first import of the fork server: keeps the modules that it imports after this from starting CUDA.

A rank cannot use CUDA if the process that it was forked from has started it. If a module asks torch whether
CUDA is available while it is imported, NVML must answer. Ranks have the user's environment instead.
"""

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
