import itertools
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from penstock.frontend.output_processor import Detokenizer, StopStrings, StopTable
from penstock.text.chat_template import ChatTemplates
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import CORPUS, KINDS, write_tokenizer

kinds = pytest.mark.parametrize("kind", [*KINDS])


@cache
def tokenizer_of(kind):
    return Tokenizer(KINDS[kind](), ChatTemplates({}, {}))


def pieces_of(tokenizer, ids, prompt=()):
    stream = Detokenizer(tokenizer, prompt)
    return [*(stream.add_token(token) for token in ids), stream.flush()]


UNICODE = (
    st.text(max_size=40)
    | st.text(alphabet="ab 😀👍🏽\u200d👩👧e\u0301żü你好\n\t▁<s>", max_size=40)
    | st.sampled_from(CORPUS)
)


@kinds
@settings(max_examples=200, deadline=None)
@given(prompt=UNICODE, text=UNICODE, special=st.booleans())
def test_the_pieces_of_a_text_are_what_decode_gives(kind, prompt, text, special):
    tokenizer = tokenizer_of(kind)
    before, ids = tokenizer.encode(prompt, special), tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids, before)
    assert "".join(pieces) == tokenizer.decode(before + ids)[len(tokenizer.decode(before)) :]
    if not before:
        assert "".join(pieces) == tokenizer.decode(ids)
    for piece in pieces[:-1]:
        assert "\ufffd" not in piece or "\ufffd" in text


@kinds
@settings(max_examples=100, deadline=None)
@given(text=UNICODE)
def test_the_first_space_is_kept_where_a_form_counts_it(kind, text):
    """Of a prompt that shows nothing, as one of a bos token alone: `decode` would take the space away."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(" " + text, add_special_tokens=False)
    stream = Detokenizer(tokenizer, [tokenizer.special_token("<s>")], keeps_first_space=True)
    pieces = [*(stream.add_token(token) for token in ids), stream.flush()]
    shown = [token for token in ids if tokenizer.is_shown(token)]
    assert "".join(pieces) == b"".join(map(tokenizer.token_bytes, shown)).decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_of_a_byte_level_bpe_give_what_decode_gives(data):
    tokenizer = tokenizer_of("byte_level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 5), max_size=40))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_tokens_of_a_byte_fallback_give_the_text_of_their_bytes(data):
    """Where a run of byte tokens is no UTF-8, `decode` gives up all its bytes, good ones too; we keep the good ones."""
    tokenizer = tokenizer_of("llama2")
    some_byte, space = st.integers(7, 262), tokenizer.backend.token_to_id("<0x20>")  # which no text is encoded with
    anything = (some_byte | st.integers(0, tokenizer.vocab_size + 5)).filter(lambda token: token != space)
    ids = data.draw(st.lists(anything, max_size=40))
    shown = [token for token in ids if tokenizer.is_shown(token)]
    expected = ""
    for is_byte, run in itertools.groupby(shown, lambda token: 7 <= token <= 262):
        expected += b"".join(map(tokenizer.token_bytes, run)).decode("utf-8", "replace" if is_byte else "strict")
    assert "".join(pieces_of(tokenizer, ids)) == expected.removeprefix(" ")


@kinds
def test_a_character_appears_with_its_last_byte(kind):
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("a"), tokenizer.encode("😀", add_special_tokens=False)[-4:]
    nothing = [""] * (len(ids) - 1)
    assert len(nothing) >= 2
    assert pieces_of(tokenizer, ids, prompt) == [*nothing, "😀", ""]
    assert pieces_of(tokenizer, ids[:-1], prompt) == [*nothing, "\ufffd"]


@kinds
def test_special_tokens_leave_no_trace(kind):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("The 😀", add_special_tokens=False)
    mark = tokenizer.backend.token_to_id("<|user|>")
    strewn = [mark, *itertools.chain.from_iterable((token, mark, 10**6) for token in ids)]
    assert "".join(pieces_of(tokenizer, strewn)) == "The 😀"


def test_the_answer_keeps_the_space_between_it_and_the_prompt():
    tokenizer = tokenizer_of("llama2")
    prompt, ids = tokenizer.encode("Hello"), tokenizer.encode("world", add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids, prompt)) == " world"
    assert "".join(pieces_of(tokenizer, ids, [1])) == "world"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.BPEDecoder("</w>")])
def test_decoders_of_other_kinds_give_what_decode_gives(decoder):
    words = ["[UNK]", "play", "##ing", ".", "it</w>", "is", "</w>", "n't"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend, ChatTemplates({}, {}))
    for ids in itertools.product(range(len(words)), repeat=3):
        pieces = pieces_of(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)


@kinds
def test_a_token_costs_the_same_however_long_the_text(kind, tmp_path):
    tokenizer = Tokenizer.from_path(write_tokenizer(tmp_path, KINDS[kind]()))
    ids = tokenizer.encode(CORPUS[2] * 200, add_special_tokens=False)
    stream = Detokenizer(tokenizer, ())

    def cost(tokens):
        begin = time.thread_time()
        for token in tokens:
            stream.add_token(token)
        return time.thread_time() - begin

    parts = [cost(ids[start : start + 500]) for start in range(0, 10_000, 500)]
    assert min(parts[-5:]) < 3 * min(parts[:5])


# --- stop strings ---


def run(strings, pieces, **options):
    """(text shown, stop string) when the text comes in these pieces; what is held back comes out at the end."""
    watch = StopStrings(StopTable(strings))
    shown = []
    for piece in pieces:
        text, stop = watch.add_text(piece, **options)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop
    return "".join(shown) + watch.flush(), None


def first_to_complete(strings, text):
    """The rule itself, by trying each end in turn."""
    for end in range(len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
)
def test_the_string_that_completes_first_ends_the_text_whatever_the_pieces(strings, pieces):
    assert run(strings, pieces) == first_to_complete(strings, "".join(pieces))


@settings(max_examples=300, deadline=None)
@given(
    strings=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
)
def test_what_is_held_back_is_what_might_begin_a_stop_string_and_no_more(strings, pieces):
    watch, shown, seen = StopStrings(StopTable(strings)), "", ""
    for piece in pieces:
        text, stop = watch.add_text(piece)
        if stop is not None:
            return
        shown, seen = shown + text, seen + piece
        beginnings = {s[:n] for s in strings for n in range(1, len(s))}
        held = max((b for b in beginnings if seen.endswith(b)), key=len, default="")
        assert shown + held == seen


def test_a_stop_string_across_pieces_is_never_shown():
    assert run(["</answer>"], ["so", " 7</", "ans", "wer", "> and"]) == ("so 7", "</answer>")
    assert run(["</answer>"], ["so", " 7</", "ans", "wer!"]) == ("so 7</answer!", None)
    assert run(["aab"], ["a", "a", "a", "b"]) == ("a", "aab")


def test_of_several_stop_strings_the_first_in_the_text_wins():
    assert run(["world", "lo", "\n"], ["hello world\n"]) == ("hel", "lo")
    assert run(["c", "abc"], ["xab", "cc"]) == ("x", "abc")


def test_a_stop_string_that_may_not_stop_is_text():
    watch = StopStrings(StopTable(["END"]))
    assert watch.add_text("an END a", may_stop=False) == ("an END a", None)
    assert watch.add_text(" E", may_stop=False) == (" ", None)
    assert watch.add_text("ND", may_stop=True) == ("", "END")


def test_a_long_stop_string_costs_a_text_no_more_than_its_characters():
    watch = StopStrings(StopTable(["a" * 100_000 + "b"] * 16))
    begin = time.thread_time()
    for _ in range(1000):
        watch.add_text("aa")
    watch.add_text("c" * 2000)
    assert time.thread_time() - begin < 2


def test_long_stop_strings_cost_nothing_before_a_text_matches_them():
    begin = time.thread_time()
    table = StopTable(["x" * 4_000_000 + str(i) for i in range(16)])
    for _ in range(128):
        StopStrings(table).add_text("xyxxz")
    assert time.thread_time() - begin < 0.5  # 12 s when each answer had a failure function of its own
