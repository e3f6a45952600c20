"""Gist: what autograd saves for the backward pass is kept in fewer bits (Jain et al., 2018).

layer           a layer whose saved tensors are kept encoded: the hooks, one encoding per memory
functions       ReLU and pooling that save only what their backward passes need
compression     shared by all layers: the format, which memory holds many zeros or was encoded already
packing         tensors as flat memory; 1-bit masks and 4-bit positions, packed into bytes
sparse          tensors with many zeros: non-zero values, and where they are
floats          fp16, fp10 and fp8, and the exact form of float64
kernels         the same as Triton kernels, on CUDA devices (backend chooses)
pooling         max-pooling that writes and reads 4-bit positions, likewise
launch          launches of kernels
"""
