"""SmolVLM and Idefics 3: Llama with a SigLIP tower for images, which are cut into tiles.

x += attention(norm(x)); x += mlp(norm(x))      Llama's
features = W [neighbouring patches]             in place of the embeddings of image tokens
"""

from dataclasses import replace

from penstock.errors import CheckpointError
from penstock.models.families.llama import llama_spec
from penstock.models.families.towers.reading import read_tower
from penstock.models.families.towers.siglip import siglip_tower
from penstock.models.hf_config import HFConfig
from penstock.models.spec import MergeSpec, ModelNames, ModelSpec, ProjectionSpec, TowerSpec

_TOWERS = ("vision_config", "image_token_id", "scale_factor", "_pad_token_id")


def idefics3_spec(config: HFConfig) -> ModelSpec:
    """Read an `Idefics3ForConditionalGeneration` or a `SmolVLMForConditionalGeneration`.

    Raises:
        CheckpointError: the text model is not Llama's.
    """
    text = config.text(*_TOWERS)
    text.expect("model_type", "llama")
    if not config.has("text_config"):
        raise CheckpointError(f"{config.file} lacks 'text_config'")
    model = llama_spec(text)
    names = ModelNames(
        ignored=(*ModelNames().ignored, r"(vision_model|connector)\..*"),
        prefixes=(
            ("model.text_model.", "model."),
            ("model.vision_model.", "vision_model."),
            ("model.connector.", "connector."),
        ),
    )
    merge = config.size("scale_factor", 2)

    def read(vision: HFConfig) -> TowerSpec:
        tower = siglip_tower(vision, "vision_model", hidden_size=1152, num_heads=16, patch_size=32, merge=merge)
        wide = tower.hidden_size * merge**2
        projection = ProjectionSpec("connector.modality_projection.proj", wide, model.hidden_size)
        return replace(tower, connector=(MergeSpec(), projection))

    return replace(model, names=names, tower=read_tower(config, read))
