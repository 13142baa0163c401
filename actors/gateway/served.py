"""The gateway of one actor, served: what the actor's own methods need of it."""

from actors.config import EpisodesRequest, OpenedSessions
from actors.engine import Engine
from actors.gateway.calls import Gateway
from actors.gateway.groups import EpisodeReport
from actors.gateway.http import create_app
from actors.gateway.server import Server
from volley.gateway import GatewaySpec
from volley.records import Group


class ServedGateway:
    """Sessions on ``engine`` that programs on the run's nodes can use, until `stop`.

    Args:
        model: the name under which the model is listed.
        host: this node's address.

    Raises:
        JobError: vLLM has no parser of the name that ``spec`` has.
    """

    def __init__(self, engine: Engine, spec: GatewaySpec, model: str, host: str) -> None:
        self._gateway = Gateway(engine, engine.tokenizer, engine.stop_ids, spec)
        self._server = Server(host)
        self._server.start(create_app(self._gateway, model, [self._server.host]))

    def open(self, request: EpisodesRequest) -> OpenedSessions:
        """Open the sessions of a group."""
        return OpenedSessions(self._server.url, self._gateway.open_sessions(request))

    async def close(
        self, request: EpisodesRequest, opened: OpenedSessions, actor: str
    ) -> tuple[Group, tuple[EpisodeReport, ...]]:
        """End the sessions and return what they recorded."""
        return await self._gateway.close_sessions(
            opened.keys, group_id=request.group_id, prompt_id=request.prompt_id, actor=actor
        )

    async def stop(self) -> None:
        """Close the server."""
        await self._server.stop()
