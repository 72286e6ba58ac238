"""Adds the texts of tokens to log-probabilities in outputs of the Python API; the server formats its own."""

from collections.abc import Sequence
from dataclasses import replace

from penstock.api.request import RequestOutput, TokenLogprob
from penstock.frontend.output_processor import CompletionDelta
from penstock.text.tokenizer import Tokenizer


def output_with_texts(output: RequestOutput, tokenizer: Tokenizer | None) -> RequestOutput:
    """Add the texts to an output's log-probabilities, of prompt and answers."""
    if tokenizer is None:
        return output
    for answer in output.outputs:
        if answer.logprobs is not None:
            answer.logprobs = _with_texts(answer.logprobs, tokenizer)
    if output.prompt_logprobs is not None:
        output.prompt_logprobs = [
            None if entry is None else _with_text(entry, tokenizer) for entry in output.prompt_logprobs
        ]
    return output


def delta_with_texts(delta: CompletionDelta, tokenizer: Tokenizer | None) -> CompletionDelta:
    """Add the texts to a delta's log-probabilities."""
    if tokenizer is None or (delta.logprobs is None and delta.prompt_logprobs is None):
        return delta
    logprobs, prompt = (
        None if given is None else _with_texts(given, tokenizer) for given in (delta.logprobs, delta.prompt_logprobs)
    )
    return replace(delta, logprobs=logprobs, prompt_logprobs=prompt)


def _with_texts(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[TokenLogprob]:
    return [_with_text(entry, tokenizer) for entry in logprobs]


def _with_text(logprob: TokenLogprob, tokenizer: Tokenizer) -> TokenLogprob:
    top_texts = tuple(tokenizer.token_text(token_id) for token_id, _ in logprob.top)
    return replace(logprob, text=tokenizer.token_text(logprob.token_id), top_texts=top_texts)
