"""Options and how the open ones are settled."""

import json
import re
from dataclasses import replace

import pytest

from penstock.api.request import Image, MediaKind
from penstock.config.byte_counts import GIB, MIB, in_words, parse_bytes
from penstock.config.engine_config import EngineConfig, parse_overrides
from penstock.config.machine import Machine
from penstock.config.model_facts import ActivationSizes, KVSpec, LayerFacts, Matrix, ModelFacts, TowerFacts
from penstock.config.recipes import RECIPES
from penstock.config.settings import Settings, resolve
from penstock.config.weight_formats import FLOAT, FORMATS
from penstock.engine.memory_line import memory_line
from penstock.errors import ConfigError

MATRICES = (Matrix("layers", 32_000, 256, FLOAT), Matrix("lm_head", 4096, 256, FLOAT))
HEAD, LAYERS = 4096 * 256, 32_000 * 256
LAYER = LayerFacts(KVSpec(4, 32), (ActivationSizes(1024, 1024, 256), ActivationSizes(688, 2064, 688)))
FACTS = ModelFacts(
    name="tiny",
    dtype="bfloat16",
    num_parameters=LAYERS + HEAD + 1_000_000,
    max_position=2048,
    vocab_size=1000,
    hidden_size=256,
    layers=(LAYER,) * 4,
    rotary_dim=32,
    matrices=MATRICES,
)
CPU = Machine(device="cpu", cores=2, memory=8 * GIB)


def settled(facts: ModelFacts = FACTS, machine: Machine = CPU, **options: object) -> Settings:
    return resolve(EngineConfig.from_options(**options), facts, machine)


def test_nothing_is_left_open() -> None:
    settings = settled()
    assert (settings.dtype, settings.kv_cache_dtype, settings.threads) == ("bfloat16", "bfloat16", 2)
    assert settings.max_model_len == 2048
    assert settings.admission is None
    assert settings.memory.num_tokens >= settings.max_model_len


def test_text_is_parsed_as_on_the_command_line() -> None:
    given = EngineConfig.from_options(
        max_num_seqs="8", enable_prefix_caching="false", kv_cache_memory="1GiB", seed="none", waiting_served_ratio="1.5"
    )
    assert given.scheduler.max_num_seqs == 8
    assert given.cache.enable_prefix_caching is False
    assert given.model.seed is None
    assert given.scheduler.waiting_served_ratio == 1.5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_num_seq": 8}, "did you mean 'max_num_seqs'"),
        ({"nonsense_xyz": 8}, "known are"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be a whole number"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be a whole number"),
        ({"max_num_seqs": True}, "max_num_seqs must be a whole number"),
        ({"enable_prefix_caching": "perhaps"}, "must be true or false"),
        ({"dtype": "float8"}, "must be one of auto, float32, bfloat16, float16"),
        ({"quantization": "int3"}, "must be one of int8, int4; not 'int3'"),
        ({"policy": "lifo"}, "must be one of fair, fcfs, priority"),
        ({"policy": None}, "must be one of fair, fcfs, priority; not None"),
        ({"max_model_len": 1, "enable_prefix_caching": "none"}, "must be true or false, not 'none'"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
        ({"seed": 2**64}, "seed must be from 0 to 18446744073709551615, not 18446744073709551616"),
        ({"seed": "-1"}, "seed must be from 0 to 18446744073709551615, not -1"),
        ({"threads": 100_000}, "threads must be at most 1024"),
        ({"max_audio_seconds": 7201}, "max_audio_seconds must be at most 7200, not 7201"),
        ({"max_model_len": 4096}, "from 1 to 2048"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 32}, "raise the first or lower the second"),
        ({"kv_cache_memory": "1TB"}, "not a number of bytes"),
        ({"kv_cache_memory": "100GiB"}, "does not fit"),
        ({"kv_cache_memory": "1KiB"}, "no KV block .* kv_cache_memory is .*: raise it; or lower max_model_len"),
        ({"kv_cache_memory": "64KiB", "max_model_len": 2048}, "does not fit the KV cache"),
        ({"max_batch_total_tokens": 100}, "could never be admitted"),
        ({"waiting_served_ratio": -1.0}, "at least 0"),
        ({"max_batch_prefill_tokens": 0}, "at least 1"),
        ({"speculation": "eagle"}, "must be one of ngram, draft"),
        ({"speculation": "draft"}, "set speculative_model"),
        ({"speculation": "ngram", "speculative_model": "small"}, "leave one of the two out"),
        ({"speculation": "ngram", "num_speculative_tokens": 0}, "at least 1"),
        ({"num_speculative_tokens": 4}, "has no effect without speculation"),
        ({"packed_cache": ""}, "auto, off or a folder"),
        ({"packed_cache": "~nobody-of-this-name/x"}, "auto, off or a folder"),
    ],
)
def test_what_cannot_work_is_refused_with_words_that_help(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settled(**options)


def test_one_thread_has_smaller_steps_by_default():
    budgets = [resolve(EngineConfig.from_options(threads=threads), FACTS, CPU) for threads in (1, 2, 8)]
    assert [settings.max_num_batched_tokens for settings in budgets] == [256, 512, 512]


def test_a_context_that_was_not_asked_for_shrinks_to_what_the_pool_holds() -> None:
    block = 2 * 4 * 4 * 32 * 2 * 32
    settings = settled(kv_cache_memory=10 * block)
    assert settings.max_model_len == 320 == settings.memory.num_tokens


def test_under_little_memory_the_pool_shrinks_and_the_plan_stays_within_it() -> None:
    machine = replace(CPU, memory=200 * MIB)
    memory = settled(machine=machine).memory
    assert memory.weights + memory.kv_cache + memory.workspace <= machine.memory
    assert memory.num_blocks < settled().memory.num_blocks


def test_max_memory_bounds_the_plan_and_is_no_more_than_there_is() -> None:
    machine = replace(CPU, memory=200 * MIB)
    assert settled(max_memory="200MiB").memory == settled(machine=machine).memory
    assert settled(max_memory=10**15, machine=machine).memory == settled(machine=machine).memory


def test_the_plan_says_where_the_bytes_go() -> None:
    words = memory_line(settled(kv_cache_memory="64MiB", block_size=16).memory)
    assert re.fullmatch(
        r"Memory: [\d.]+ MiB weights \+ up to 64 MiB KV cache \(room for [\d,]+ tokens, filled on demand; "
        r"--kv-cache-memory\) \+ [\d.]+ MiB workspace",
        words,
    )
    assert memory_line(settled().memory, device="cuda", ranks=2).startswith("Memory of each of 2 ranks: ")
    assert "on demand" not in memory_line(settled().memory, device="cuda")


TOWER = TowerFacts(  # Gemma 3's at a fourth of its width
    num_layers=27,
    patch_pixels=14,
    layer_elements=1_000_000,
    hidden_size=288,
    num_parameters=30_000_000,
    feature_elements=256,
    activation_sizes=ActivationSizes(1728, 1728, 1076),
    max_tokens=256,
    max_patches=4096,
)


def test_a_vision_tower_and_the_features_of_two_images_are_in_the_plan() -> None:
    text, settings = settled(), settled(replace(FACTS, towers={"image": TOWER}))
    plan, images = settings.memory, settings.images
    assert text.images is None
    assert images is not None
    assert plan.towers == 30_000_000 * 65 // 32
    assert plan.image_features == images.feature_bytes >= 2 * 4096 * 288 * 2
    assert plan.workspace >= text.memory.workspace + 4096 * (1728 + 4 * 288) * 2
    assert "58.1 MiB vision tower + 64 MiB image features + " in memory_line(plan)
    little = settled(replace(FACTS, towers={"image": TOWER}), replace(CPU, memory=300 * MIB)).memory
    planned = little.weights + little.kv_cache + little.workspace + little.towers + little.image_features
    assert planned + little.image_pixels == little.num_bytes <= 300 * MIB
    assert little.image_pixels == 300 * MIB // 32 >= 2 * 4096 * 14 * 14 * 3
    assert f"{in_words(plan.image_pixels)} images of requests" in memory_line(plan)
    tapped = settled(
        replace(FACTS, towers={"image": replace(TOWER, feature_elements=4 * 256, early_elements=3 * 256)})
    ).images
    assert tapped is not None
    picture = Image(0, 256, 16, 16, 896, 896, b"", b"")
    assert tapped.image_bytes(picture) == (4096 * 288 + 3 * 256 * 256) * 2  # its stream beside what its layers added
    assert images.token_elements == LAYERS + HEAD
    assert images.layer_tokens(picture) == -(-4096 * (1_000_000 + 2 * 4096 * 288) // (LAYERS + HEAD))


def test_a_machine_that_is_too_small_is_told_which_encoder_takes_how_much() -> None:
    encoders: dict[MediaKind, str] = {"image": "the vision tower and images", "sound": "the audio encoder and sounds"}
    for kind, words in encoders.items():
        with pytest.raises(ConfigError, match=words):
            settled(replace(FACTS, towers={kind: TOWER}), replace(CPU, memory=60 * MIB))
    with pytest.raises(ConfigError, match="the vision tower and audio encoder and images and sounds"):
        settled(replace(FACTS, towers={"image": TOWER, "sound": TOWER}), replace(CPU, memory=60 * MIB))


def test_two_encoders_share_a_budget_of_features_and_have_weights_and_workspace_of_their_own() -> None:
    small = replace(TOWER, num_parameters=10_000_000, max_patches=1024, pixel_bytes=4)
    text, one, both = (
        settled(replace(FACTS, towers=towers)).memory
        for towers in ({}, {"image": TOWER}, {"image": TOWER, "sound": small})
    )
    assert both.towers == one.towers + 10_000_000 * 65 // 32
    assert both.workspace - one.workspace == (one.workspace - text.workspace) // 4
    assert (both.image_features, both.image_pixels) == (one.image_features, one.image_pixels)
    assert "vision tower and audio encoder + 64 MiB image and sound features + " in memory_line(both)
    assert f"{in_words(both.image_pixels)} images and sounds of requests" in memory_line(both)


def test_images_that_attend_within_fit_a_step_beside_a_token_of_each_sequence() -> None:
    facts = replace(FACTS, towers={"image": replace(TOWER, attends_within=True, max_tokens=600)})
    assert settled(facts).max_num_batched_tokens == 664
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(512\) is below 664: an image takes up to 600"):
        settled(facts, max_num_batched_tokens=512)
    with pytest.raises(ConfigError, match=r"max_batch_prefill_tokens \(512\) is below 600"):
        settled(facts, max_batch_prefill_tokens=512)


def test_quantized_weights_take_what_the_kernels_pack_them_into() -> None:
    packing = replace(CPU, native=True)
    planned = {kind: settled(machine=packing, quantization=kind).memory.weights for kind in ("none", "int8", "int4")}
    assert planned["none"] == (LAYERS + HEAD) * 65 // 32 + 2_000_000
    for recipe, head_bytes in (("int8", HEAD * 65 // 32), ("int4", FORMATS["int5"].packed_bytes(4096, 256))):
        layers = RECIPES[recipe].format_of(MATRICES[0].name)
        assert planned[recipe] == layers.packed_bytes(32_000, 256) + head_bytes + 2_000_000
    multiplies_bfloat16 = replace(CPU, native=True, multiplies_bfloat16=True)
    assert settled(machine=multiplies_bfloat16).memory.weights == int((LAYERS + HEAD) * 1.52) + 2_000_000
    in_float16 = settled(machine=multiplies_bfloat16, dtype="float16").memory.weights  # other parameters in float32
    assert in_float16 == planned["none"] + 2_000_000
    on_gpu = settled(machine=Machine(device="cuda", cores=2, memory=8 * GIB))
    assert on_gpu.memory.weights == 2 * (LAYERS + HEAD) + 2_000_000


def test_each_matrix_is_planned_in_the_format_that_it_is_stored_in() -> None:
    int8 = FORMATS["int8"]
    stored = replace(FACTS, matrices=(replace(MATRICES[0], format=int8), MATRICES[1]), stored_format="int-quantized")
    settings = settled(stored, replace(CPU, native=True))
    assert settings.quantization is None
    assert settings.memory.weights == int8.packed_bytes(32_000, 256) + HEAD * 65 // 32 + 2_000_000


@pytest.mark.parametrize(
    ("name", "bits"),
    [("int8", 8.0625), ("int4", 4.5), ("int4_zero_128", 4.1875), ("q8_0", 8.5), ("q4_k", 4.625), ("int4_wide", 4.75)],
)
def test_a_format_takes_its_values_and_its_share_of_scales(name: str, bits: float) -> None:
    rows, columns = 640, 1024
    row_scales = 4 * rows if FORMATS[name].has_row_scales else 0
    assert FORMATS[name].packed_bytes(rows, columns) == bits * rows * columns / 8 + row_scales


def test_the_cache_is_int8_beside_weights_rounded_for_native_kernels_and_else_of_the_models_type() -> None:
    machine = replace(CPU, native=True)
    for kind in ("int8", "int4"):
        assert settled(FACTS, machine, quantization=kind).kv_cache_dtype == "int8"
        assert settled(FACTS, machine, quantization=kind, kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
        assert settled(FACTS, CPU, quantization=kind).kv_cache_dtype == "bfloat16"
    assert settled(FACTS, machine).kv_cache_dtype == "bfloat16"
    assert settled(FACTS, machine, kv_cache_dtype="int8").kv_cache_dtype == "int8"
    assert settled(replace(FACTS, stored_format="gptq"), machine).kv_cache_dtype == "bfloat16"


def test_where_native_caches_do_not_support_a_blocks_size_all_is_planned_for_the_reference() -> None:
    chosen = settled(machine=replace(CPU, native=True), quantization="int4", block_size=5)
    assert chosen.gap == "attention with heads of 32 elements and blocks of 5 tokens"
    assert replace(chosen, gap="") == settled(machine=replace(CPU, native=False), quantization="int4", block_size=5)


def test_latents_are_not_cached_in_int8_unless_told_so() -> None:
    layer = LayerFacts(KVSpec(1, 576, latent=True), LAYER.activation_sizes)
    facts, machine = replace(FACTS, layers=(layer,) * 4), replace(CPU, native=True)
    assert settled(facts, machine, quantization="int8").kv_cache_dtype == "bfloat16"
    assert settled(facts, machine, quantization="int8", kv_cache_dtype="int8").kv_cache_dtype == "int8"


@pytest.mark.parametrize(("multiplies", "half"), [(True, "bfloat16"), (False, "float16")])
def test_a_model_that_computes_in_float32_may_cache_in_the_16_bits_that_the_machine_is_fast_with(
    multiplies: bool, half: str
) -> None:
    machine = replace(CPU, native=True, multiplies_bfloat16=multiplies)
    facts = replace(FACTS, dtype="float32", halves_kv=True)
    assert settled(facts, machine).kv_cache_dtype == half
    assert settled(facts, machine, kv_cache_dtype="float32").kv_cache_dtype == "float32"


@pytest.mark.parametrize("option", ["auto", "float16"])
@pytest.mark.parametrize(("multiplies", "half"), [(True, "bfloat16"), (False, "float16")])
def test_float16_weights_are_multiplied_with_float32_on_cpus(option: str, multiplies: bool, half: str) -> None:
    machine = replace(CPU, native=True, multiplies_bfloat16=multiplies)
    settings = settled(replace(FACTS, dtype="float16"), machine, dtype=option)
    assert (settings.dtype, settings.float16_weights, settings.kv_cache_dtype) == ("float32", True, half)
    assert settings.memory.weights == (LAYERS + HEAD) * 65 // 32 + 4_000_000
    on_gpu = settled(replace(FACTS, dtype="float16"), Machine(device="cuda", cores=2, memory=8 * GIB))
    assert (on_gpu.dtype, on_gpu.float16_weights, on_gpu.kv_cache_dtype) == ("float16", False, "float16")


def test_weights_that_are_quantized_already_are_not_rounded_again() -> None:
    with pytest.raises(ConfigError, match=r"already quantized \(gptq\): leave the option out"):
        settled(replace(FACTS, stored_format="gptq"), quantization="int8")


def test_samples_of_drafts_are_in_the_workspace() -> None:
    plain, guessing = settled(), settled(speculation="ngram", num_speculative_tokens=5)
    assert guessing.speculation is not None
    assert (guessing.speculation.num_tokens, guessing.speculation.draft) == (5, None)
    assert guessing.memory.workspace - plain.memory.workspace == 5 * 4 * FACTS.vocab_size * 4
    assert plain.speculation is None


def test_a_draft_model_is_in_the_memory_plan_with_as_many_blocks() -> None:
    small = replace(FACTS, name="small", dtype="float32", layers=(LAYER,), num_parameters=7_000_000, matrices=())
    config = EngineConfig.from_options(speculative_model="small", kv_cache_memory="10MiB", quantization="int8")
    settings = resolve(config, FACTS, CPU, small)
    assert settings.speculation is not None
    draft = settings.speculation.draft
    assert draft is not None
    assert (draft.model_name, draft.dtype, draft.quantization, draft.threads) == ("small", "float32", None, 2)
    assert draft.memory is settings.memory.draft
    assert (settings.kv_cache_dtype, draft.kv_cache_dtype) == ("bfloat16", "float32")
    assert draft.memory.num_blocks == settings.memory.num_blocks == 10 * MIB // (2 * (4 * 32 * 2 + 32 * 4) * 4 * 32)
    assert draft.memory.weights == 7_000_000 * 4
    words = memory_line(settings.memory)
    assert words.index("draft model: 26.7 MiB weights") > words.index("room for")


def test_a_draft_model_of_a_shorter_context_asks_for_a_shorter_one() -> None:
    small = replace(FACTS, max_position=512)
    options = {"speculative_model": "small", "kv_cache_memory": "64MiB"}
    with pytest.raises(ConfigError, match="to no more than that"):
        resolve(EngineConfig.from_options(**options), FACTS, CPU, small)
    assert resolve(EngineConfig.from_options(**options, max_model_len=512), FACTS, CPU, small).speculation is not None


def test_tgi_controls_left_open_beside_others_are_neutral() -> None:
    admission = settled(max_batch_total_tokens=4096).admission
    assert admission is not None
    assert (admission.max_batch_prefill_tokens, admission.waiting_served_ratio) == (None, 0.0)
    assert admission.max_waiting_tokens == 20


@pytest.mark.parametrize(
    ("text", "count"), [("123", 123), (123, 123), ("2KiB", 2048), ("1.5 GiB", 3 * GIB // 2), ("7b", 7)]
)
def test_bytes_are_written_as_numbers_or_with_units(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_overrides_are_a_json_object_as_text_or_as_a_dictionary() -> None:
    overrides = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "sliding_window": None}
    for given in (overrides, json.dumps(overrides)):
        model = EngineConfig.from_options(hf_overrides=given).model
        assert parse_overrides(model.hf_overrides) == overrides


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "hf_overrides is not valid JSON"),
        ("[" * 100_000, "hf_overrides is not valid JSON"),
        ("[1]", r"hf_overrides must be a JSON object, as .*, not \[1\]"),
        ({"a": object()}, "hf_overrides must hold what JSON can"),
        (3, "hf_overrides must be a text"),
    ],
)
def test_overrides_that_are_no_json_object_are_refused(given: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_options(hf_overrides=given)


BIG = replace(FACTS, num_parameters=10**10)


@pytest.mark.parametrize(
    ("facts", "memory", "options", "words"),
    [
        (FACTS, GIB, {"max_memory": "10KiB"}, "max_memory is 10 KiB, weights take .*; raise max_memory to more"),
        (FACTS, GIB, {"max_memory": "700"}, "max_memory is 700 bytes, .*; raise max_memory to more than"),
        (
            FACTS,
            GIB,
            {"max_memory": "200MiB", "kv_cache_memory": "500MiB"},
            "max_memory is 200 MiB.*or lower kv_cache_m",
        ),
        (FACTS, GIB, {"kv_cache_memory": "1GiB"}, "1 GiB are free, .*; lower kv_cache_memory to at most"),
        (FACTS, 100 * MIB, {"max_num_batched_tokens": 65536}, "100 MiB are free.*lower max_model_len, max_num_batched"),
        (BIG, GIB, {}, "1 GiB are free.*the weights alone do not fit: take a smaller model"),
        (
            BIG,
            GIB,
            {"max_memory": "1MiB"},
            r"raise max_memory to more than [\d.]+ GiB \(with several engines, run fewer\)$",
        ),
    ],
)
def test_too_little_memory_is_refused_with_the_remedy_that_helps(facts, memory, options, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        resolve(EngineConfig.from_options(**options), facts, replace(CPU, memory=memory))
    assert not re.search(r"\b0(\.0)? (MiB|GiB)", str(caught.value))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (10_240, "10 KiB"), (MIB, "1 MiB")),
        *((96_574_873, "92.1 MiB"), (100 * MIB, "100 MiB"), (8 * GIB, "8 GiB"), (GIB * 5 // 4, "1.25 GiB")),
    ],
)
def test_bytes_are_told_in_the_unit_that_suits(count: int, words: str) -> None:
    assert in_words(count) == words
