"""A chat's model in this process."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.api.sampling_params import SamplingParams
from penstock.api.tools import NO_TOOLS
from penstock.cli.chat.backend import Ending, Setting, StreamItem, Usage
from penstock.cli.chat.settings import EFFORT, settings_of, with_settings
from penstock.cli.flags import check_model, fill_sampling, only_adapter, open_llm, sampling_params
from penstock.errors import InvalidRequestError
from penstock.frontend.input_processor import ImagePrompt
from penstock.parsers.conversation import ChatFormat, Parsers, constrain, format_of
from penstock.parsers.parts import Reasoning, Text


class LocalBackend:
    """An `LLM`, loaded with the command's flags."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._adapter = only_adapter(args)
        sampling_params(args)  # refused before the model is loaded
        self._load(args)

    @property
    def model(self) -> str:
        return self._llm.model_name

    @property
    def settings(self) -> dict[str, Setting]:
        return settings_of(self._params)

    def models(self) -> list[str]:
        return [self.model]

    def select(self, model: str) -> None:
        chosen = argparse.Namespace(**{**vars(self._args), "model": model})
        check_model(chosen, chats=True)
        self._llm.close()  # first: both may not fit in memory
        try:
            self._load(chosen)
        except BaseException:
            self._load(self._args)
            raise
        self._args = chosen

    def stream(self, messages: Sequence[Mapping[str, Any]], settings: Mapping[str, Setting]) -> Iterator[StreamItem]:
        tokenizer = self._llm.tokenizer
        assert tokenizer is not None, "open_llm refuses a model without a chat template"
        known = format_of(tokenizer.chat_template_source)
        prompt = self._llm.chat_prompt(messages, **_template_variables(known, settings))
        params = constrain(with_settings(self._params, settings), known, tokenizer, prompt.token_ids, NO_TOOLS)
        return self._parsed(prompt, params, Parsers(known, tokenizer, prompt.token_ids, NO_TOOLS))

    def close(self) -> None:
        self._llm.close()

    def _load(self, args: argparse.Namespace) -> None:
        self._llm = open_llm(args, chats=True)
        self._params = fill_sampling(sampling_params(args), self._llm)

    def _parsed(self, prompt: ImagePrompt, params: SamplingParams, parsers: Parsers) -> Iterator[StreamItem]:
        num_tokens = 0
        for delta in self._llm.stream(prompt, params, adapter=self._adapter):
            num_tokens += len(delta.token_ids)
            yield Usage(len(prompt.token_ids), num_tokens)
            yield from (piece for piece in parsers.feed_text(delta) if isinstance(piece, (Reasoning, Text)))
            if delta.finish_reason is not None:
                yield Ending(delta.finish_reason, delta.error)


def _template_variables(known: ChatFormat, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The chat template's variables for the reasoning effort.

    Raises:
        InvalidRequestError: the model has no such control.
    """
    if EFFORT not in settings:
        return {}
    variables = known.effort(str(settings[EFFORT]))
    if variables is None:
        raise InvalidRequestError(f"{EFFORT} has no effect on this model: /set {EFFORT} default removes it", EFFORT)
    return variables
