"""Gist: what autograd saves for the backward pass is kept in fewer bits (Jain et al., 2018).

layer           a layer whose saved tensors are kept encoded: the hooks, one encoding per memory
functions       ReLU and pooling that save only what their backward passes need
calls           relu and max_pool2d that a forward calls as functions
statistics      what is never rounded: numbers that a backward pass raises e to, or divides by
marks           which memory holds many zeros: outputs of ReLU, and what pools made of them
bits            1-bit masks and 4-bit positions, packed into bytes
sparse          tensors with many zeros: non-zero values, and where they are
floats          fp16, fp10 and fp8, and the exact form of float64
fresh           what a ReLU has encoded for the layer that reads its output next
kernels         the same as Triton kernels, on CUDA devices (backend chooses)
launch          launches of kernels
"""

from echelon.memory.gist.functions import CompressedModule, can_compress
from echelon.memory.gist.layer import CompressedLayer
from echelon.memory.gist.settings import Compression, any_size, uncompressed

__all__ = ["CompressedLayer", "CompressedModule", "Compression", "any_size", "can_compress", "uncompressed"]
