"""A gateway on a real socket, with an engine that says what a test wants."""

import asyncio
from dataclasses import replace
from typing import Any

import openai

from actors.config import EpisodesRequest
from actors.gateway.calls import Gateway
from actors.gateway.http import create_app
from actors.gateway.server import Server
from actors.gateway.session import Drawn, Limits
from actors.gateway.standalone import StandaloneGateway
from tests.chat_models import chat_tokenizer, split
from volley.gateway import GatewaySpec

TOKENIZER = chat_tokenizer()
EOS = TOKENIZER.eos_token_id
USER: Any = {"role": "user", "content": "what is 2 + 2?"}


class ScriptedEngine:
    """Answers with each of ``says``, in an encoding that the tokenizer never makes; None hangs."""

    vocab_size = len(TOKENIZER)

    def __init__(self) -> None:
        self.says: list[str | Exception | None] = []
        self.prompts: list[list[int]] = []
        self.asked: list[dict[str, Any]] = []
        self.hanging = asyncio.Event()
        self.logprob = -0.25

    async def draw(self, prompt: list[int], *, on_tokens: Any, max_tokens: int, **sampling: Any) -> Drawn:
        self.prompts.append(prompt)
        self.asked.append({**sampling, "max_tokens": max_tokens})
        says = self.says.pop(0)
        if isinstance(says, Exception):
            raise says
        if says is None:
            self.hanging.set()
            await asyncio.Event().wait()
        tokens = [*split(TOKENIZER, says or ""), EOS][:max_tokens]
        drawn = Drawn(tokens, [self.logprob] * len(tokens), [7] * len(tokens), stopped=tokens[-1] == EOS)
        for token in tokens if on_tokens else ():
            end = on_tokens([token])
            await asyncio.sleep(0)
            if end is not None:
                return drawn.first(end)
        return drawn


class Served:
    """A gateway on a socket, and clients for its sessions."""

    def __init__(self, spec: GatewaySpec) -> None:
        self.engine = ScriptedEngine()
        self.gateway = Gateway(self.engine, TOKENIZER, [EOS], spec)
        self.clients: list[openai.AsyncOpenAI] = []
        self.server = Server("127.0.0.1")
        self.server.start(create_app(self.gateway, "tiny", [self.server.host]))

    def open(self, n: int = 1, *, seed: int | None = None, rule: Any = "strict", **limits: Any) -> tuple[str, ...]:
        bounds = Limits(**{"calls": 8, "tokens": 400, "context": 2000, **limits})
        keys = self.gateway.open_sessions(EpisodesRequest(1, "p", n, 1.0, 1.0, bounds, seed))
        for key in keys:
            found = self.gateway.find(key)
            found.sampling = replace(found.sampling, rule=rule)
        return keys

    def client(self, *says: str | Exception | None, **opened: Any) -> openai.AsyncOpenAI:
        (key,) = self.open(**opened)
        self.engine.says += says
        self.clients.append(openai.AsyncOpenAI(base_url=self.server.url, api_key=key, max_retries=0, timeout=20))
        return self.clients[-1]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.server.stop()

    def session(self, client: openai.AsyncOpenAI) -> Any:
        return self.gateway._sessions[client.api_key].session


class FreeEngine(ScriptedEngine):
    """An engine that takes the fields of a finished model's gateway."""

    async def draw(self, prompt: list[int], *, more: Any = None, **asked: Any) -> Drawn:
        return await super().draw(prompt, more=dict(more or {}), **asked)


class Standalone(Served):
    """The gateway of a finished model."""

    def __init__(self) -> None:
        self.engine, self.clients = FreeEngine(), []
        self.gateway = StandaloneGateway(self.engine, TOKENIZER, [EOS], GatewaySpec(), context=2000, token=None)
        self.server = Server("127.0.0.1")
        self.server.start(create_app(self.gateway, "tiny", None))

    def open(self, n: int = 1, **_: Any) -> tuple[str, ...]:
        return ("any",) * n


async def ask(client: openai.AsyncOpenAI, *messages: Any, **fields: Any) -> Any:
    """One chat call."""
    return await client.chat.completions.create(model="tiny", messages=list(messages or (USER,)), **fields)
