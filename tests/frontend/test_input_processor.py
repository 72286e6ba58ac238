from array import array
from dataclasses import replace

import pytest

from penstock.api.sampling_params import Beams, SamplingParams
from penstock.api.transcript_rules import TranscriptRules
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.engine.info import EngineInfo
from penstock.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from penstock.frontend.input_processor import InputProcessor
from penstock.text.chat_template import ChatTemplates
from penstock.text.tokenizer import Tokenizer
from tests.support.tokenizers_for_tests import byte_level_bpe, llama2_bpe

TOKENIZER = Tokenizer(byte_level_bpe(), ChatTemplates({}, {}))
INFO = EngineInfo(
    model_name="m",
    model_path="/models/m",
    vocab_size=420,
    max_model_len=20,
    max_num_seqs=4,
    seed=None,
    defaults=GenerationDefaults(eos_token_ids=(1, 5)),
    memory_plan="",
    num_blocks=10,
    block_size=4,
)


class CountingTokenizer(Tokenizer):
    def __init__(self):
        super().__init__(byte_level_bpe(), ChatTemplates({}, {}))
        self.num_encoded = 0

    def encode(self, *args, **options):
        self.num_encoded += 1
        return super().encode(*args, **options)


def accept(prompt=(1, 2, 3), params=None, info=INFO, tokenizer=TOKENIZER, **options):
    input_processor = InputProcessor(tokenizer, info)
    return input_processor.make_request(prompt, params, request_id="r", arrival=1.5, **options)


def refusal(*args, kind=InvalidRequestError, **kwargs):
    with pytest.raises(InvalidRequestError) as caught:
        accept(*args, **kwargs)
    assert type(caught.value) is kind
    return caught.value.param, str(caught.value)


def test_a_request_carries_what_it_was_given():
    request = accept([4, 5], SamplingParams(seed=3), priority=-2, namespace="tenant")
    assert (request.request_id, request.prompt_token_ids, request.arrival) == ("r", (4, 5), 1.5)
    assert (request.priority, request.namespace, request.params.seed) == (-2, "tenant", 3)


def test_a_text_is_tokenised_with_what_the_checkpoint_puts_around_it():
    tokenizer = Tokenizer(llama2_bpe(), ChatTemplates({}, {}))
    assert accept("Hello", tokenizer=tokenizer).prompt_token_ids == tuple(tokenizer.encode("Hello"))
    assert accept("Hello", tokenizer=tokenizer).prompt_token_ids[0] == 1


@pytest.mark.parametrize("prompt", [[7, 8], (7, 8), array("i", [7, 8]), range(7, 9)])
def test_token_ids_may_come_in_any_list(prompt):
    assert accept(prompt).prompt_token_ids == (7, 8)


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(prompt):
    param, words = refusal(prompt)
    assert param == "prompt"
    assert "empty" in words


@pytest.mark.parametrize("token", [-1, 420, 10**12])
def test_a_token_outside_the_vocabulary_is_refused_by_name(token):
    param, words = refusal([1, token])
    assert param == "prompt"
    assert str(token) in words
    assert "419" in words


@pytest.mark.parametrize("prompt", [[1, "2"], [1, 2.0], [True], [[1]], 7, None, b"ab", {"a": 1}])
def test_a_prompt_of_another_type_is_refused(prompt):
    assert refusal(prompt)[0] == "prompt"


def test_a_text_without_a_tokenizer_is_refused():
    param, words = refusal("Hello", tokenizer=None)
    assert param == "prompt"
    assert "token ids" in words
    assert accept([1], tokenizer=None).prompt_token_ids == (1,)


def test_a_prompt_as_long_as_the_context_is_refused_and_one_shorter_is_not():
    param, words = refusal([1] * 20, kind=PromptTooLongError)
    assert param == "prompt"
    assert "20 tokens" in words
    assert "19" in words
    assert accept([1] * 19).params.max_tokens == 1


def test_max_tokens_beyond_the_context_end_with_the_context():
    for max_tokens in (12, 13, 2**31 - 1):
        assert accept([1] * 8, SamplingParams(max_tokens=max_tokens)).params.max_tokens == 12


def test_max_tokens_beyond_the_context_may_be_refused_in_words_that_clients_recognise():
    processor = InputProcessor(TOKENIZER, INFO, refuse_long_max_tokens=True)

    def ask(max_tokens):
        params = SamplingParams(max_tokens=max_tokens)
        return processor.make_request([1] * 8, params, request_id="r", arrival=0.0).params.max_tokens

    assert ask(12) == ask(None) == 12
    with pytest.raises(PromptTooLongError) as refused:
        ask(13)
    assert refused.value.param == "max_tokens"
    assert "input length and `max_tokens` exceed context limit: 8 + 13 > 20" in str(refused.value)  # Claude Code
    assert "maximum context length is 20 tokens: lower max_tokens to at most 12" in str(refused.value)  # OpenAI's
    processor.check([1] * 8, SamplingParams(max_tokens=13))  # accepted before, by a server without the option


def test_without_max_tokens_the_answer_may_fill_the_context():
    assert accept([1] * 5).params.max_tokens == 15
    assert accept([1] * 5, SamplingParams(max_tokens=0)).params.max_tokens == 0


def test_min_tokens_beyond_the_context_are_refused():
    assert refusal([1] * 8, SamplingParams(min_tokens=13))[0] == "min_tokens"
    assert accept([1] * 8, SamplingParams(min_tokens=12)).params.min_tokens == 12


def test_more_answers_than_the_engine_runs_at_once_are_accepted_and_more_beams_are_refused():
    assert accept(params=SamplingParams(n=128)).params.n == 128
    assert accept(params=SamplingParams(best_of=128)).params.n == 128
    assert accept(params=SamplingParams(num_beams=4)).params.num_sequences == 4
    param, words = refusal(params=SamplingParams(num_beams=5))
    assert param == "num_beams"
    assert "max_num_seqs" in words


def test_beams_and_all_of_which_the_best_are_shown_count_as_sequences():
    request = accept(params=SamplingParams(n=2, best_of=4))
    assert (request.params.n, request.params.num_sequences, request.params.logprobs) == (4, 4, 0)
    info = replace(INFO, max_batch_total_tokens=20)
    assert refusal(params=SamplingParams(num_beams=3, max_tokens=7), info=info)[0] == "num_beams"
    assert accept(params=SamplingParams(num_beams=2, max_tokens=7), info=info).params.num_sequences == 2


def test_beam_search_goes_by_the_models_probabilities_alone_whatever_the_checkpoints_controls():
    info = replace(INFO, defaults=GenerationDefaults((1, 5), temperature=0.7, top_p=0.5, repetition_penalty=1.2))
    params = accept(params=SamplingParams(num_beams=3, length_penalty=2, early_stopping="never"), info=info).params
    assert (params.temperature, params.top_p, params.repetition_penalty) == (0.0, 1.0, 1.0)
    assert params.beams == Beams(3, 2.0, "never")
    assert params.n == 1
    assert params.stop_token_ids == (1, 5)


def test_a_search_must_find_enough_tokens_to_go_on_with():
    small = replace(INFO, vocab_size=6)
    assert refusal([2], SamplingParams(num_beams=4, stop_token_ids=[3]), info=small)[0] == "num_beams"
    assert accept([2], SamplingParams(num_beams=4), info=small).params.beams is not None
    many = SamplingParams(num_beams=4, stop_token_ids=list(range(300)))
    assert refusal(params=many)[0] == "num_beams"


def test_stop_tokens_outside_the_vocabulary_are_refused():
    assert refusal(params=SamplingParams(stop_token_ids=[420]))[0] == "stop_token_ids"


def test_stop_strings_without_a_tokenizer_are_refused():
    assert refusal(params=SamplingParams(stop="x"), tokenizer=None)[0] == "stop"


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_that_is_no_whole_number_is_refused(priority):
    assert refusal(priority=priority)[0] == "priority"


def test_what_a_request_leaves_open_the_checkpoint_decides():
    defaults = GenerationDefaults(eos_token_ids=(1,), temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    info = replace(INFO, defaults=defaults)
    chosen = accept(info=info).params
    assert (chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (0.6, 20, 0.95, 0.1)
    own = accept(params=SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0), info=info).params
    assert (own.temperature, own.top_k, own.top_p, own.min_p) == (0.0, 0, 1.0, 0.0)
    assert isinstance(own.temperature, float)


def test_the_checkpoint_may_have_a_repetition_penalty_and_a_typical_p():
    info = replace(INFO, defaults=GenerationDefaults(repetition_penalty=1.1, typical_p=0.9))
    chosen = accept(info=info).params
    assert (chosen.repetition_penalty, chosen.typical_p) == (1.1, 0.9)
    own = accept(params=SamplingParams(repetition_penalty=1, typical_p=1), info=info).params
    assert (own.repetition_penalty, own.typical_p) == (1.0, 1.0)


def test_words_are_ruled_out_as_the_tokenizer_writes_them():
    spelt = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("quick", " quick", "o", " o")]
    asked = SamplingParams(bad_words=["quick", " o", "o"], bad_token_ids=[7, 7])
    banned = accept(params=asked).params.banned
    assert banned[0] == (7,)
    assert set(banned) == {(7,), *spelt}
    assert len(set(banned)) == len(banned)


def test_the_bad_words_of_a_call_are_tokenised_once():
    tokenizer = CountingTokenizer()
    processor = InputProcessor(tokenizer, INFO)
    params = SamplingParams(bad_words=["quick", "o"])
    for prompt in range(1, 100):
        processor.make_request([prompt], params, request_id="r", arrival=0.0)
    assert tokenizer.num_encoded == 4


def test_biases_that_change_nothing_are_left_out():
    assert accept(params=SamplingParams(logit_bias={3: 0, 4: -1})).params.logit_bias == ((4, -1.0),)


@pytest.mark.parametrize("field", ["bad_token_ids", "allowed_token_ids"])
def test_tokens_outside_the_vocabulary_are_refused(field):
    param, words = refusal(params=SamplingParams(**{field: [3, 420]}))
    assert param == field
    assert "420" in words
    assert refusal(params=SamplingParams(logit_bias={420: 1}))[0] == "logit_bias"
    assert refusal(params=SamplingParams(transcript=TranscriptRules(9, 5, (420,))))[0] == "transcript"


def test_bad_words_without_a_tokenizer_are_refused():
    assert refusal(params=SamplingParams(bad_words=["x"]), tokenizer=None)[0] == "bad_words"


@pytest.mark.parametrize(
    ("controls", "field"),
    [
        ({"allowed_token_ids": [4, 9], "bad_token_ids": [9, 4, 5]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 5], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_token_ids": range(420)}, "bad_token_ids"),
    ],
)
def test_controls_that_leave_no_token_are_refused(controls, field):
    controls = {name: list(value) if isinstance(value, range) else value for name, value in controls.items()}
    param, words = refusal(params=SamplingParams(**controls))
    assert param == field
    assert "no token is left" in words


def test_end_tokens_alone_may_be_allowed():
    assert accept(params=SamplingParams(allowed_token_ids=[5, 1])).params.allowed_token_ids == (1, 5)


def test_what_both_leave_open_is_neutral():
    chosen = accept().params
    assert (chosen.n, chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p) == (1, 1.0, 0, 1.0, 0.0)
    assert (chosen.min_tokens, chosen.logprobs) == (0, None)


def test_the_checkpoints_end_tokens_stop_a_sequence_unless_ignored():
    assert accept().params.stop_token_ids == (1, 5)
    assert accept(params=SamplingParams(stop_token_ids=[9, 5, 9])).params.stop_token_ids == (1, 5, 9)
    assert accept(params=SamplingParams(stop_token_ids=[9], ignore_eos=True)).params.stop_token_ids == (9,)


def test_the_tokenizers_end_token_ends_a_sequence_too():
    backend = byte_level_bpe()
    backend.add_special_tokens(["<|stop|>"])
    end, *_ = backend.encode("<|stop|>").ids
    info = replace(INFO, vocab_size=end + 1)
    for name, ends in (("<|stop|>", (1, 5, end)), ("a", (1, 5)), (None, (1, 5))):
        tokenizer = Tokenizer(backend, ChatTemplates({}, {}), name)
        assert accept(info=info, tokenizer=tokenizer).params.stop_token_ids == ends
        assert accept(tokenizer=tokenizer).params.stop_token_ids == (1, 5)
    twice = replace(info, defaults=GenerationDefaults(eos_token_ids=(1, end)))
    tokenizer = Tokenizer(backend, ChatTemplates({}, {}), "<|stop|>")
    assert accept(info=twice, tokenizer=tokenizer).params.stop_token_ids == (1, end)


def test_end_tokens_that_the_model_cannot_make_are_left_out():
    info = replace(INFO, defaults=GenerationDefaults(eos_token_ids=(1, 420)))
    assert accept(info=info).params.stop_token_ids == (1,)


def test_a_default_that_no_request_may_have_is_the_checkpoints_fault():
    info = replace(INFO, defaults=GenerationDefaults(top_p=1.5))
    with pytest.raises(CheckpointError, match=r"generation_config\.json in /models/m: top_p"):
        InputProcessor(TOKENIZER, info)


def test_a_servers_defaults_go_before_the_checkpoints_and_a_requests_own_values_before_both():
    info = replace(INFO, defaults=GenerationDefaults(temperature=0.5, top_k=9))
    processor = InputProcessor(TOKENIZER, info, default_sampling={"temperature": 0.7, "min_p": 0.1})
    given = SamplingParams(min_p=0.2)
    params = processor.make_request([1], given, request_id="r", arrival=0.0).params
    assert (params.temperature, params.top_k, params.min_p, params.top_p) == (0.7, 9, 0.2, 1.0)


def seeds(info, count=3):
    input_processor = InputProcessor(TOKENIZER, info)
    return [input_processor.make_request([1], None, request_id="r", arrival=0.0).params.seed for _ in range(count)]


def test_requests_without_a_seed_get_different_ones_that_the_engines_seed_fixes():
    assert len(set(seeds(INFO) + seeds(INFO))) == 6
    fixed = replace(INFO, seed=7)
    assert seeds(fixed) == seeds(fixed)
    assert len(set(seeds(fixed) + seeds(replace(INFO, seed=8)))) == 6
    assert all(0 <= seed < 2**64 for seed in seeds(INFO, 50))


def test_what_a_token_limit_of_the_batch_could_never_admit_is_refused():
    info = replace(INFO, max_batch_total_tokens=20)
    longest = 20 - len(accept(info=info).prompt_token_ids)
    assert accept(params=SamplingParams(n=9, max_tokens=longest), info=info).params.n == 9
    with pytest.raises(InvalidRequestError, match="max_batch_total_tokens") as refused:
        accept(params=SamplingParams(max_tokens=longest + 1), info=replace(info, max_model_len=40))
    assert refused.value.param == "max_tokens"
