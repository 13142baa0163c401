"""Serve a finished model through the gateway, in this process: for evaluation tools, and for trying it by hand."""

import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from actors.config import ActorConfig
from actors.environment import engine_environment
from actors.parser_names import check_parsers
from reward_servers.http_gate import LOOPBACK_HOSTS, is_loopback
from services.data.chat import tools_notice
from services.data.tokens import load_tokenizer, model_length
from volley.base import Spec
from volley.errors import VolleyError
from volley.gateway import GatewaySpec
from volley.job import ActorsSpec
from volley.model import ModelSpec
from volley.processes import redirect_output
from volley.scratch import scratch_folder


class ServeSpec(Spec):
    """What to serve and how; the parts are those of a job."""

    model: ModelSpec
    actors: ActorsSpec = ActorsSpec()
    gateway: GatewaySpec = GatewaySpec()


def check_model(spec: ServeSpec) -> tuple[int, str]:
    """The model's length in tokens, and advice. Raises `JobError` for a model or parser that cannot be served."""
    check_parsers(spec.gateway)
    tokenizer = load_tokenizer(spec.model.folder)
    notice = tools_notice(tokenizer, "gateway.tool_parser") if spec.gateway.tool_parser else ""
    return model_length(spec.model.folder), notice


async def serve(
    spec: ServeSpec, name: str, bound: socket.socket, host: str, token: str | None, on_ready: Callable[[str], None]
) -> None:
    """Serve until cancelled.

    Args:
        name: the name under which the model is listed.
        bound: the socket to listen on.
        host: the address it was bound to.
        token: what requests must send as API key; None accepts any.
        on_ready: called with the base URL once requests are answered.

    Raises:
        JobError: the model does not load, or vLLM does not have an option or a parser.
        WorkerDied: the engine ended.
    """
    with _log_file() as log, scratch_folder("serve") as scratch:
        _enter(spec.actors, scratch)
        with _libraries_print_to(log), _imported_for(spec.actors):
            from actors.engine import Engine  # imports vLLM, which reads the environment
        from actors.gateway.http import create_app
        from actors.gateway.server import Server
        from actors.gateway.standalone import StandaloneGateway

        config = ActorConfig(spec.model, spec.actors, None, 0, scratch, gateway=spec.gateway)
        engine = await Engine.start(config, 0, name, log)
        server = Server(host, bound)
        try:
            gateway = StandaloneGateway(
                *(engine, engine.tokenizer, engine.stop_ids, spec.gateway), context=engine.max_model_len, token=token
            )
            hosts = {"[::1]", *LOOPBACK_HOSTS, server.host} if is_loopback(host) else None
            server.start(create_app(gateway, name, hosts))
            on_ready(server.url)
            raise await engine.until_death()
        finally:
            await server.stop()
            await engine.stop()


def _enter(actors: ActorsSpec, scratch: Path) -> None:
    """Give the engine the environment that it has in a run."""
    tempfile.tempdir = str(scratch)
    os.environ |= engine_environment(actors) | {
        "TMPDIR": str(scratch),
        "VLLM_RPC_BASE_PATH": str(scratch),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.__stderr__",
    }


@contextlib.contextmanager
def _log_file() -> Iterator[Path]:
    """A file for what libraries print. It is removed at the end of the block, unless an error names it."""
    descriptor, name = tempfile.mkstemp(prefix="volley-serve-", suffix=".log")
    os.close(descriptor)
    keep = False
    try:
        yield Path(name)
    except VolleyError as error:
        keep = name in str(error)
        raise
    finally:
        if not keep:
            Path(name).unlink(missing_ok=True)


@contextlib.contextmanager
def _libraries_print_to(log: Path) -> Iterator[None]:
    """Send what libraries and child processes print to ``log``, until this process has ended.

    Native libraries print even after the interpreter's end. What Python prints behind the block goes where it went
    before: it is Volley's.
    """
    own = [os.fdopen(os.dup(descriptor), "w", buffering=1) for descriptor in (1, 2)]
    redirect_output(log)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = own


@contextlib.contextmanager
def _imported_for(actors: ActorsSpec) -> Iterator[None]:
    """Within the block, vLLM is imported as an engine with these resources needs it."""
    from actors.uncompiled import uncompiled  # imports torch

    with uncompiled() if actors.gpus == 0 else contextlib.nullcontext():
        yield
