"""Weights in Hugging Face folders, without a whole model anywhere: read by boxes, written tensor by tensor.

weight_folder  a folder as the source of a model's weights
layout         the tensors of a model's files, and where the parts of the model's tensors lie in them
folder_writer  a folder written from tensors that come one after the other
dcp_folder     the same in the format of torch.distributed.checkpoint, for other programs
tensor_file    one safetensors file, read by boxes and written tensor by tensor

Models of echelon give their layout themselves (`weight_layout`), echelon.nn.huggingface that of transformers.
"""

from echelon.state.weight_files.folder_writer import SHARD_BYTES, write_folder, write_weights
from echelon.state.weight_files.layout import (
    Box,
    FileTensor,
    Piece,
    WeightLayout,
    Window,
    find_ties,
    is_same,
    plain_layout,
    read_pieces,
    state_tensors,
    tensor_errors,
    whole,
    whole_tensor,
)
from echelon.state.weight_files.tensor_file import TensorEntry
from echelon.state.weight_files.weight_folder import CONFIG, WeightFolder, read_headers, read_json

__all__ = [
    "CONFIG",
    "SHARD_BYTES",
    "Box",
    "FileTensor",
    "Piece",
    "TensorEntry",
    "WeightFolder",
    "WeightLayout",
    "Window",
    "find_ties",
    "is_same",
    "plain_layout",
    "read_headers",
    "read_json",
    "read_pieces",
    "state_tensors",
    "tensor_errors",
    "whole",
    "whole_tensor",
    "write_folder",
    "write_weights",
]
