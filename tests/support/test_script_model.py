"""Script models write the given texts in the notation of their kind of model."""

from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.support.script_model import HARMONY, HERMES, STRICT, Answer, Call, Kind, Turn, write_kind, write_script_model

SCRIPTS = {
    "plain": (Turn("Hello there, I am fine.", thought="A greeting."),),
    "loop": (
        Turn(thought="I look it up.", calls=(Call("lookup", {"query": "café ☕"}),)),
        Turn("Then I add.", calls=(Call("add", {"a": 1}),)),
    ),
    "broken": (Turn(calls=(Call("lookup", '{"query": "cut'),)),),
}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=200, seed=1)


def said(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams = GREEDY, **options: Any) -> str:
    (output,) = llm.generate([llm.encode_chat(messages, **options)], params)
    return output.outputs[0].text


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("kind", [HERMES, STRICT, HARMONY], ids=lambda kind: kind.template)
def test_each_turn_of_a_script_is_said_in_the_notation_of_its_kind(kind: Kind, tmp_path: Path) -> None:
    with LLM(str(write_kind(tmp_path, kind, SCRIPTS))) as llm:
        messages = user("SCRIPT=loop. Begin.")
        for turn in SCRIPTS["loop"]:
            expected = kind.answer(turn)
            for params in (GREEDY, SAMPLED):
                assert said(llm, messages, params, tools=TOOLS) == expected.thought + str(expected.rest)
            messages += [{"role": "assistant", "content": "x"}, {"role": "tool", "content": "y"}]
        broken = kind.answer(SCRIPTS["broken"][0])
        assert said(llm, user("SCRIPT=broken."), tools=TOOLS) == broken.thought + str(broken.rest)
        plain = kind.answer(SCRIPTS["plain"][0])
        assert said(llm, user("SCRIPT=loop. No tools.")) == plain.thought + str(plain.rest)


def test_an_answer_in_given_pieces_has_a_token_for_each(tmp_path: Path) -> None:
    pieces = ["On", "e ", "tw", "o"]
    template = "{{ messages[0].content }}{{ say(messages, tools, true) }}"
    with LLM(str(write_script_model(tmp_path, {"plain": [Answer("", pieces)]}, template))) as llm:
        (output,) = llm.generate([llm.encode_chat(user("hi"))], GREEDY)
        assert llm.tokenizer is not None
        assert [llm.tokenizer.decode([token]) for token in output.outputs[0].token_ids[: len(pieces)]] == pieces


def test_a_piece_that_two_tokens_would_follow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a piece is said twice"):
        write_script_model(
            tmp_path, {"plain": [Answer("", ["a1", "b2", "a1", "c3"])]}, "{{ say(messages, tools, true) }}"
        )
