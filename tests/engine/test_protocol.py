"""Messages survive the wire unchanged."""

from dataclasses import replace

import pytest

from penstock.api.request import ErrorReason, FinishReason, PromptPart, Request, SequenceOutput, TokenLogprob
from penstock.api.sampling_params import Beams, ResolvedParams
from penstock.checkpoint.generation_config import GenerationDefaults
from penstock.config.engine_config import EngineConfig
from penstock.engine import protocol
from penstock.engine.info import EngineInfo, EngineStats
from penstock.engine.protocol import Add, Failed, Finish, Launch, Ping, Pong, Ready, Shutdown, StepOutputs

PARAMS = ResolvedParams(2, 0.7, 40, 0.9, 0.05, 2**64 - 1, 16, 1, (2, 5), 3)
CONTROLS = {
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "share_penalty": 0.1,
    "logit_bias": ((5, -100.0), (7, 1.5)),
    "banned": ((3,), (4, 5, 6)),
    "allowed_token_ids": (1, 2),
}
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


@pytest.mark.parametrize(
    "message",
    [
        Add(Request("a", (1, 2, 3), PARAMS, arrival=1.25, priority=-3, namespace="tenant")),
        Add(Request("a", (1,), replace(PARAMS, beams=Beams(4, 0.5, "never"), prompt_logprobs=2), arrival=1.0)),
        Add(Request("a", (1,), replace(PARAMS, beams=Beams(4, 0.5, True)), arrival=1.0)),
        Add(Request("a", (1,), replace(PARAMS, **CONTROLS), arrival=1.0)),
        Finish("a", None, FinishReason.ABORT),
        Finish("ü", 1, FinishReason.STOP),
        Ping(),
        Shutdown(),
    ],
)
def test_what_the_server_says_reaches_the_engine_unchanged(message):
    assert protocol.decode_to_engine(protocol.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        Ready(EngineInfo("m", "/m", 100, 64, 8, None, GenerationDefaults((1, 2), 0.0), "plan", 10, 16)),
        StepOutputs(
            [
                SequenceOutput("a", 0, [7], [TokenLogprob(7, -0.1, ((7, -0.1), (9, -2.5)))], None, None, 2.5, 16),
                SequenceOutput("a", 1, [], None, FinishReason.ERROR, "late", error_reason=ErrorReason.EXPIRED),
                SequenceOutput("a", 0, [], prompt=PromptPart(3, [TokenLogprob(7, -float("inf"))])),
                SequenceOutput("a", 0, [7], finish_reason=FinishReason.STOP, score=-0.25),
            ],
            STATS,
        ),
        Pong(STATS),
    ],
)
def test_what_the_engine_says_reaches_the_server_unchanged(message):
    assert protocol.decode_from_engine(protocol.encode(message)) == message


def test_last_words_are_read_as_they_were_left():
    failed = Failed("no such folder", mistake=True)
    assert protocol.decode_failed(protocol.encode(failed)) == failed


def test_the_launch_of_an_engine_is_one_line_whatever_its_options_hold():
    config = EngineConfig.from_options(model="a\nfolder", kv_cache_memory="8GiB", threads=2)
    line = protocol.encode_launch(Launch(config, "module:Core", "/tmp/a"))
    assert b"\n" not in line
    assert protocol.decode_launch(line).config == config
