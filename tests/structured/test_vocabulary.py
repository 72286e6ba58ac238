from array import array

import pytest

from penstock.api.sampling_params import Structured
from penstock.checkpoint.checkpoint import resolve_path
from penstock.structured.grammar import compile_grammar
from penstock.structured.matcher import Matcher
from penstock.structured.vocabulary import Vocabulary
from penstock.text.tokenizer import Tokenizer
from tests.structured.answers import mask
from tests.support.tokenizers_for_tests import KINDS, write_tokenizer


@pytest.fixture(scope="module", params=[*KINDS, "demo"])
def any_tokenizer(request, tmp_path_factory):
    if request.param == "demo":
        return Tokenizer.from_path(resolve_path(None))
    return Tokenizer.from_path(write_tokenizer(tmp_path_factory.mktemp(request.param), KINDS[request.param]()))


def test_a_tokens_bytes_are_what_it_adds_to_a_text(any_tokenizer):
    (before,) = any_tokenizer.encode("a", add_special_tokens=False)[-1:]
    start = any_tokenizer.decode([before])
    for token in range(any_tokenizer.vocab_size):
        text = any_tokenizer.decode([before, token])[len(start) :]
        if any_tokenizer.is_shown(token) and "\ufffd" not in text:
            assert any_tokenizer.token_bytes(token) == text.encode(), token


def test_parts_of_characters_are_their_bytes(any_tokenizer):
    for text in ("ü", "日", "🚀"):
        whole = b"".join(any_tokenizer.token_bytes(token) for token in any_tokenizer.encode("x" + text + "x"))
        assert text.encode() in whole


def test_special_tokens_and_ids_without_a_text_are_allowed_nowhere(any_tokenizer):
    vocabulary = Vocabulary(any_tokenizer, any_tokenizer.vocab_size + 70)
    matcher = Matcher(compile_grammar(vocabulary, Structured.regex(r"(?s:.*)")))
    tokens, may_end = mask(matcher, vocabulary)
    assert may_end
    assert all(any_tokenizer.is_shown(token) for token in tokens)
    assert max(tokens) < any_tokenizer.vocab_size
    assert set(any_tokenizer.encode("hello", add_special_tokens=False)) <= set(tokens)


def test_a_character_may_come_byte_by_byte_but_never_in_part(any_tokenizer):
    vocabulary = Vocabulary(any_tokenizer, any_tokenizer.vocab_size)
    single = {
        any_tokenizer.token_bytes(token): token for token in range(vocabulary.size) if any_tokenizer.is_shown(token)
    }
    matcher = Matcher(compile_grammar(vocabulary, Structured.regex(r"[^ -~]")))
    answer = array("i")
    for byte in "日".encode():
        assert matcher.follow(answer)
        tokens, may_end = mask(matcher, vocabulary)
        assert not may_end
        assert single[bytes([byte])] in tokens
        answer.append(single[bytes([byte])])
    assert matcher.follow(answer)
    assert mask(matcher, vocabulary) == ([], True)


def test_a_grammar_may_name_a_special_token(any_tokenizer):
    special = next(token for token in range(any_tokenizer.vocab_size) if not any_tokenizer.is_shown(token))
    vocabulary = Vocabulary(any_tokenizer, any_tokenizer.vocab_size)
    matcher = Matcher(compile_grammar(vocabulary, Structured.grammar(f'start: <[{special}]> "a"')))
    assert mask(matcher, vocabulary) == ([special], False)
