"""Answers of a grammar: whether a text is one, and random ones."""

from array import array

import numpy as np

from penstock.structured.grammar import compile_grammar
from penstock.structured.matcher import Matcher


def mask(matcher, vocabulary):
    """The tokens that may come next, and whether the answer may end."""
    row = np.zeros((vocabulary.size + 32) // 32, dtype=np.uint32)
    may_end = matcher.allowed(row, vocabulary.size)
    return np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist(), may_end


def follows(vocabulary, structured, tokens):
    """Whether tokens are a whole answer; None if they are the beginning of one."""
    matcher = Matcher(compile_grammar(vocabulary, structured))
    for end in range(len(tokens)):
        allowed, _ = mask(matcher, vocabulary)
        if tokens[end] not in allowed or not matcher.follow(array("i", tokens[: end + 1])):
            return False
    return True if mask(matcher, vocabulary)[1] else None


def accepts(vocabulary, tokenizer, structured, text):
    """Whether a text is a whole answer."""
    return follows(vocabulary, structured, tokenizer.encode(text, add_special_tokens=False)) is True


def random_answer(grammar, vocabulary, dice, most=300):
    """Tokens of a random walk through a grammar to its end, or of its beginning."""
    matcher, answer = Matcher(grammar), array("i")
    while len(answer) < most:
        assert matcher.follow(answer)
        tokens, may_end = mask(matcher, vocabulary)
        if not tokens:
            assert may_end
            return answer
        answer.append(dice.choice(tokens))
    return answer


def finished(grammar, vocabulary, dice, most=250):
    """The tokens of a random answer that leans to its end; None if it has none in time."""
    matcher, answer = Matcher(grammar), array("i")
    while len(answer) < most:
        assert matcher.follow(answer)
        tokens, may_end = mask(matcher, vocabulary)
        if may_end and (not tokens or dice.random() < 0.5):
            return answer
        if not tokens:
            return None  # all keys or items that were left are used up
        ends = [token for token in tokens if vocabulary.pieces.texts[token][:1] in (b'"', b"}", b"]", b",")]
        answer.append(dice.choice(ends if ends and dice.random() < 0.4 else tokens))
    return None
