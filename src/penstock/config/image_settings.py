"""Costs and sizes of images in a model's vision tower, for the scheduler, the memory plan and the simulator."""

from collections.abc import Mapping

from penstock.api.request import Image, MediaKind
from penstock.config.model_facts import BYTES_OF, ModelFacts, ModelPrecision, TowerFacts
from penstock.dataclass import dataclass
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of an engine whose model takes images or sounds."""

    towers: Mapping[MediaKind, TowerFacts]
    """The encoder of each kind that it takes."""
    element_bytes: int
    """Bytes of an element of features and activations."""
    token_elements: int
    """Matrix elements that the text model multiplies for a token."""
    feature_bytes: int
    """Budget for the features of encoded images, and for the activations of those that are partly encoded."""

    @property
    def is_attended(self) -> bool:
        """Whether all tokens of a text attend to features."""
        return any(tower.is_attended for tower in self.towers.values())

    @property
    def rope_axes(self) -> bool:
        """Whether the text model's rotary positions have three axes."""
        return any(tower.rope_axes for tower in self.towers.values())

    def attends_within(self, image: Image) -> bool:
        """Whether an image's tokens attend to each other in the text model, also to later ones."""
        return self.towers[image.kind].attends_within

    def num_layers(self, image: Image) -> int:
        """Number of layers that compute an image's features."""
        return self.towers[image.kind].num_layers

    def num_patches(self, image: Image) -> int:
        """Number of patches of a picture."""
        tower = self.towers[image.kind]
        return -(-image.height // (tower.patch_height or tower.patch_pixels)) * -(-image.width // tower.patch_pixels)

    def layer_tokens(self, image: Image) -> int:
        """Cost of one layer of the tower for a picture: the text tokens that take as many multiplications."""
        tower, patches = self.towers[image.kind], self.num_patches(image)
        return -(-patches * (tower.layer_elements + 2 * patches * tower.hidden_size) // self.token_elements)

    def image_bytes(self, image: Image) -> int:
        """Bytes of an image between two steps: of its features or, if they are more, of what there is before these."""
        tower = self.towers[image.kind]
        return _image_bytes(tower, image.rows * image.columns, self.num_patches(image), self.element_bytes)

    def refusal(self, image: Image) -> str | None:
        """Why an image cannot be encoded; None if it can."""
        tower = self.towers.get(image.kind)
        if tower is None:
            return f"this model takes text and {' and '.join(f'{kind}s' for kind in self.towers)}, not {image.kind}s"
        patches = self.num_patches(image)
        if image.rows * image.columns <= tower.max_tokens and patches <= tower.max_patches:
            return None
        return (
            f"an image of {image.height} x {image.width} pixels takes {image.rows * image.columns} tokens of {patches} "
            f"patches; this model's vision tower encodes at most {tower.max_tokens} tokens of {tower.max_patches} "
            "patches: send a smaller one"
        )


def largest_image_bytes(tower: TowerFacts, element_bytes: int) -> int:
    """`ImageSettings.image_bytes` of the largest image."""
    return _image_bytes(tower, tower.max_tokens, tower.max_patches, element_bytes)


def _image_bytes(tower: TowerFacts, tokens: int, patches: int, element_bytes: int) -> int:
    begun = tokens * tower.early_elements + patches * tower.hidden_size
    return max(tokens * tower.feature_elements, begun) * element_bytes


def token_elements(facts: ModelFacts) -> int:
    """Matrix elements that the layers of a model multiply for a token."""
    multiplied = (matrix for matrix in facts.matrices if matrix.multiplied and matrix.rows != facts.vocab_size)
    return max(1, sum(matrix.rows * matrix.columns for matrix in multiplied) - facts.idle_elements)


def image_settings(model: ModelPrecision, feature_bytes: int) -> ImageSettings | None:
    """The settings of a model that takes images or sounds; None: it takes text only."""
    towers = model.facts.towers
    if not towers:
        return None
    return ImageSettings(towers, BYTES_OF[model.dtype], token_elements(model.facts), feature_bytes)


def check_image_limits(tower: TowerFacts, max_num_seqs: int, max_tokens: int, max_prefill: int | None) -> None:
    """
    Args:
        max_tokens: the option `max_num_batched_tokens`.
        max_prefill: the option `max_batch_prefill_tokens`; None: no such limit.

    Raises:
        ConfigError: an image whose tokens attend to each other may not fit one step.
    """
    if not tower.attends_within:
        return
    needs = f"an image takes up to {tower.max_tokens} tokens, which attend to each other and are computed in one step"
    least = tower.max_tokens + max_num_seqs  # running sequences need a token each
    if max_tokens < least:
        raise ConfigError(
            f"max_num_batched_tokens ({max_tokens}) is below {least}: {needs}; raise it or lower max_num_seqs"
        )
    if max_prefill is not None and max_prefill < tower.max_tokens:
        raise ConfigError(f"max_batch_prefill_tokens ({max_prefill}) is below {tower.max_tokens}: {needs}; raise it")
