"""The models that plans know by name, and those of model folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fastattention.cli.console import require_extra
from fastattention.errors import ArgumentError
from fastattention.offload.model_shape import PRESETS, ModelShape, find_model


def find_shape(name: str) -> ModelShape:
    """The preset of that name, or the shape of the model in a folder, whose weights are not read.

    Raises ArgumentError for another name, and for a folder with another kind of model.
    """
    if name in PRESETS or not Path(name).is_dir():
        try:
            return find_model(name)
        except ArgumentError as error:
            raise ArgumentError(f"{error}; or give a folder with a model's config.json") from error
    require_extra("transformers", "transformers")
    from fastattention.cli.model_folder import read_config
    from fastattention.integrations.transformers.cache import model_shape

    return replace(model_shape(read_config(Path(name)).get_text_config(decoder=True)), name=Path(name).resolve().name)
