"""The keywords of `LLM`, generated from `EngineConfig` by `python -m tools.llm_options`; do not edit."""

from typing import Literal

from typing_extensions import TypedDict


class LLMOptions(TypedDict, total=False):
    """The options of an engine, but for its model."""

    task: Literal["auto", "generate", "embed", "score"]
    """task of the model: generate text, embed texts, or score documents against a query (as Qwen3-Reranker does);
    auto: from its folder and architecture"""
    revision: str | None
    """branch, tag or commit of the model's hub repository; default: its main branch"""
    mmproj: str | None
    """vision tower or audio encoder of a GGUF model (llama.cpp's mmproj file); default: the one beside it, if any"""
    chat_template: str | None
    """file with a Jinja chat template, or the template itself; default: the model's own"""
    hf_overrides: str | None
    """JSON object of settings that replace those of the model's config.json, as {"rope_scaling": {"rope_type":
    "yarn", "factor": 4.0}}"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    """type of weights and arithmetic; auto: the checkpoint's; float16 on CPUs: of weights alone, with arithmetic in
    float32"""
    device: str
    """cpu, cuda or cuda:N, which need PyTorch; auto: cuda if available"""
    quantization: Literal["int8", "int4"] | None
    """quantize the weights while loading; default: as stored in the checkpoint"""
    packed_cache: str
    """folder that caches packed weights, which later starts map; auto: penstock/packed in the user's cache folder
    (~/.cache), of up to a quarter of the free disk space and 64 GiB; off: no cache; `penstock cache` lists and
    empties it"""
    max_model_len: int | None
    """maximum tokens of prompt and answer together; default: the model's"""
    seed: int | None
    """makes requests without a seed reproducible: theirs follow from this one and their order"""
    threads: int | None
    """CPU threads of the engine; default: one per physical core"""
    tensor_parallel_size: int
    """processes that the model is split over, each with some rows of every matrix: one per GPU, or on the CPU each
    with its share of the threads; answers stay the same, bit for bit"""
    backend: Literal["penstock", "transformers"]
    """what computes the model; transformers: its class of that library (the extra transformers), for architectures
    that Penstock lacks: slower, and an answer may depend on its batch"""
    block_size: int | None
    """tokens per KV block; default: 32 on the CPU, 16 on a GPU"""
    kv_cache_memory: str | int
    """bytes for the KV cache, including a draft model's (8589934592, 8GiB, 512MiB), or auto"""
    max_memory: str | int | None
    """bytes for weights, KV cache and workspace together; default: the free memory, shared by a server's engines"""
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"]
    """type of cached keys and values; auto: int8 with quantization, on a CPU with native kernels and without
    multi-head latent attention; for quantized GGUF files bfloat16 on CPUs with native bfloat16 instructions, else
    float16; otherwise the model's; int8: half the size of 16 bits, with a scale per token and head, and queries are
    quantized as well"""
    enable_prefix_caching: bool
    """reuse the computed blocks of common prompt prefixes"""
    kv_disk: str | None
    """PATH or PATH:SIZE (cache.kv:20GiB; default size: 10GiB) of a file that keeps computed blocks, also for the
    next start; each engine has its own file: PATH, PATH.1, ..."""
    max_num_seqs: int | None
    """maximum sequences that run together; default: 64 on the CPU, 256 on a GPU, or as many as have room for their
    recurrent states in half of the KV cache"""
    max_num_batched_tokens: int | None
    """maximum tokens computed in a step; default: on the CPU 512, or 256 with one thread; on a GPU 8192; of an
    encoder 1024"""
    policy: Literal["fair", "fcfs", "priority"]
    """order of the queue: fair shares tokens between API keys, and orders each key's requests by priority and
    arrival; fcfs: first come, first served; priority: by priority alone"""
    max_batch_prefill_tokens: int | None
    """(TGI compatibility) maximum prompt tokens computed in a step"""
    max_batch_total_tokens: int | None
    """(TGI compatibility) maximum sum of prompt tokens and max_tokens over all running sequences"""
    waiting_served_ratio: float | None
    """(TGI compatibility) while a batch runs, admit requests only if they are at least this share of the running
    ones"""
    max_waiting_tokens: int | None
    """(TGI compatibility) steps without an admission after which the ratio no longer applies; default: 20"""
    speculation: Literal["ngram", "draft", "mtp"] | None
    """draft the next tokens whenever that is faster: ngram looks them up in the text so far, draft uses a small
    model, mtp the model's own multi-token prediction head"""
    speculative_model: str | None
    """the draft model, named like --model, with the same vocabulary; implies --speculation draft"""
    num_speculative_tokens: int | None
    """maximum drafted tokens per sequence and step; default: 16, with mtp 3"""
    adapter: str | None
    """name=PATH of an adapter: a folder saved by PEFT, a GGUF file or a hub id; requests select it as their model;
    may be given several times, or several separated by commas"""
    adapter_memory: str | int
    """bytes for adapters; the least recently used are evicted; auto: the size of those given with --adapter, so that
    without any none can be loaded later"""
    media: bool
    """take images and sounds, if the model does; --no-media loads the language model alone, without encoders"""
    images: bool
    """take images, if the model has a vision tower; --no-images saves the tower's memory"""
    max_images: int
    """maximum images of a request"""
    max_image_bytes: int
    """maximum size of an image, as a file"""
    max_image_pixels: int
    """maximum pixels of an image, by its header, before it is resized"""
    max_image_tokens: int | None
    """maximum tokens of an image, where the family lets its size choose them: larger ones are resized to it;
    default: the checkpoint's own, but no more than 4096"""
    image_cache_bytes: int
    """memory for the latest resized images, or features of sounds, which later turns of a conversation send again;
    0: none"""
    sounds: bool
    """take sounds, if the model has an audio encoder for prompts; --no-sounds saves the encoder's memory"""
    max_audio_bytes: int
    """maximum size of a sound, as a file"""
    max_audio_seconds: int
    """maximum length of a sound, at most 7200"""
    max_sounds: int
    """maximum sounds of a request"""
