from dataclasses import replace

import pytest

from penstock.api.request import FinishReason, PromptPart, Request, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import SamplingParams, Structured
from penstock.frontend.output_processor import OutputProcessor
from penstock.text.chat_template import ChatTemplates
from penstock.text.tokenizer import Tokenizer
from tests.support.params import NEUTRAL
from tests.support.tokenizers_for_tests import KINDS

TOKENIZER = Tokenizer(KINDS["byte_level"](), ChatTemplates({}, {}))
EOS = TOKENIZER.backend.token_to_id("</s>")


def ids_of(text):
    """One token a byte, so that a test knows what each token says."""
    alphabet = {TOKENIZER.token_bytes(token): token for token in range(6, 262)}
    return [alphabet[bytes([byte])] for byte in text.encode()]


def processor_for(n=1, tokenizer=TOKENIZER, prompt="Hi", **changes):
    params = SamplingParams(n=n, **changes)
    resolved = replace(
        NEUTRAL,
        n=params.best_of or n,
        min_tokens=params.min_tokens,
        stop_token_ids=(EOS, *params.stop_token_ids),
        logprobs=0 if params.best_of is not None and params.logprobs is None else params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )
    return OutputProcessor(Request("r", (7, 8), resolved, arrival=10.0), params, tokenizer, prompt)


def output(token_ids, index=0, **fields):
    return SequenceOutput("r", index, list(token_ids), **fields)


def feed_text(processor, text, index=0):
    """Token by token; the deltas that came."""
    deltas = (processor.process_output(output([token], index), 11.0) for token in ids_of(text))
    return [delta for delta in deltas if delta is not None]


def end(processor, reason=FinishReason.LENGTH, token_ids=(), **fields):
    return processor.process_output(output(token_ids, finish_reason=reason, **fields), 12.0)


def test_deltas_put_together_are_the_result():
    processor = processor_for()
    deltas = [*feed_text(processor, "héllo 😀"), end(processor)]
    answer = processor.result().outputs[0]
    assert answer.text == "".join(d.text for d in deltas) == "héllo 😀"
    assert answer.token_ids == [t for d in deltas for t in d.token_ids] == ids_of("héllo 😀")
    assert answer.finish_reason is deltas[-1].finish_reason is FinishReason.LENGTH
    assert all(d.finish_reason is None for d in deltas[:-1])


def test_the_best_of_several_come_first_and_their_logprobs_only_if_they_are_asked_for():
    for asked in (None, 0):
        processor = processor_for(n=2, best_of=4, logprobs=asked)
        for index, logprob in enumerate((-3.0, -1.0, -0.5, -2.0)):
            entries = [TokenLogprob(token, logprob) for token in ids_of("ab"[: 1 + index % 2])]
            delta = processor.process_output(
                output([entry.token_id for entry in entries], index, logprobs=entries), 11.0
            )
            assert (delta.logprobs is None) == (asked is None)
            processor.process_output(output([], index, finish_reason=FinishReason.LENGTH), 12.0)
        result = processor.result()
        assert [(answer.index, answer.text) for answer in result.outputs] == [(0, "a"), (1, "ab")]
        assert [answer.logprobs and answer.logprobs[0].logprob for answer in result.outputs] == (
            [None, None] if asked is None else [-0.5, -1.0]
        )
        assert result.num_generated_tokens == 6


def test_of_the_best_of_several_a_failure_is_not_overlooked():
    processor = processor_for(n=1, best_of=2)
    entry = TokenLogprob(ids_of("a")[0], -0.1)
    processor.process_output(output([entry.token_id], 0, logprobs=[entry], finish_reason=FinishReason.LENGTH), 11.0)
    processor.process_output(output([], 1, finish_reason=FinishReason.ERROR, error="it broke"), 11.0)
    assert processor.result().outputs[0].error == "it broke"


def test_what_an_engine_tells_of_the_prompt_again_is_told_once():
    processor = processor_for(prompt_logprobs=0)
    assert processor.result().prompt_logprobs == [None]
    entries = [TokenLogprob(token, -1.0) for token in range(6)]
    parts = [(1, 0, 2), (3, 2, 3), (1, 0, 4), (5, 4, 6)]  # an engine ends after the second, another begins
    deltas = [
        processor.process_output(output([], prompt=PromptPart(start, entries[first:end])), 11.0)
        for start, first, end in parts
    ]
    assert [entry for delta in deltas for entry in delta.prompt_logprobs] == entries
    assert processor.result().prompt_logprobs == [None, *entries]
    assert processor.resume_point() == ()


def test_a_hypothesis_has_its_score():
    processor = processor_for()
    end(processor, token_ids=ids_of("ab"), score=-1.5)
    assert processor.result().outputs[0].score == -1.5


def test_the_result_is_there_at_any_time():
    processor = processor_for(n=2)
    assert [a.text for a in processor.result().outputs] == ["", ""]
    feed_text(processor, "abc", index=1)
    middle = processor.result()
    feed_text(processor, "de", index=1)
    assert [a.text for a in middle.outputs] == ["", "abc"]
    assert [a.token_ids for a in middle.outputs] == [[], ids_of("abc")]
    assert not middle.finished
    assert [a.text for a in processor.result().outputs] == ["", "abcde"]
    assert middle.request_id == "r"
    assert middle.prompt == "Hi"
    assert middle.prompt_token_ids == (7, 8)


def test_a_stop_string_cuts_the_text_and_keeps_the_tokens_that_completed_it():
    processor = processor_for(stop=["END", "\n"], logprobs=0)
    entries = [TokenLogprob(token, -0.5) for token in ids_of("one ENDtwo")]
    first = processor.process_output(output(ids_of("one E"), logprobs=entries[:5]), 11.0)
    assert (first.text, first.finish_reason) == ("one ", None)
    second = processor.process_output(output(ids_of("NDtwo"), logprobs=entries[5:]), 11.0)
    assert (second.text, second.finish_reason, second.stop_reason) == ("", FinishReason.STOP, "END")
    assert second.token_ids == ids_of("ND")
    assert second.logprobs == entries[5:7]
    assert processor.finished
    answer = processor.result().outputs[0]
    assert (answer.text, answer.stop_reason) == ("one ", "END")
    assert answer.token_ids == ids_of("one END")
    assert answer.logprobs == entries[:7]


@pytest.mark.parametrize("reason", [*FinishReason])
def test_what_comes_after_the_end_is_dropped(reason):
    processor = processor_for(stop="!", n=2)
    feed_text(processor, "a!")
    before = processor.result()
    assert processor.process_output(output(ids_of("b")), 13.0) is None
    assert processor.process_output(output([], finish_reason=reason, error="x"), 13.0) is None
    assert processor.result() == before
    assert not processor.finished


def test_text_held_back_for_a_stop_string_comes_out_at_the_end():
    processor = processor_for(stop="</done>")
    deltas = feed_text(processor, "7 </do")
    assert "".join(d.text for d in deltas) == "7 "
    assert end(processor).text == "</do"
    assert processor.result().outputs[0].text == "7 </do"


def test_an_incomplete_character_comes_out_at_the_end():
    processor = processor_for(stop="\ufffd")
    processor.process_output(output(ids_of("a😀")[:-1]), 11.0)
    last = end(processor)
    assert (last.text, last.finish_reason, last.stop_reason) == ("", FinishReason.STOP, "\ufffd")
    assert processor.result().outputs[0].text == "a"


def test_a_stop_string_does_not_end_the_answer_before_min_tokens():
    processor = processor_for(stop="x", min_tokens=4)
    deltas = feed_text(processor, "axbxcx")
    assert [d.text for d in deltas] == ["a", "x", "b", ""]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert len(processor.result().outputs[0].token_ids) == 4


def test_the_end_of_text_is_a_token_without_a_text():
    processor = processor_for()
    delta = end(processor, FinishReason.STOP, [*ids_of("ab"), EOS])
    assert (delta.text, delta.stop_reason) == ("ab", EOS)
    assert processor.result().outputs[0].token_ids == [*ids_of("ab"), EOS]


def test_a_stop_token_with_a_text_ends_the_text_before_it():
    (token,) = ids_of("b")
    processor = processor_for(stop_token_ids=[token], stop="b")
    delta = end(processor, FinishReason.STOP, ids_of("ab"))
    assert (delta.text, delta.stop_reason, delta.token_ids) == ("a", token, ids_of("ab"))


@pytest.mark.parametrize("kind", [*KINDS])
def test_an_answer_in_a_form_shows_each_character_of_it(kind):
    """Of a prompt that shows nothing, some tokenizers take the first space away."""
    tokenizer = Tokenizer(KINDS[kind](), ChatTemplates({}, {}))
    tokens = {tokenizer.token_bytes(token): token for token in range(tokenizer.vocab_size)}
    bos, answer = tokenizer.special_token("<s>"), [tokens[b" "], tokens[b"o"], tokens[b"k"]]
    texts = []
    for structured in (Structured.regex(" ok"), None):
        params = SamplingParams(structured=structured)
        processor = OutputProcessor(Request("r", (bos,), NEUTRAL, arrival=0.0), params, tokenizer, "")
        processor.process_output(output(answer, finish_reason=FinishReason.STOP), 1.0)
        texts.append(processor.result().outputs[0].text)
    assert texts == [" ok", " ok" if kind == "byte_level" else "ok"]


def test_an_answer_that_a_grammar_ends_keeps_its_last_token():
    processor = processor_for()
    end(processor, FinishReason.STOP, ids_of("{}"))
    (answer,) = processor.result().outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("{}", FinishReason.STOP, None)


def test_a_stop_string_in_the_engines_last_output_goes_before_its_reason():
    processor = processor_for(stop="b")
    delta = end(processor, FinishReason.LENGTH, ids_of("abc"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, "b")
    assert delta.token_ids == ids_of("ab")


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_an_aborted_or_failed_answer_keeps_what_it_had(reason):
    processor = processor_for(stop="bc")
    feed_text(processor, "ab")
    delta = end(processor, reason, error="the logits were not finite")
    assert (delta.text, delta.finish_reason, delta.error) == ("b", reason, "the logits were not finite")
    answer = processor.result().outputs[0]
    assert (answer.text, answer.finish_reason, answer.error) == ("ab", reason, "the logits were not finite")
    assert answer.stop_reason is None
    assert processor.result().finished


def test_a_request_is_finished_when_each_of_its_sequences_is():
    processor = processor_for(n=3)
    for index in (2, 0, 1):
        assert not processor.finished
        processor.process_output(output([], index, finish_reason=FinishReason.LENGTH), 12.0 + index)
    assert processor.finished
    assert processor.result().times.finished == 13.0


def test_times_and_cache_hits_are_those_of_the_first_outputs():
    processor = processor_for(n=2)
    processor.process_output(output([], 1, first_scheduled=10.5, num_cached_tokens=1), 10.7)
    processor.process_output(output([9], 0, first_scheduled=10.6), 11.0)
    processor.process_output(output([9], 1), 11.5)
    result = processor.result()
    times = result.times
    assert (times.arrival, times.first_scheduled, times.first_token, times.finished) == (10.0, 10.5, 11.0, None)
    assert result.num_cached_tokens == 1


def test_without_a_tokenizer_there_are_tokens_only():
    processor = processor_for(tokenizer=None, prompt=None)
    processor.process_output(output([5, 6]), 11.0)
    end(processor, FinishReason.STOP, [EOS])
    answer = processor.result().outputs[0]
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("", [5, 6, EOS], EOS)


def test_logprobs_are_none_unless_asked_for():
    processor = processor_for()
    feed_text(processor, "ab")
    assert processor.result().outputs[0].logprobs is None
    assert processor_for(logprobs=0).result().outputs[0].logprobs == []
