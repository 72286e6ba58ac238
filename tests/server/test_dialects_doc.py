"""The page of the dialects' parameters."""

from pathlib import Path

from penstock.parsers.conversation import format_of
from penstock.server.dialects_doc import BODIES, describe
from penstock.server.openai.body_to_params import conversation
from penstock.server.tgi.schema import ChatTokenizeBody


def test_the_documentation_is_what_the_schemas_say():
    page = Path(__file__).parents[2] / "docs" / "dialects.md"
    assert page.read_text() == describe() + "\n"


def test_each_parameter_stands_where_it_is_obeyed_or_where_it_is_refused():
    for body in BODIES.values():
        assert not set(body.model_fields) & (body.UNSUPPORTED.keys() | body.WITHOUT_EFFECT)
        assert not body.UNSUPPORTED.keys() & body.WITHOUT_EFFECT


def test_each_dialects_tokenization_is_there_with_what_has_no_effect():
    page = describe()
    assert "| `parameters` | object | Checked, but without effect" in page.partition("## POST /tokenize")[2]
    section = page.partition("## POST /chat_tokenize\n")[2].partition("\n## ")[0]
    unused = section.partition("Checked, but without effect, as with TGI: ")[2].partition("\n")[0]
    assert all(f"`{name}`" in unused for name in ("max_tokens", "temperature", "seed", "logprobs", "stream"))
    assert not any(f"`{name}`" in unused for name in ChatTokenizeBody.OBEYED)
    assert all(f"| `{name}` |" in section for name in ChatTokenizeBody.OBEYED)


def test_a_tokenized_chat_depends_on_what_is_documented_as_obeyed():
    read = set()

    class Watched(ChatTokenizeBody):
        def __getattribute__(self, name):
            read.add(name)
            return super().__getattribute__(name)

    given = {"messages": [{"role": "user", "content": "x"}], "tool_prompt": "y"}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = Watched.model_validate({**given, "tools": tools})
    read.clear()
    conversation(body, format_of(""))
    obeyed = read & ChatTokenizeBody.model_fields.keys() | {"model"}  # the route reads the model
    assert obeyed - {"parallel_tool_calls"} == ChatTokenizeBody.OBEYED  # which makes no difference to a prompt
