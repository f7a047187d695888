"""The emoji drawings as a TensorFlow Datasets builder, which needs TFDS but not TensorFlow."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

from swjax.data.emoji import rendering
from swjax.data.emoji.concepts import Concept, concepts

_SAMPLE = ("animal-bird", "food-fruit", "person-role")  # subgroups


class Builder(tfds.core.GeneratorBasedBuilder):
    """1,914 emoji in the drawings of OpenMoji and Twemoji, with their names and keywords."""

    VERSION = tfds.core.Version("1.0.0")  # every change of the records needs a new version
    RELEASE_NOTES: ClassVar = {"1.0.0": "OpenMoji in four styles, and Twemoji; trimmed, 96 pixels."}
    BUILDER_CONFIGS: ClassVar = [
        tfds.core.BuilderConfig(name="full", description="All emoji."),
        tfds.core.BuilderConfig(name="sample", description="Birds, fruits and professions."),
    ]

    def _info(self) -> tfds.core.DatasetInfo:
        shape = (rendering.SIZE, rendering.SIZE, 4)
        features = {
            "image": tfds.features.Image(shape=shape, dtype=np.uint8, encoding_format="png"),
            "code": tfds.features.Text(),
            "style": tfds.features.Text(),
            "name": tfds.features.Text(),
            "keywords": tfds.features.Sequence(tfds.features.Text()),
        }
        return self.dataset_info_from_configs(
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "name"),
            homepage="https://openmoji.org",
        )

    def _split_generators(self, dl_manager):
        """Splits by artist; `swjax.data.source` splits further, by family of emoji."""
        del dl_manager  # nothing to download: installed packages contain the drawings
        full = self.builder_config.name == "full"
        chosen = [c for c in concepts() if full or c.subgroup in _SAMPLE]
        drawings = rendering.render(chosen, f"emoji/{self.builder_config.name}")
        return {
            "openmoji": self._generate_examples([d for d in drawings if d[1] != "twemoji"]),
            "twemoji": self._generate_examples([d for d in drawings if d[1] == "twemoji"]),
        }

    def _generate_examples(self, drawings: Iterable[tuple[Concept, str, bytes]]):
        for concept, style, png in drawings:
            example = {
                "image": png,
                "code": concept.code,
                "style": style,
                "name": concept.name,
                "keywords": concept.keywords,
            }
            yield f"{concept.code}/{style}", example
