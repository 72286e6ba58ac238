"""Parameters of requests to begin from."""

from dataclasses import replace

from penstock.api.sampling_params import ResolvedParams

NEUTRAL = ResolvedParams(
    n=1,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    seed=0,
    max_tokens=100,
    min_tokens=0,
    stop_token_ids=(),
    logprobs=None,
)
GREEDY = replace(NEUTRAL, temperature=0.0)
