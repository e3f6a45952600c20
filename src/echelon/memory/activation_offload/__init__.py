"""offload=activations: tensors that autograd saves go to host memory, and come back for the backward pass."""
