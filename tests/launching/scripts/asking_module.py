"""As a module that asks for CUDA while it is imported."""

import gc
import os
import signal

answer = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
collects_garbage = gc.isenabled()
hears_ctrl_c = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
hears_sigterm = signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
