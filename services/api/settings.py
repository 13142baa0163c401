"""The settings of an API server, which ``python -m services.api.serve`` reads as JSON."""

from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from reward_servers.http_gate import is_loopback
from volley.base import Spec
from volley.ports import DEFAULT_PORT
from volley.webhooks import AllowedHost

EVERYTHING = "*"


class ApiSettings(Spec):
    """Settings of one API server.

    A server on a loopback address without ``admin_token`` lets every client do everything, because only processes on
    this machine reach it. Any other server requires tokens.
    """

    redis_url: str
    host: str = "127.0.0.1"
    port: int = Field(DEFAULT_PORT, ge=0, le=65535)
    runs: Path = Field(Path("runs"), description="folder in which run folders are created, as seen by the drivers")
    ray_address: str | None = Field(None, description="http://host:port of Ray's job server")
    admin_token: SecretStr | None = Field(None, description="a token with every scope, for creating the others")
    hosts: tuple[str, ...] = Field((), description="host names of the server, besides the loopback ones")
    allow_code: tuple[str, ...] = Field(
        (), description="modules and packages whose code jobs may name, such as my_scorers; * allows everything"
    )
    scorer_env: tuple[str, ...] = Field(
        ("VOLLEY_SCORER_",),
        description="prefixes of the environment variables whose values a job's scorer may send to its server",
    )
    tracking_hosts: tuple[str, ...] = Field(
        (), description="hosts, besides the loopback ones, that a job's MLflow sink may name; * allows any"
    )
    webhook_hosts: tuple[AllowedHost, ...] = Field(
        (), description="hosts that a job's notify may name; * allows all with public addresses"
    )
    check_jobs: bool = Field(True, description="check a job's data, tokenizer and scorer before accepting it")
    check_seconds: float = Field(90.0, gt=0, description="time limit of that check, in seconds")
    max_body: int = Field(1 << 20, ge=1024, description="size limit of a request's body, in bytes")
    body_seconds: float = Field(20.0, gt=0, description="time limit for a request's body to arrive, in seconds")
    head_seconds: float = Field(10.0, gt=0, description="time limit for a request's headers to arrive, in seconds")
    rate: float = Field(500.0, gt=0, description="requests per second of one token, or of one address without a token")
    burst: int = Field(1000, ge=1, description="requests that may arrive at once")
    live_clients: int = Field(1000, ge=1, description="live views open at once")
    cache_bytes: int = Field(256 << 20, ge=1 << 20, description="memory for cached metrics of all runs, in bytes")
    redis_retries: int = Field(3, ge=0, description="retries before a request is answered with 503")
    dashboard: Path = Field(Path(__file__).parent.parent / "dashboard", description="static files served at /")

    @model_validator(mode="after")
    def _token_is_long(self) -> Self:
        if self.admin_token is not None and len(self.admin_token.get_secret_value()) < 16:
            raise ValueError("admin_token has fewer than 16 characters: use 32 random ones")
        return self

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    @property
    def guarded(self) -> bool:
        """Whether every request needs a token."""
        return self.admin_token is not None or not self.loopback

    @property
    def allows_all_code(self) -> bool:
        """Whether jobs may name any code."""
        return EVERYTHING in self.allow_code
