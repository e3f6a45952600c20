"""Weights in Hugging Face folders, without a whole model anywhere: read by boxes, written tensor by tensor.

weight_folder  a folder as the source of a model's weights; written from tensors that come one by one
layout         the tensors of a model's files, and where the parts of the model's tensors lie in them
tensor_file    one safetensors file, read by boxes and written tensor by tensor

Models of echelon give their layout themselves (`weight_layout`), echelon.nn.huggingface that of transformers.
"""

from echelon.state.weight_files.weight_folder import write_folder

__all__ = ["write_folder"]
