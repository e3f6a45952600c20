"""Weights in Hugging Face folders, without a whole model anywhere: read by boxes, written tensor by tensor.

weight_folder  a folder as the source of a model's weights
layout         the tensors of a model's files, and where the parts of the model's tensors lie in them
folder_writer  a folder written from tensors that come one after the other
dcp_folder     the same in the format of torch.distributed.checkpoint, for other programs
tensor_file    one safetensors file, read by boxes and written tensor by tensor

Models of echelon give their layout themselves (`weight_layout`), echelon.nn.huggingface that of transformers.
"""

from echelon.state.weight_files.folder_writer import write_folder

__all__ = ["write_folder"]
