"""The offline API on a small random model."""

import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from penstock import LLM, Function, SamplingParams, Tools
from penstock.api.request import FinishReason
from penstock.config.engine_config import EngineConfig
from penstock.core.plan import StepPlan, StepResult
from penstock.engine.build import build
from penstock.engine.core import EngineCore
from penstock.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequestError, PromptTooLongError
from penstock.parsers.parts import Text, ToolCall
from tests.support.checkpoints import write_tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def write_bert(folder: Path) -> Path:
    import transformers

    from tests.support.encoders import config_of, write_model  # here: they need torch

    return write_model(folder, transformers.BertModel(config_of("bert")))


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama), kv_cache_memory="8MiB", max_num_seqs=8, threads=1, seed=1) as made:
        yield made


@pytest.mark.parametrize("is_built_already", [False, True])
def test_the_engine_is_closed_if_the_tokenizer_cannot_be_read(
    is_built_already: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []
    close = EngineCore.close
    monkeypatch.setattr(EngineCore, "close", lambda self: (closed.append(self), close(self)))
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").write_text("{")
    options = {"kv_cache_memory": "8MiB", "threads": 1}
    engine = build(EngineConfig.from_options(model=str(folder), **options)) if is_built_already else None
    with pytest.raises(CheckpointError, match="cannot be read as a tokenizer"):
        LLM(str(folder), engine=engine, **options)
    assert len(closed) == 1


def test_prompts_are_answered_in_their_order_whether_text_or_token_ids(llm: LLM) -> None:
    outputs = llm.generate(["hello", "the quick fox"], GREEDY)
    assert [o.prompt for o in outputs] == ["hello", "the quick fox"]
    assert llm.tokenizer is not None
    again = llm.generate([llm.tokenizer.encode("the quick fox")], GREEDY)
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert [len(o.outputs[0].token_ids) for o in outputs] == [6, 6]
    assert all(o.finished and o.outputs[0].finish_reason is FinishReason.LENGTH for o in outputs)


def test_one_prompt_need_not_be_in_a_list(llm: LLM) -> None:
    assert len(llm.generate("hello", GREEDY)) == len(llm.generate([3, 4, 5], GREEDY)) == 1
    assert llm.generate([], GREEDY) == []


def test_prompts_may_be_an_array_or_an_iterator(llm: LLM) -> None:
    expected = [output.outputs for output in llm.generate(["hello", "fox"], GREEDY)]
    for prompts in (np.array(["hello", "fox"]), (text for text in ("hello", "fox")), ("hello", "fox")):
        assert [output.outputs for output in llm.generate(prompts, GREEDY)] == expected  # type: ignore[arg-type]
    ids = llm.generate([3, 4, 5], GREEDY)[0].outputs
    for one in (np.array([3, 4, 5]), [np.array([3, 4, 5])], list(np.array([3, 4, 5])), np.array([[3, 4, 5]])):
        assert llm.generate(one, GREEDY)[0].outputs == ids  # type: ignore[arg-type]
    assert "".join(d.text for d in llm.stream(np.array([3, 4, 5]), GREEDY)) == ids[0].text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda llm: llm.generate(7), "prompts must be a text, token ids, or a list of these; not int"),
        (lambda llm: llm.generate({"a": 1}), "not dict"),
        (lambda llm: llm.generate(b"hello"), "not bytes"),
        (lambda llm: llm.generate([None]), "the prompt must be text or a list of token ids, not NoneType"),
        (lambda llm: llm.generate("hello", {"max_tokens": 5}), r"not dict: SamplingParams\(\*\*params\)"),
        (lambda llm: llm.generate(["hello"], ["greedy"]), "params must be SamplingParams, not str"),
        (lambda llm: llm.stream("hello", {"max_tokens": 5}), "params must be SamplingParams, not dict"),
        (lambda llm: llm.stream(7), "the prompt must be text"),
        (lambda llm: llm.chat("hello"), "messages must be a list of messages such as"),
        (lambda llm: llm.chat({"role": "user", "content": "hello"}), "messages must be a list of messages such as"),
        (lambda llm: llm.chat(["hello"]), "messages must be a list of messages such as"),
        (lambda llm: llm.chat([["hello"]]), "messages must be a list of messages such as"),
        (lambda llm: llm.chat(None), "messages must be a list of messages such as"),
        (lambda llm: llm.chat([{"role": "user", "content": "x"}], "greedy"), "params must be SamplingParams, not str"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_name(llm: LLM, call: Callable[[LLM], object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        call(llm)


def test_it_shows_what_it_is(llm: LLM, tiny_llama: Path) -> None:
    assert repr(llm) == f"LLM({tiny_llama.name!r}, dtype='float32', max_model_len=512)"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_several_prompts_show_a_bar_on_a_terminal_unless_it_is_declined(
    llm: LLM, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    for prompts, progress, shown in (
        (["hello", "fox"], None, is_terminal),
        (["hello", "fox"], False, False),
        (["hello", "fox"], True, True),
        ("hello", None, False),
    ):
        llm.generate(prompts, GREEDY, progress)
        assert ("request/s" in capsys.readouterr().err) == shown


def test_logprobs_have_the_texts_of_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    output = llm.generate("the quick fox", params)[0]
    assert llm.tokenizer is not None
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    deltas = list(llm.stream("the quick fox", params))
    streamed = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert streamed == output.outputs[0].logprobs
    assert output.prompt_logprobs[0] is None
    assert [entry for delta in deltas for entry in delta.prompt_logprobs or ()] == output.prompt_logprobs[1:]
    for entry in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry.text == llm.tokenizer.token_text(entry.token_id)
        assert entry.top_texts == tuple(llm.tokenizer.token_text(token) for token, _ in entry.top)
    assert "".join(str(entry.text) for entry in streamed) == output.outputs[0].text


def test_refusals_of_the_offline_api_name_no_routes_of_the_server(llm: LLM, tmp_path: Path) -> None:
    encoder = write_bert(tmp_path / "encoder")
    plain = write_tiny_llama(tmp_path / "plain")
    (plain / "tokenizer_config.json").unlink()
    with (
        LLM(str(encoder), threads=1) as embedding,
        LLM(str(plain), kv_cache_memory="8MiB", threads=1) as untemplated,
    ):
        for call, told in (
            (lambda: llm.embed(text for text in ("a", "b")), "generates text; it has no embeddings and no scores"),
            (lambda: llm.score("a", "b"), "generates text; it has no embeddings and no scores"),
            (lambda: embedding.generate("hello"), "does not generate; it embeds texts"),
            (lambda: untemplated.chat([{"role": "user", "content": "x"}]), "no chat template.*the prompt's text"),
        ):
            with pytest.raises(InvalidRequestError, match=told) as refused:
                call()
            assert "/v1" not in str(refused.value)


def test_a_request_has_its_times(llm: LLM) -> None:
    times = llm.generate("hello", GREEDY)[0].times
    assert times.first_scheduled is not None
    assert times.first_token is not None
    assert times.finished is not None
    assert times.arrival <= times.first_scheduled <= times.first_token <= times.finished


def test_parameters_may_differ_by_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (0, 1, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [0, 1, 3]
    with pytest.raises(InvalidRequestError, match="2 prompts, but 3"):
        llm.generate(["a", "b"], params)


def test_n_answers_differ_by_index_and_repeat_by_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, max_tokens=8, seed=11, ignore_eos=True, logprobs=2)
    first, again = (llm.generate("hello", params)[0] for _ in range(2))
    answers = [o.token_ids for o in first.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(a) for a in answers}) > 1
    assert answers == [o.token_ids for o in again.outputs]
    for output in first.outputs:
        assert output.logprobs is not None
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) == 2 for entry in output.logprobs)


@pytest.mark.parametrize("caching", [True, False])
def test_more_answers_than_may_run_at_once_are_those_of_an_engine_that_has_room_for_all(
    tiny_llama: Path, caching: bool
) -> None:
    params = SamplingParams(
        n=9, temperature=1.5, max_tokens=12, seed=11, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    prompt = [7 + i % 50 for i in range(75)]

    def answers(max_num_seqs: int) -> list[object]:
        options = {"threads": 1, "max_num_seqs": max_num_seqs, "enable_prefix_caching": caching}
        with LLM(str(tiny_llama), **options) as llm:
            (output,) = llm.generate([prompt], params)
            (best,) = llm.generate([prompt], replace(params, n=2, best_of=9, prompt_logprobs=None))
            return [output.prompt_logprobs, output.outputs, best.outputs]

    assert answers(4) == answers(16)


def test_the_engines_seed_makes_unseeded_requests_reproducible_in_their_order(tiny_llama: Path) -> None:
    answers = []
    for _ in range(2):
        with LLM(str(tiny_llama), kv_cache_memory="8MiB", threads=1, seed=5) as llm:
            params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
            answers.append([o.outputs[0].token_ids for o in llm.generate(["hello", "hello"], params)])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_a_stream_adds_up_to_the_whole_answer(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    deltas = list(llm.stream("hello", GREEDY))
    assert "".join(d.text for d in deltas) == whole.text
    assert [t for d in deltas for t in d.token_ids] == whole.token_ids
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH]


def test_streams_may_be_read_in_turns_and_beside_other_calls(llm: LLM) -> None:
    expected = ["".join(d.text for d in llm.stream(p, GREEDY)) for p in ("hello", "fox")]
    first, second = llm.stream("hello", GREEDY), llm.stream("fox", GREEDY)
    parts = [next(first).text, next(second).text]
    llm.generate("something else", GREEDY)
    assert [parts[0] + "".join(d.text for d in first), parts[1] + "".join(d.text for d in second)] == expected


def test_leaving_a_stream_aborts_its_request(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    assert llm.stats().blocks_held > 0
    stream.close()
    stats = llm.stats()
    assert (stats.blocks_held, stats.num_running) == (0, 0)


@contextlib.contextmanager
def interrupted_in_step(llm: LLM, number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, SIGINT arrives, twice, while the runner computes the step of this number, and is not lost."""
    runner = llm._engine._runner  # type: ignore[union-attr]
    execute, steps = runner.execute, itertools.count(1)

    def interrupted(plan: StepPlan) -> StepResult:
        if next(steps) == number:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("call", ["generate", "stream", "chat"])
def test_after_ctrl_c_in_a_step_the_model_answers_as_before(
    llm: LLM, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = llm.generate(["hello", "fox"], GREEDY)
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    with interrupted_in_step(llm, 3, monkeypatch):
        if call == "generate":
            llm.generate(["hello", "fox"], long)
        elif call == "chat":
            llm.chat([{"role": "user", "content": "hello"}], long)
        else:
            list(llm.stream("hello", long))
    assert (llm.stats().blocks_held, llm.stats().num_running, llm.stats().num_waiting) == (0, 0, 0)
    assert [o.outputs for o in llm.generate(["hello", "fox"], GREEDY)] == [o.outputs for o in expected]


def test_after_ctrl_c_in_a_step_an_encoder_embeds_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = write_bert(tmp_path)
    with LLM(str(encoder), threads=1) as llm:
        expected = llm.embed("word1")
        with interrupted_in_step(llm, 1, monkeypatch):
            llm.embed(["word1", "word2"])
        assert (llm.embed("word1") == expected).all()


def test_outputs_are_had_as_they_complete_also_those_of_a_step_that_ctrl_c_interrupts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    found = list(llm.generate_unordered(["a", "b", "c"], params))
    assert [(index, len(output.outputs[0].token_ids)) for index, output in found] == [(1, 2), (2, 5), (0, 9)]
    indices: list[int] = []
    with interrupted_in_step(llm, 5, monkeypatch):
        indices.extend(index for index, _ in llm.generate_unordered(["a", "b", "c"], params))
    assert indices == [1, 2]


def test_a_stop_string_ends_the_answer_and_frees_its_blocks(llm: LLM) -> None:
    text = llm.generate("hello", GREEDY)[0].outputs[0].text
    stop = text[2:4]
    answer = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=stop))[0]
    assert answer.outputs[0].text == text[: text.index(stop)]
    assert answer.outputs[0].finish_reason is FinishReason.STOP
    assert answer.outputs[0].stop_reason == stop
    assert llm.stats().blocks_held == 0


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(PromptTooLongError):
        llm.generate([[5] * 100_000], GREEDY)
    with pytest.raises(InvalidRequestError):
        llm.generate([[10**9]], GREEDY)
    assert llm.stats().num_waiting == llm.stats().num_running == 0


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = llm.chat(messages, GREEDY)
    assert answer[0].prompt_token_ids == tuple(llm.encode_chat(messages))
    assert len(llm.chat([messages, messages], GREEDY)) == 2


def test_chat_with_tools_is_taken_apart() -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = Tools((Function("get_weather", "Get the weather of a city.", city),))
    forced = Tools(tools.functions, "required", parallel=False)
    question, hello = ({"role": "user", "content": text} for text in ("What is the weather in Paris?", "Hello!"))
    with LLM(threads=1) as demo:
        asked, greeted = demo.chat([[question], [hello]], SamplingParams(temperature=0.0), tools=tools)
        assert demo.parts(asked, tools) == [[ToolCall("get_weather", '{"city": "Paris"}')]]
        assert demo.parts(greeted, tools) == [[Text("Hello! How can I help you?")]]
        hot = SamplingParams(temperature=1.5, seed=3, max_tokens=300, n=2)
        for parts in demo.parts(*demo.chat([hello], hot, tools=forced), forced):
            (call,) = parts
            assert isinstance(call, ToolCall)
            assert json.loads(call.arguments).keys() >= {"city"}


def test_marks_that_are_special_tokens_are_forced_and_read(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "mistral", vocab_size=400)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    assert tokenizer.get_vocab_size() <= 400
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{# [TOOL_CALLS] [ARGS] #}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    pick = {"type": "object", "properties": {"kind": {"enum": ["red", "green"]}}, "required": ["kind"]}
    tools = Tools((Function("pick", None, {**pick, "additionalProperties": False}),), "required", parallel=False)
    with LLM(str(folder), kv_cache_memory="8MiB", threads=1) as llm:
        hot = SamplingParams(temperature=1.0, n=4, seed=5, max_tokens=100)
        (output,) = llm.chat([{"role": "user", "content": "hello"}], hot, tools=tools)
        for answer, parts in zip(output.outputs, llm.parts(output, tools), strict=True):
            assert answer.text.startswith("[TOOL_CALLS]pick[ARGS]{")
            (call,) = parts
            assert isinstance(call, ToolCall)
            assert json.loads(call.arguments)["kind"] in ("red", "green")


def test_calls_are_enforced_of_a_model_that_knows_no_tools(llm: LLM) -> None:
    tools = Tools((Function("f"),), choice="required", parallel=False)
    (output,) = llm.chat([{"role": "user", "content": "hello"}], tools=tools)
    assert llm.parts(output, tools) == [[ToolCall("f", "{}")]]


def test_an_unknown_option_is_refused_and_the_nearest_named(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(str(tiny_llama), max_num_sequences=3)


def test_a_closed_llm_says_so(tiny_llama: Path) -> None:
    llm = LLM(str(tiny_llama), kv_cache_memory="8MiB", threads=1)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("hello", GREEDY)
