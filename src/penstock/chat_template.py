"""A checkpoint's chat templates: messages in, the prompt's text out, rendered as `transformers` renders them.

A template is code from wherever the checkpoint came from, so it runs in Jinja's immutable sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import InvalidRequestError


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders as what it holds."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplates:
    """One checkpoint's templates by name; most have only `default`, some `tool_use` beside it."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            sources: Jinja sources by name.
            special_tokens: variables that every template sees: bos_token, eos_token and so on.
        """
        self._sources = sources
        self._special_tokens = special_tokens
        self._compiled: dict[str, Template] = {}

    @property
    def exist(self) -> bool:
        return bool(self._sources)

    @property
    def source(self) -> str:
        """Jinja, one after the other."""
        return "\n".join(self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt's text.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages; `param` is "messages".
        """
        name = self._choose(has_tools=bool(tools))
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(self._sources[name])
            return self._compiled[name].render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": variables.get("documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except TemplateError as error:  # the template's own words, or Jinja's on a name or a syntax
            raise InvalidRequestError(f"the model's chat template says: {error}", "messages") from error
        except Exception as error:  # a template is a program: on messages of another shape it may fail in any way
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {type(error).__name__}: {error}", "messages"
            ) from error

    def _choose(self, has_tools: bool) -> str:
        if has_tools and "tool_use" in self._sources:
            return "tool_use"
        if "default" in self._sources:
            return "default"
        if not self._sources:
            raise InvalidRequestError(
                "the model has no chat template, so it takes no messages; send the prompt's text to /v1/completions, "
                "or use LLM.generate",
                "messages",
            )
        raise InvalidRequestError(
            f"the model has chat templates for {', '.join(sorted(self._sources))} but none by default", "messages"
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a model has never seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
