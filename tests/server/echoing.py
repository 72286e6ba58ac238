"""The application over an engine that says the prompt again: so a test says the answer, by OpenAI's real client."""

import asyncio
import contextlib
import json
import time
from dataclasses import replace

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.api.request import FinishReason, SequenceOutput, TokenLogprob
from penstock.config.engine_config import EngineConfig
from penstock.fleet.link import EngineLink
from penstock.frontend.client import AsyncEngine
from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from penstock.system.start import Start
from tests.engine.rule_core import RuleCore

END = 0
HARMONY_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|call|>"]
SPECIAL = ["<|end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[THINK]", "[/THINK]", *HARMONY_MARKS]
SAY = "{{ messages[-1].content }}{% if opened %}<think>\n{% endif %}"
HERMES = SAY + "{# <tool_call> </think> #}{% if enable_thinking %}{% endif %}"
MISTRAL = SAY + "{# [TOOL_CALLS] [ARGS] [/THINK] #}"
LLAMA = SAY + "{# <|python_tag|> #}"
HARMONY = SAY + "{# <|channel|>analysis <|end|> #}"
PLAIN = SAY
SHOW = "{{ messages | tojson }}{# <tool_call> #}"
"""The answer is the messages that the template got, as JSON."""


class EchoCore(RuleCore):
    """Each answer is its prompt once more, and an end-of-text token."""

    def __init__(self, config: EngineConfig, start: Start) -> None:
        super().__init__(config, start)
        self.info = replace(self.info, max_model_len=16_384, num_blocks=4096)

    def step(self, begin):
        self._steps += 1
        begin(len(self._running), [self._places[request_id] for request_id, _ in self._running])
        outputs, self._ended = self._ended, []
        for key, (request, done) in list(self._running.items()):
            prompt = request.prompt_token_ids
            token, stop = (END, True) if done == len(prompt) else (prompt[done], False)
            last = done + 1 == request.params.max_tokens
            reason = FinishReason.STOP if stop else FinishReason.LENGTH if last else None
            logprobs = None if request.params.logprobs is None else [TokenLogprob(token, -0.5)]
            outputs.append(SequenceOutput(*key, [token], logprobs, reason, None, time.monotonic()))
            self._running[key] = (request, done + 1)
            if reason is not None:
                del self._running[key]
        return outputs


def write_checkpoint(folder, template, more=()):
    """A checkpoint whose tokenizer has a token for each byte, and special ones: these and `more`."""
    special = [*SPECIAL, *more]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    (folder / "config.json").write_text("{}")
    return folder


@contextlib.contextmanager
def echoing(checkpoints, config=None):
    """A function that runs `talk(OpenAI's client, http)` against a server of a checkpoint; each is started once.

    Args:
        checkpoints: folders by name.
    """
    loop, opened = asyncio.new_event_loop(), {}

    async def start(name):
        engine_config = EngineConfig.from_options(model=str(checkpoints[name]))
        engine = await AsyncEngine.start(engine_config, EngineLink(engine_config, f"{__name__}:EchoCore"))
        transport = httpx.ASGITransport(create_app(engine, config or ServerConfig()))
        http = httpx.AsyncClient(transport=transport, base_url="http://penstock")
        return (
            engine,
            http,
            openai.AsyncOpenAI(base_url="http://penstock/v1", api_key="x", http_client=http, max_retries=0),
        )

    def run(name, talk):
        if name not in opened:
            opened[name] = loop.run_until_complete(start(name))
        _, http, client = opened[name]
        return loop.run_until_complete(asyncio.wait_for(talk(client, http), 60))

    try:
        yield run
    finally:
        for engine, _, client in opened.values():
            loop.run_until_complete(client.close())
            loop.run_until_complete(engine.close())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
