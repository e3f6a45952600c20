"""Importing this makes timm and torchvision importable: import it before them, in ranks too.

`make` installs both into `.venv/foreign` (the Makefile says why). torchvision's kernels for detection load
only beside a torch that was built for CUDA, and its import needs two of these operators. Its models do not:
here the two are declared, without a kernel.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

if find_spec("torchvision") is None:
    sys.path.append(str(Path(sys.prefix) / "foreign"))

_operators = torch.library.Library("torchvision", "FRAGMENT")
if not torch.version.cuda:
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
