"""Worker process that renders chat templates as `transformers` does: a conversation in, the prompt's text out.

Run as `python -m penstock.text.chat_worker` by `penstock.text.chat_template`. The templates run in Jinja's immutable
sandbox, which denies access to Python's internals; kernel limits bound their CPU time and memory.
"""

import contextlib
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.system.worker_channel import Channel, limit_memory, limited_cpu_time
from penstock.text.chat_frames import CPU_SECONDS, MEMORY_BYTES, NO_MEMORY, REFUSED, TEXT, longest_prompt
from penstock.text.template_fallbacks import fallbacks

_PROBE = "text to be found"
_LONGEST_COMPLAINT = 2000
"""Maximum characters of an error message from a template, whose length is unbounded."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders its content."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Renderer:
    """Compiles each template once."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = sources
        self._environment = _environment()
        self._compiled: dict[str, Template] = {}
        self._of_parts: set[str] = set()  # names of templates that show text in parts alone

    def prepare(self) -> None:
        """Compile the default template; a compile error is reported with the first conversation."""
        with contextlib.suppress(Exception):
            self._template("default")

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = self._environment.from_string(self._sources[name])
            if _shows_parts_alone(self._compiled[name]):
                self._of_parts.add(name)
        return self._compiled[name]

    def _render(self, template: Template, variables: dict[str, Any]) -> str:
        """The text of a conversation or, if the template refuses it, of the first fallback that it accepts."""
        try:
            return template.render(variables)
        except MemoryError:
            raise
        except Exception:
            for messages in fallbacks(variables["messages"]):
                with contextlib.suppress(TemplateError, TypeError):
                    return template.render({**variables, "messages": messages})
            raise

    def answer(self, frame: bytes) -> bytes:
        """The reply frame for one conversation; see `penstock.text.chat_template`."""
        try:
            name, variables = json.loads(frame.decode("utf-8", "surrogatepass"))
            template = self._template(name)
            if variables is not None and name in self._of_parts:
                variables["messages"] = list(map(_in_parts, variables["messages"]))
            text = "" if variables is None else self._render(template, variables)
            if len(text) > longest_prompt(len(frame)):
                return _refused(
                    f"the model's chat template makes a prompt of {len(text)} characters of these messages; at most "
                    f"{longest_prompt(len(frame))} are taken"
                )
            return TEXT + text.encode("utf-8", "surrogatepass")
        except MemoryError:
            return NO_MEMORY
        except TemplateError as error:  # the template's own words, or Jinja's on a name or a syntax
            return _refused(f"the model's chat template says: {error}")
        except Exception as error:  # a template is a program: on messages of another shape it may fail in any way
            return _refused(f"the model's chat template cannot render these messages: {type(error).__name__}: {error}")


def _shows_parts_alone(template: Template) -> bool:
    """Whether a template shows text in parts, and nothing of a text that is no list of parts (SmolVLM, Idefics 3)."""
    for content, wanted in ((_PROBE, False), ([{"type": "text", "text": _PROBE}], True)):
        shown = False
        with contextlib.suppress(Exception):  # a template may refuse a conversation as short as this
            shown = _PROBE in template.render(messages=[{"role": "user", "content": content}])
        if shown is not wanted:
            return False
    return True


def _in_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _refused(message: str) -> bytes:
    if len(message) > _LONGEST_COMPLAINT:
        message = f"{message[:_LONGEST_COMPLAINT]} ... ({len(message)} characters)"
    return REFUSED + message.encode("utf-8", "surrogatepass")


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
    """The filter `tojson`, without the HTML escapes of Jinja's own, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def main() -> None:
    """Render conversations until the parent ends or memory runs out."""
    limit_memory(MEMORY_BYTES)
    channel = Channel()
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        renderer = Renderer(json.loads(channel.receive()))
        with limited_cpu_time(CPU_SECONDS):
            renderer.prepare()
        channel.serve(renderer.answer, CPU_SECONDS, last=NO_MEMORY)


if __name__ == "__main__":
    main()
