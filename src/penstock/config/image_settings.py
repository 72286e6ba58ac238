"""Costs and sizes of images in a model's vision tower, for the scheduler, the memory plan and the simulator."""

from penstock.api.request import Image
from penstock.config.model_facts import BYTES_OF, ModelFacts, ModelPrecision, TowerFacts
from penstock.dataclass import dataclass
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings of an engine whose model takes images."""

    tower: TowerFacts
    element_bytes: int
    """Bytes of an element of features and activations."""
    token_elements: int
    """Matrix elements that the text model multiplies for a token."""
    feature_bytes: int
    """Budget for the features of encoded images, and for the activations of those that are partly encoded."""

    def num_patches(self, height: int, width: int) -> int:
        """Number of patches of a picture."""
        side = self.tower.patch_pixels
        return -(-height // (self.tower.patch_height or side)) * -(-width // side)

    def layer_tokens(self, height: int, width: int) -> int:
        """Cost of one layer of the tower for a picture: the text tokens that take as many multiplications."""
        return -(-self.layer_multiplications(height, width) // self.token_elements)

    def layer_multiplications(self, height: int, width: int) -> int:
        """Multiplications of one layer of the tower for a picture."""
        patches = self.num_patches(height, width)
        return patches * (self.tower.layer_elements + 2 * patches * self.tower.hidden_size)

    def image_bytes(self, image: Image) -> int:
        """Bytes of an image between two steps: of its features or, if they are more, of what there is before these."""
        patches = self.num_patches(image.height, image.width)
        return _image_bytes(self.tower, image.rows * image.columns, patches, self.element_bytes)

    def refusal(self, image: Image) -> str | None:
        """Why an image cannot be encoded; None if it can."""
        tower, patches = self.tower, self.num_patches(image.height, image.width)
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
    """The settings of a model that takes images; None: it takes text only."""
    tower = model.facts.tower
    if tower is None:
        return None
    return ImageSettings(tower, BYTES_OF[model.dtype], token_elements(model.facts), feature_bytes)


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
