"""Folders with the weights of an image model: safetensors, and config.json with sizes and class names."""

from functools import partial
from pathlib import Path

import torch

from echelon.errors import UserError
from echelon.models.image.folder_config import read_image_config
from echelon.models.image.model import ImageModel, build_image
from echelon.state.weight_files import WeightFolder, plain_layout, whole


def load_image(folder: str | Path) -> ImageModel:
    """Build the image model in a folder, with its weights in the type they are stored in, on the CPU."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"image model '{folder}': there is no such folder")
    with torch.device("meta"):  # no memory and no random values for weights that are loaded
        model = build_image(read_image_config(folder))
    weights = WeightFolder(folder, partial(plain_layout, model))
    weights.check()
    state = model.state_dict()
    for name in weights.names():
        (state[name],) = weights.read(name, [whole(state[name].shape)])
    model.load_state_dict(state, assign=True)
    return model
