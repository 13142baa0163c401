"""What an API server is told at its start. ``python -m services.api.serve`` reads it as JSON."""

import ipaddress
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator

from volley.base import Spec

EVERYTHING = "*"


class ApiSettings(Spec):
    """One API server.

    A server on a loopback address without ``admin_token`` lets everybody who reaches it do everything: they are
    processes of this machine. Any other server asks for tokens.
    """

    redis_url: str
    host: str = "127.0.0.1"
    port: int = Field(8265, ge=0, le=65535)
    runs: Path = Field(Path("runs"), description="folder that run folders are made in, as the drivers see it")
    ray_address: str | None = Field(None, description="http://host:port of Ray's job server")
    admin_token: SecretStr | None = Field(None, description="a token with every scope, to make the others with")
    hosts: tuple[str, ...] = Field((), description="names the server is known by, beside the loopback ones")
    allow_code: tuple[str, ...] = Field(
        (), description="modules and packages that jobs may name code from, such as my_scorers; * allows everything"
    )
    scorer_env: tuple[str, ...] = Field(
        ("VOLLEY_SCORER_",), description="beginnings of environment variables whose value a job's scorer may send away"
    )
    check_jobs: bool = Field(True, description="read a job's data, tokenizer and scorer before it is accepted")
    check_seconds: float = Field(90.0, gt=0, description="longest such check")
    max_body: int = Field(1 << 20, ge=1024, description="bytes of one request's body")
    body_seconds: float = Field(20.0, gt=0, description="a body must have arrived within")
    head_seconds: float = Field(10.0, gt=0, description="a request's head must have arrived within")
    rate: float = Field(500.0, gt=0, description="requests a second of one token, or of one address without a token")
    burst: int = Field(1000, ge=1, description="requests that may come at once")
    live_clients: int = Field(1000, ge=1, description="live views at once")
    cache_bytes: int = Field(256 << 20, ge=1 << 20, description="for metrics kept in memory, over all runs")
    redis_retries: int = Field(3, ge=0, description="tries before a request is answered with 503")
    dashboard: Path = Field(Path(__file__).parent.parent / "dashboard", description="static files served at /")

    @model_validator(mode="after")
    def _token_is_long(self) -> Self:
        if self.admin_token is not None and len(self.admin_token.get_secret_value()) < 16:
            raise ValueError("admin_token has fewer than 16 characters: take 32 random ones")
        return self

    @property
    def loopback(self) -> bool:
        """Is the server reached from this machine only?"""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def guarded(self) -> bool:
        """Does every request need a token?"""
        return self.admin_token is not None or not self.loopback
