"""Importing this imports timm and torchvision, which lie in a folder of their own.

`make` installs both into `.venv/foreign` (the Makefile says why). torchvision's kernels for detection load
only beside a torch that was built for CUDA, and its import needs two of these operators. Its models do not:
here the two are declared, without a kernel. The folder is on the path only meanwhile: ranks inherit the path,
and transformers imports a torchvision that it finds, without the operators.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

_operators = torch.library.Library("torchvision", "FRAGMENT")
if not torch.version.cuda:
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

_folder = str(Path(sys.prefix) / "foreign")
_is_separate = find_spec("torchvision") is None
if _is_separate:
    sys.path.append(_folder)
try:
    import timm  # noqa: F401
    import torchvision  # noqa: F401
finally:
    if _is_separate:
        sys.path.remove(_folder)
