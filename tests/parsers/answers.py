"""Answers of a model whose format's marks are special tokens: whether a grammar permits one, and random ones."""

from array import array
from functools import cache
from random import Random
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock.api.sampling_params import SamplingParams
from penstock.parsers.conversation import FORMATS, ChatFormat, constrain
from penstock.parsers.reasoning import KINDS
from penstock.structured.grammar import compile_grammar
from penstock.structured.matcher import Matcher
from penstock.structured.vocabulary import Vocabulary
from penstock.text.tokenizer import Tokenizer
from tests.structured.answers import follows, mask
from tests.support.schemas import random_schema

MARKS = sorted(
    {mark for tools_format in FORMATS for kind in KINDS for mark in (*tools_format.marks, kind.open, kind.close)}
)


def write_tokenizer(folder):
    """A tokenizer with a special token for each mark of each format, and a token for each byte."""
    tokens = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(f"{folder}/tokenizer.json")


@cache
def vocabulary():
    """That tokenizer and its vocabulary."""
    with TemporaryDirectory() as folder:
        write_tokenizer(folder)
        tokenizer = Tokenizer.from_path(folder)
    return tokenizer, Vocabulary(tokenizer, tokenizer.vocab_size)


def enforced(tools_format, tools, form=None, thinks=None):
    """The grammar of answers in a format; None if any answer is permitted."""
    known = ChatFormat(tools_format, thinks, frozenset())
    return constrain(SamplingParams(structured=form), known, vocabulary()[0], [], tools).structured


def permits(structured, text):
    """Whether a text is an answer by a grammar; None if it could become one."""
    tokenizer, known = vocabulary()
    return follows(known, structured, tokenizer.encode(text, add_special_tokens=False))


def random_parameters(seed):
    """A schema of arguments."""
    schema = random_schema(seed)
    definitions = schema.pop("$defs", {})
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": definitions}


def random_text(structured, seed, most=400):
    """A random answer of a grammar; None if it has not ended after `most` tokens.

    Special tokens and ends come often, as those of a model do; so texts are short.
    """
    tokenizer, known = vocabulary()
    matcher, answer, dice = Matcher(compile_grammar(known, structured)), array("i"), Random(seed)
    while len(answer) < most:
        assert matcher.follow(answer)
        tokens, may_end = mask(matcher, known)
        if may_end and (not tokens or dice.random() < 0.2):
            return tokenizer.decode(list(answer), skip_special_tokens=False)
        special = [token for token in tokens if token < len(MARKS)]
        plain = [token for token in tokens if token >= len(MARKS)]
        answer.append(dice.choice(special if special and (not plain or dice.random() < 0.3) else plain))
    return None
