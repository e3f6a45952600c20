"""As a module that asks for CUDA while it is imported."""

import gc
import os

answer = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
collects_garbage = gc.isenabled()
