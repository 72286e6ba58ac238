"""The sizes of a model's vision tower and audio encoder, for the memory plan and the scheduler. No torch."""

import logging
from functools import lru_cache

from penstock.api.request import MediaKind
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.checkpoint.image_input import read_image_input
from penstock.checkpoint.sound_input import read_sound_input
from penstock.config.image_input import ImageInput
from penstock.config.model_facts import WINDOW_BLOCK, ActivationSizes, TowerFacts, blocks_of_window
from penstock.errors import CheckpointError
from penstock.layers.attention import AttentionSpec
from penstock.layers.sizes import SizeRecorder, WeightSizes
from penstock.models.audio_encoder import AudioEncoder
from penstock.models.audio_tower import AudioTower
from penstock.models.spec import (
    AudioEncoderSpec,
    AudioTowerSpec,
    LayerSpec,
    MediaEncoderSpec,
    ModelSpec,
    SpectrogramSpec,
    TowerSpec,
)
from penstock.models.tower import Tower

logger = logging.getLogger(__name__)
_FLOAT_BYTES = 4


def read_tower_facts(checkpoint: Checkpoint, spec: ModelSpec) -> dict[MediaKind, TowerFacts]:
    """The facts of each encoder that the model has, and whose input has settings."""
    found = {kind: _facts_of(encoder, checkpoint, spec) for kind, encoder in spec.encoders.items()}
    return {kind: facts for kind, facts in found.items() if facts is not None}


def _facts_of(encoder: MediaEncoderSpec, checkpoint: Checkpoint, spec: ModelSpec) -> TowerFacts | None:
    if isinstance(encoder, AudioTowerSpec):
        return _audio_facts(encoder)
    if isinstance(encoder, AudioEncoderSpec):
        try:
            read_sound_input(checkpoint)
        except CheckpointError as error:
            _refuse("sound", error, checkpoint)
            return None
        return _encoder_facts(encoder, spec.hidden_size)
    try:
        pixels = read_image_input(checkpoint)
    except CheckpointError as error:
        _refuse("image", error, checkpoint)
        return None
    return None if pixels is None else _vision_facts(encoder, pixels, spec)


def _refuse(kind: MediaKind, error: CheckpointError, checkpoint: Checkpoint) -> None:
    """Log that the model takes none of a kind of media, or raise the error if the user named the encoder's file."""
    if checkpoint.media is not None and not checkpoint.media.is_beside:
        raise error
    logger.warning("this model takes no %ss: %s", kind, error)


def _vision_facts(tower: TowerSpec, pixels: ImageInput, spec: ModelSpec) -> TowerFacts:
    side = tower.side or pixels.size
    area = max(pixels.max_pixels, pixels.tile_size**2) if tower.side is None and pixels.max_pixels else side**2
    most = max(area // tower.patch.size**2, tower.merge**2)
    if tower.side is None and pixels.max_tokens:
        most = pixels.max_tokens * tower.merge**2
    activations = [part.activation_sizes for part in tower.layers[0].parts]
    hidden = tower.hidden_size
    return TowerFacts(
        num_layers=len(tower.layers),
        patch_pixels=tower.patch.size,
        layer_elements=_layer_elements(tower),
        hidden_size=hidden,
        num_parameters=_sizes(tower).num_parameters + hidden * 3 * tower.patch.size**2,
        feature_elements=spec.hidden_size * (1 + len(tower.taps)),
        early_elements=spec.hidden_size * len(tower.taps),
        activation_sizes=ActivationSizes(
            3 * hidden + sum(part.native for part in activations),
            3 * hidden + sum(part.reference for part in activations),
            max(hidden, *(part.widest for part in activations)),
        ),
        max_tokens=most // tower.merge**2,
        max_patches=most if tower.class_token is None else most + 1,
        attends_within=any(isinstance(mixer, AttentionSpec) and mixer.joins_images for mixer in spec.mixers),
        rope_axes=any(rope.axes for rope in spec.ropes),
    )


def _audio_facts(tower: AudioTowerSpec) -> TowerFacts:
    hidden = tower.hidden_size
    places = blocks_of_window(tower.num_positions) * WINDOW_BLOCK
    keys = 2 * sum(reader.hidden_size for _, reader in tower.readers)
    features = -(-places * keys // tower.num_positions)
    return TowerFacts(
        num_layers=len(tower.layers) + len(tower.readers),
        patch_pixels=tower.num_frames // tower.num_positions,
        patch_height=tower.num_mels,
        layer_elements=_layer_elements(tower),
        hidden_size=hidden,
        num_parameters=_sizes(tower).num_parameters,
        feature_elements=features,
        early_elements=features,  # a window has its place from the first layer on
        activation_sizes=_audio_activations(tower),
        max_tokens=tower.num_positions,
        max_patches=tower.num_positions,
        is_attended=True,
        pixel_bytes=_FLOAT_BYTES,
    )


def _encoder_facts(encoder: AudioEncoderSpec, text_size: int) -> TowerFacts:
    most = encoder.num_positions
    frames = encoder.spectrogram.chunk * most // encoder.num_places if encoder.spectrogram is not None else 0
    return TowerFacts(
        num_layers=len(encoder.layers),
        patch_pixels=encoder.stride,
        patch_height=encoder.num_mels,
        layer_elements=_layer_elements(encoder),
        hidden_size=encoder.hidden_size,
        num_parameters=_sizes(encoder).num_parameters,
        feature_elements=text_size,
        activation_sizes=_audio_activations(encoder),
        max_tokens=most // encoder.group,
        max_patches=max(most + -(-encoder.margin // encoder.stride), -(-frames // encoder.stride)),
        pixel_bytes=_FLOAT_BYTES,
    )


def _layer_elements(tower: MediaEncoderSpec) -> int:
    return sum(matrix.rows * matrix.columns for matrix in _layer_sizes(tower.layers[0]).matrices)


def _audio_activations(tower: AudioTowerSpec | AudioEncoderSpec) -> ActivationSizes:
    """Per position, in the convolutions or in a layer."""
    hidden, activations = tower.hidden_size, [part.activation_sizes for part in tower.layers[0].parts]
    if isinstance(tower, AudioEncoderSpec) and tower.spectrogram is not None:
        begin = _spectrogram_elements(tower, tower.spectrogram) // tower.num_positions + 1
    else:
        begin = max(3 * convolution.in_size * hidden // convolution.out_size for convolution in tower.convolutions)
    return ActivationSizes(
        3 * hidden + 2 * begin + sum(part.native for part in activations),
        3 * hidden + 2 * begin + sum(part.reference for part in activations),
        max(begin, *(part.widest for part in activations)),
    )


def _spectrogram_elements(encoder: AudioEncoderSpec, spec: SpectrogramSpec) -> int:
    """Elements of the rows of neighbourhoods of a chunk, in the largest convolution, the second."""
    return 9 * spec.channels * -(-spec.chunk // 4) * -(-encoder.num_mels // 4)


@lru_cache(maxsize=4)
def _sizes(tower: MediaEncoderSpec) -> WeightSizes:
    recorder = SizeRecorder()
    if isinstance(tower, AudioTowerSpec):
        AudioTower(tower, recorder)
    elif isinstance(tower, AudioEncoderSpec):
        AudioEncoder(tower, recorder)
    else:
        Tower(tower, None, recorder)
    return recorder.sizes


def _layer_sizes(layer: LayerSpec) -> WeightSizes:
    recorder = SizeRecorder()
    for part in layer.parts:
        part.build(recorder)
    return recorder.sizes
