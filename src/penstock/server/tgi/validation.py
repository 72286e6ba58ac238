"""TGI's checks of a request, in its order and its words (`Validation::validate` of router/src/validation.rs).

A control of TGI that this server lacks is refused. All other checks are shared by all dialects, in
`frontend.input_processor`.
"""

from penstock.api.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, SamplingParams
from penstock.engine.info import EngineInfo
from penstock.errors import InvalidRequestError, PromptTooLongError
from penstock.server.response_format import structured_of_tgi_grammar
from penstock.server.tgi.schema import GenerateParameters


def check_stream(given: GenerateParameters) -> None:
    """Check that no parameter is set that cannot be streamed; TGI checks these first.

    Raises:
        InvalidRequestError: such a parameter is set.
    """
    if given.best_of not in (None, 1):
        _refuse("best_of", "`best_of` != 1 is not supported when streaming tokens")
    if given.decoder_input_details:
        _refuse("decoder_input_details", "`decoder_input_details` == true is not supported when streaming tokens")


def sampling_params(inputs: str, given: GenerateParameters, info: EngineInfo) -> SamplingParams:
    """Convert to sampling parameters; `max_tokens` stays as the caller set it.

    Raises:
        InvalidRequestError: TGI would refuse the request, or this server does not support it.
    """
    best_of = 1 if given.best_of is None else given.best_of
    sampling = is_sampled(given)
    if not 1 <= best_of <= MAX_N:
        _refuse("best_of", f"`best_of` must be > 0 and <= {MAX_N}. Given: {best_of}")
    if best_of > 1 and not sampling:
        _refuse("best_of", "you must use sampling when `best_of` is > 1")
    _check_distribution(given)
    if given.max_new_tokens == 0:
        _refuse("max_new_tokens", "`max_new_tokens` must be strictly positive")
    if len(given.stop) > MAX_STOP_STRINGS:
        _refuse("stop", f"`stop` supports up to {MAX_STOP_STRINGS} stop sequences. Given: {len(given.stop)}")
    if given.seed is not None and best_of > 1:
        _refuse("seed", "`seed` must not be set when `best_of` > 1")
    if (given.top_n_tokens or 0) > MAX_LOGPROBS:
        _refuse("top_n_tokens", f"`top_n_tokens` must be >= 0 and <= {MAX_LOGPROBS}. Given: {given.top_n_tokens}")
    if not inputs:
        _refuse("inputs", "`inputs` cannot be empty")
    max_input = info.max_model_len - 1
    if given.truncate is not None and not 1 <= given.truncate <= max_input:
        _refuse("truncate", f"`truncate` must be strictly positive and less than {max_input}. Given: {given.truncate}")
    return SamplingParams(
        n=best_of,
        best_of=best_of,  # all of them, the best first
        # open values are TGI's neutral ones, not the checkpoint's
        temperature=(1.0 if given.temperature is None else given.temperature) if sampling else 0.0,
        top_k=given.top_k or 0,
        top_p=1.0 if given.top_p is None else given.top_p,
        min_p=0.0,
        typical_p=1.0 if given.typical_p is None else given.typical_p,
        repetition_penalty=1.0 if given.repetition_penalty is None else given.repetition_penalty,
        share_penalty=given.frequency_penalty or 0.0,  # TGI's is one of shares, not of counts
        seed=given.seed,
        max_tokens=given.max_new_tokens,
        stop=given.stop,
        logprobs=given.top_n_tokens or 0,  # each token comes with its own
        prompt_logprobs=0 if given.decoder_input_details else None,
        structured=None if given.grammar is None else structured_of_tgi_grammar(given.grammar),
    )


def is_sampled(given: GenerateParameters) -> bool:
    """Whether decoding samples rather than being greedy."""
    return given.do_sample or any(
        value is not None for value in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )


def _check_distribution(given: GenerateParameters) -> None:
    if given.temperature is not None and given.temperature <= 0:
        _refuse("temperature", "`temperature` must be strictly positive")
    if given.repetition_penalty is not None and given.repetition_penalty <= 0:
        _refuse("repetition_penalty", "`repetition_penalty` must be strictly positive")
    if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
        _refuse("frequency_penalty", "`frequency_penalty` must be >= -2.0 and <= 2.0")
    if given.top_p is not None and not 0 < given.top_p < 1:
        _refuse("top_p", "`top_p` must be > 0.0 and < 1.0")
    if given.typical_p is not None and not 0 < given.typical_p < 1:
        _refuse("typical_p", "`typical_p` must be > 0.0 and < 1.0")
    if given.top_k is not None and given.top_k <= 0:
        _refuse("top_k", "`top_k` must be strictly positive")


def check_length(num_inputs: int, max_new_tokens: int | None, info: EngineInfo, *, refuse_long: bool) -> None:
    """
    Args:
        refuse_long: whether a `max_new_tokens` beyond the context is refused, as TGI does.

    Raises:
        PromptTooLongError: prompt and answer, or the prompt alone, exceed the context.
    """
    total = info.max_model_len
    if refuse_long and max_new_tokens is not None and num_inputs + max_new_tokens > total:
        raise PromptTooLongError(
            f"`inputs` tokens + `max_new_tokens` must be <= {total}. Given: {num_inputs} `inputs` tokens and "
            f"{max_new_tokens} `max_new_tokens`",
            "inputs",
        )
    if num_inputs > total - 1:
        raise PromptTooLongError(f"`inputs` must have less than {total - 1} tokens. Given: {num_inputs}", "inputs")


def _refuse(param: str, message: str) -> None:
    raise InvalidRequestError(message, param)
