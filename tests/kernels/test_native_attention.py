"""The native kernels between projection and projection: against the reference, and against themselves bit for bit."""

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import native
from penstock.kernels.attention import AttentionOptions, CacheShape, HeadNorms, RopeOptions
from penstock.kernels.attention.native import PackedCache, can_pack
from penstock.kernels.attention.reference import hadamard, hadamard_size, to_int8
from tests.kernels.paged import Features, Sequences, Shape, random_division

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built")

TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.int8: 6e-2}
TYPES = [
    *((torch.float32, cache_dtype) for cache_dtype in TOLERANCE),
    *((torch.bfloat16, cache_dtype) for cache_dtype in (torch.bfloat16, torch.int8)),
]
"""Of queries and cache. Products of pairs of bfloat16 have a way of their own."""
SHAPES = [
    Shape(4, 2, 64, 32),
    Shape(6, 2, 96, 16),
    Shape(3, 1, 128, 32),
    Shape(2, 2, 256, 64),
    Shape(16, 1, 16, 4),
    Shape(20, 1, 576, 32),
    Shape(6, 3, 20, 6),
    Shape(2, 1, 12, 2),
]
WINDOWS = [None, 1, 37, 600]
UNUSUAL = Features(0.5, interleaved=True, gated=True, factors=True, sinks=True, norms=torch.float32)
NORMED_LAST = Features(0.5, norms=torch.float32, norm_last=True)
BIASED = Features(None, biased=True)
LATENT = Features(0.25, interleaved=True, latent=True)
SHARING = Features(norms=torch.float32, value_norm=True, values_are_keys=True, chunk=60)


def of_types(shape: Shape, dtype: torch.dtype, cache_dtype: torch.dtype) -> Shape:
    return Shape(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, dtype, cache_dtype)


def assert_near(got: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    """Hold the typical error to half the tolerance, and any single one to twice.

    Where both round to few bits, a sum that falls on the other side of a step moves one element by a whole step: rare
    in one element, and certain to happen in some of 170,000.
    """
    assert (got - wanted).square().mean().sqrt() <= tolerance / 2
    torch.testing.assert_close(got, wanted, atol=2 * tolerance, rtol=2 * tolerance)


def whole(lengths: list[int]) -> list[tuple[int, int, int]]:
    return [(seq, 0, length) for seq, length in enumerate(lengths)]


@settings(max_examples=30, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    cache_dtype=st.sampled_from(list(TOLERANCE)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    lengths=st.lists(st.sampled_from([1, 2, 15, 16, 33, 130, 513]), min_size=1, max_size=4),
    window=st.sampled_from(WINDOWS),
    cap=st.sampled_from([None, 2.0]),
    features=st.builds(
        Features,
        angles=st.sampled_from([1.0, 0.5, None]),
        interleaved=st.booleans(),
        gated=st.booleans(),
        factors=st.booleans(),
        sinks=st.booleans(),
        norms=st.sampled_from([None, torch.float32]),
        value_norm=st.booleans(),
        values_are_keys=st.booleans(),
        chunk=st.sampled_from([None, None, 9, 520]),
        latent=st.booleans(),
        biased=st.booleans(),
    ),
    own_norms=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_ragged_batches_match_the_reference(
    shape: Shape,
    cache_dtype: torch.dtype,
    dtype: torch.dtype,
    lengths: list[int],
    window: int | None,
    cap: float | None,
    features: Features,
    own_norms: bool,
    seed: int,
) -> None:
    shape = of_types(shape, dtype, cache_dtype)
    if own_norms:
        features = replace(features, norms=dtype)
    ours, reference = (Sequences(shape, lengths, packed=p, seed=seed, features=features) for p in (True, False))
    for step in random_division(random.Random(seed), lengths):
        got, wanted = ours.attend(step, window, cap), reference.attend(step, window, cap)
        for seq in wanted:
            assert_near(got[seq].float(), wanted[seq].float(), max(TOLERANCE[dtype], TOLERANCE[cache_dtype]))


@settings(max_examples=20, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    types=st.sampled_from(TYPES),
    lengths=st.lists(st.sampled_from([1, 7, 40, 530, 1100]), min_size=1, max_size=4),
    window=st.sampled_from(WINDOWS),
    features=st.sampled_from([Features(), UNUSUAL, SHARING, NORMED_LAST, LATENT, BIASED]),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_chunks_company_threads_and_what_blocks_held_before(
    shape: Shape,
    types: tuple[torch.dtype, torch.dtype],
    lengths: list[int],
    window: int | None,
    features: Features,
    seed: int,
) -> None:
    def made() -> Sequences:
        return Sequences(of_types(shape, *types), lengths, packed=True, seed=seed, features=features)

    alone = [made().attend([part], window)[part[0]] for part in whole(lengths)]
    sequences = made()
    assert isinstance(sequences.cache, PackedCache)
    sequences.cache.blocks[:] = 255  # in every type but int8 no number
    rng = random.Random(seed)
    outs: dict[int, list[torch.Tensor]] = {seq: [] for seq in range(len(lengths))}
    threads = native.num_threads()
    for step in random_division(rng, lengths):
        native.set_num_threads(rng.randint(1, 3))
        for seq, rows in sequences.attend(step, window).items():
            outs[seq].append(rows)
    native.set_num_threads(threads)
    for seq, expected in enumerate(alone):
        assert torch.equal(torch.cat(outs[seq]).view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_one_long_sequence_with_one_key_head_is_divided_among_threads(threads: int) -> None:
    shape, lengths = Shape(4, 1, 64, 32), [2600]
    prompt = Sequences(shape, lengths, packed=True, seed=1)
    prompt.put([(0, 0, 2599)])
    before = native.num_threads()
    native.set_num_threads(1)
    expected = prompt.attend([(0, 2599, 1)])[0]
    native.set_num_threads(threads)
    divided = prompt.attend([(0, 2599, 1)])[0]
    native.set_num_threads(before)
    assert torch.equal(divided, expected)


@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (16, 1)], ids=str)
def test_decodes_that_share_blocks_get_the_bits_that_each_gets_alone(
    types: tuple[torch.dtype, torch.dtype], window: int | None, heads: tuple[int, int]
) -> None:
    shape, lengths = Shape(*heads, 64, 16, *types), [700, 530, 641, 620, 523, 900, 1100, 40, 513]
    shared = [0, 32, 32, 31, 31, 32, 33, 1, 2]  # blocks, of those of the sequence before
    sequences = Sequences(shape, lengths, packed=True, seed=11)
    for seq, blocks in enumerate(shared):
        sequences.qkv[seq][: blocks * 16] = sequences.qkv[seq - 1][: blocks * 16]
        sequences.tables[seq][:blocks] = sequences.tables[seq - 1][:blocks]
    sequences.put([(seq, 0, length - 1) for seq, length in enumerate(lengths)])
    decodes = [(seq, length - 1, 1) for seq, length in enumerate(lengths)]
    together = sequences.attend(decodes, window)
    for part in decodes:
        assert torch.equal(sequences.attend([part], window)[part[0]], together[part[0]])
    reference = Sequences(shape, lengths, packed=False, seed=11)
    reference.qkv, reference.tables = sequences.qkv, sequences.tables
    reference.put([(seq, 0, length - 1) for seq, length in enumerate(lengths)])
    tolerance = TOLERANCE[types[1]]
    for seq, wanted in reference.attend(decodes, window).items():
        torch.testing.assert_close(together[seq], wanted, atol=tolerance, rtol=tolerance)


def products(cache_dtype: torch.dtype) -> str:
    """How keys and values of a type are multiplied; tiles and vectors sum in different orders."""
    return "by tiles where there are tiles" if cache_dtype in (torch.bfloat16, torch.int8) else "by vectors"


def digests() -> dict[str, str]:
    """What every shape and type of cache gives, as digests of the bits."""
    found = {}
    for shape in SHAPES:
        for types in TYPES:
            for cap, features in ((None, Features(norms=types[0])), (3.0, UNUSUAL), (None, LATENT)):
                lengths = [50, 7, 519]
                sequences = Sequences(of_types(shape, *types), lengths, packed=True, seed=7, features=features)
                outs = sequences.attend(whole(lengths), cap=cap)
                content = b"".join(out.view(torch.int16).numpy().tobytes() for out in outs.values())
                found[f"{products(types[1])}: {shape} {types} {cap} {features.latent}"] = hashlib.sha256(
                    content
                ).hexdigest()
    return found


DIGESTS = """
import json, sys
from penstock import native
from tests.kernels.test_native_attention import digests
library = native.library()
library.set_num_threads(1)
print(json.dumps({name: digests() for name in sys.argv[1:] if library.choose(name)}))
"""
INSTRUCTION_SETS = (*native.INSTRUCTION_SETS, *native.EMULATED_SETS)


@pytest.fixture(scope="module")
def by_instruction_set() -> dict[str, dict[str, str]]:
    """The digests of each set that this machine has, from one process with one thread."""
    environment = {name: value for name, value in os.environ.items() if name != "PENSTOCK_ISA"}
    run = subprocess.run(
        [sys.executable, "-c", DIGESTS, *INSTRUCTION_SETS],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, dict[str, str]] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module")
def own_digests() -> dict[str, str]:
    return digests()


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_bits_of_all_that_multiply_alike(
    by_instruction_set: dict[str, dict[str, str]], own_digests: dict[str, str], isa: str
) -> None:
    if isa not in by_instruction_set:
        pytest.skip(f"the library or this machine does not have {isa}")
    own = native.library()
    assert own is not None
    for other, expected in ((own.instruction_set, own_digests), *by_instruction_set.items()):
        for name, digest in expected.items():
            if name.startswith("by vectors") or isa.startswith("amx") == other.startswith("amx"):
                assert by_instruction_set[isa][name] == digest, (other, name)


@pytest.mark.parametrize(
    ("block_size", "head_dim", "fits"),
    [(32, 64, True), (31, 64, False), (2, 12, True), (32, 66, False), (32, 576, True), (32, 580, False)],
)
def test_what_can_be_packed(block_size: int, head_dim: int, fits: bool) -> None:
    shape = CacheShape(1, block_size, 1, head_dim, torch.bfloat16, torch.device("cpu"), gather_limit=64)
    assert can_pack(shape) == fits


def test_a_sequence_whose_keys_are_no_numbers_spoils_no_other() -> None:
    shape, lengths = Shape(2, 1, 16, 4, torch.bfloat16, torch.bfloat16), [21, 21]
    sequences = Sequences(shape, lengths, packed=True, seed=3)
    healthy = Sequences(shape, lengths, packed=True, seed=3).attend([(1, 0, 21)])[1]
    sequences.qkv[0][:] = float("nan")
    outs = sequences.attend([(0, 0, 21), (1, 0, 21)])
    assert outs[0].isnan().all()
    assert torch.equal(outs[1], healthy)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("cache_dtype", list(TOLERANCE))
def test_one_key_that_is_no_number_is_noticed_by_all_that_see_it(bad: float, cache_dtype: torch.dtype) -> None:
    shape = Shape(2, 1, 16, 4, torch.float32, cache_dtype)
    sequences = Sequences(shape, [600], packed=True, seed=3)
    sequences.put([(0, 0, 599)])
    spoilt = Sequences(shape, [600], packed=True, seed=3)
    spoilt.qkv[0][70] = bad
    spoilt.put([(0, 0, 599)])
    assert sequences.attend([(0, 599, 1)])[0].isfinite().all()
    assert not spoilt.attend([(0, 599, 1)])[0].isfinite().any()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("coarse", [torch.int8, torch.bfloat16])
def test_queries_are_rounded_as_the_keys_that_they_meet(packed: bool, coarse: torch.dtype) -> None:
    def rounded(queries: torch.Tensor) -> torch.Tensor:
        if coarse == torch.bfloat16:
            return queries.bfloat16().float()
        integers, steps = to_int8(hadamard(queries))
        return hadamard(integers * steps.unsqueeze(-1)) / hadamard_size(queries.shape[-1])

    def attend(cache_dtype: torch.dtype, rounding: bool) -> torch.Tensor:
        shape = Shape(4, 2, 64, 16, torch.float32, cache_dtype)
        sequences = Sequences(shape, [40], packed=packed, seed=9)
        query = sequences.put([(0, 0, 40)]).view(40, -1, 64).clone()
        if rounding:
            query[:, :4] = rounded(query[:, :4])
        batch = sequences.batch([(0, 0, 40)])
        return sequences.cache.attend(query.flatten(1), AttentionOptions(4, 1.0), batch)

    def difference(cache_dtype: torch.dtype) -> float:
        return float((attend(cache_dtype, rounding=True) - attend(cache_dtype, rounding=False)).abs().max())

    assert difference(coarse) < 1e-4
    assert difference(torch.float32) > 1e-3


def test_copied_blocks_serve_another_sequence() -> None:
    shape = Shape(2, 1, 16, 4, torch.float32, torch.int8)
    sequences = Sequences(shape, [8, 8], packed=True, seed=5)
    sequences.qkv[1] = sequences.qkv[0]
    expected = sequences.attend([(0, 0, 8)])[0]
    sequences.cache.copy_blocks(list(zip(sequences.tables[0], sequences.tables[1], strict=True)))
    assert torch.equal(sequences.attend([(1, 7, 1)])[1], expected[7:])


@pytest.mark.parametrize("packed", [True, False])
def test_a_sink_takes_its_share_of_the_weights_and_gives_nothing(packed: bool) -> None:
    shape = Shape(4, 2, 16, 4)
    plain = Sequences(shape, [9], packed=packed, seed=3)
    sequences = Sequences(shape, [9], packed=packed, seed=3, features=Features(sinks=True))
    sequences.qkv[0][:, :64] = plain.qkv[0][:, :64] = 0.0  # all scores are 0
    seen = plain.attend([(0, 0, 9)])[0].view(9, 4, 16)
    assert sequences.sinks is not None
    keys = torch.arange(1, 10).view(-1, 1)
    expected = seen * (keys / (keys + sequences.sinks.exp())).unsqueeze(-1)
    torch.testing.assert_close(sequences.attend([(0, 0, 9)])[0].view(9, 4, 16), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sink", [-1e30, 1e30])
def test_a_sink_out_of_all_proportion_takes_nothing_or_all(sink: float) -> None:
    shape = Shape(2, 1, 16, 4)
    plain = Sequences(shape, [9], packed=True, seed=3).attend([(0, 0, 9)])[0]
    sequences = Sequences(shape, [9], packed=True, seed=3, features=Features(sinks=True))
    assert sequences.sinks is not None
    sequences.sinks.fill_(sink)
    seen = sequences.attend([(0, 0, 9)])[0]
    torch.testing.assert_close(seen, plain if sink < 0 else torch.zeros_like(plain), atol=1e-6, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_queries_alone_see_what_another_layer_stored_and_store_nothing(packed: bool) -> None:
    shape = Shape(4, 2, 16, 4)
    sequences = Sequences(shape, [9], packed=packed, seed=3, features=Features(norms=torch.float32))
    whole_step = [(0, 0, 9)]
    expected = sequences.attend(whole_step)[0]
    norms, phases = sequences.norms, sequences.angles
    assert norms is not None
    batch, angles = sequences.batch(whole_step), torch.stack((phases.cos(), phases.sin()), 1)
    alone = sequences.qkv[0][:, :64].contiguous()
    options = RopeOptions(4, HeadNorms(norms.query, None, norms.eps), parts=1)
    query = sequences.cache.rope_and_cache(alone, options, angles, batch)
    for _ in range(2):  # the first did not overwrite what the second sees
        seen = sequences.cache.attend(query, AttentionOptions(4, 16**-0.5), batch)
        torch.testing.assert_close(seen, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_of_a_text_in_pieces_each_is_seen_as_if_it_were_alone(packed: bool, chunk: int) -> None:
    shape, features = Shape(4, 2, 16, 4), Features(angles=None)
    sequences = Sequences(shape, [23], packed=packed, seed=3, features=replace(features, chunk=chunk))
    seen = torch.cat([sequences.attend([part])[0] for part in ((0, 0, 10), (0, 10, 1), (0, 11, 12))])
    for first in range(0, 23, chunk):
        alone = Sequences(shape, [23], packed=packed, seed=3, features=features)
        alone.qkv[0] = alone.qkv[0][first : first + chunk]
        length = len(alone.qkv[0])
        torch.testing.assert_close(seen[first : first + length], alone.attend([(0, 0, length)])[0], atol=1e-5, rtol=0)


def seen_both_ways(sequences: Sequences, seq: int, window: int | None) -> torch.Tensor:
    """By the definition: each query of a whole sequence sees the keys less than `window` away from its own."""
    shape, length = sequences.shape, len(sequences.qkv[seq])
    heads = sequences.qkv[seq].float().view(length, -1, shape.head_dim).transpose(0, 1)
    query, key, value = heads.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads])
    share = shape.num_heads // shape.num_kv_heads
    scores = query @ key.repeat_interleave(share, 0).transpose(1, 2) * shape.head_dim**-0.5
    places = torch.arange(length)
    if window is not None:
        scores = scores.masked_fill((places.unsqueeze(1) - places).abs() >= window, -torch.inf)
    return (scores.softmax(-1) @ value.repeat_interleave(share, 0)).transpose(0, 1).flatten(1)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("window", [None, 1, 9, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_whole_texts_queries_see_what_comes_after_them_too(
    packed: bool, window: int | None, dtype: torch.dtype
) -> None:
    shape, lengths = Shape(4, 2, 16, 4, dtype, dtype), [1, 37, 5, 700, 2]
    features = Features(angles=None, bidirectional=True)
    sequences = Sequences(shape, lengths, packed=packed, seed=3, features=features)
    whole = [(seq, 0, length) for seq, length in enumerate(lengths)]
    seen = sequences.attend(whole, window)
    coarse = 1e-5 if dtype is torch.float32 else 3e-2
    for seq, part in enumerate(whole):
        wanted = seen_both_ways(sequences, seq, window)
        torch.testing.assert_close(seen[seq].float(), wanted, atol=coarse, rtol=coarse)
        if packed:
            assert torch.equal(sequences.attend([part], window)[seq], seen[seq])
