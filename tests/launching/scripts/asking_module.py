"""As a module that asks for CUDA while it is imported."""

import os

answer = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
