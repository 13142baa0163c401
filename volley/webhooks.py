"""Configuration of webhooks: which servers hear of a run's end, its pauses, and of metrics that break a rule."""

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator, model_validator

from volley.base import Spec
from volley.hosts import plain_host
from volley.metrics import EVALUATION_FIGURES, METRICS, SUPERVISED, family, matches

EVALUATION = "evaluation/"  # the prefix of an evaluation's metrics
SECRET_PREFIX = "VOLLEY_WEBHOOK_"  # of variables, because a job must not have the server sign with any other
MOST_VALUES = 1000
UNMEASURED = frozenset({"step", "version", "time", "lag_histogram"})

ANY_HOST = "*"

State = Literal["failed", "paused", "done"]


def allowed_host(host: str) -> str:
    """A host that an operator lets runs call, or ``*``. Raises `ValueError`, which says what to write."""
    return host if host == ANY_HOST else plain_host(host)


AllowedHost = Annotated[str, AfterValidator(allowed_host)]


def evaluated(metric: str) -> str | None:
    """The name of an evaluation's metric without its prefix; None for a metric of steps."""
    return metric.removeprefix(EVALUATION) if metric.startswith(EVALUATION) else None


def _known(metric: str) -> str:
    if (name := evaluated(metric)) is not None:
        plain = re.sub(r"^by_tag/[^/]+/[^/]+/", "", name)
        known = any(matches(plain, each) for each in EVALUATION_FIGURES)
        choices = [EVALUATION + each for each in EVALUATION_FIGURES]
    else:
        table, _, label = metric.partition("/")
        known = family(table) is not None and table not in UNMEASURED and bool(label) == table.endswith("_by_tag")
        choices = [each for each in METRICS if each not in UNMEASURED]
    if not known:
        near = difflib.get_close_matches(metric, choices, 3)
        hint = f"did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them"
        raise ValueError(f"{metric} is no metric of steps or evaluations: {hint}")
    return metric


MetricName = Annotated[str, AfterValidator(_known)]


class ChangeRule(Spec):
    """Compares a metric's newest value with the highest (``fell``) or lowest (``rose``) of the values before it."""

    kind: Literal["fell", "rose"]
    metric: MetricName = Field(description="evaluation/pass_at_16, or a metric of steps such as pass_at_16")
    by: float = Field(gt=0, description="in the metric's unit: 0.05 is 5 points of pass@k")
    window: int = Field(5, ge=1, le=MOST_VALUES, description="earlier values: of evaluations, or of steps")


class LimitRule(Spec):
    """Compares the mean of a metric's newest values with a limit."""

    kind: Literal["above", "below"]
    metric: MetricName = Field(description="as in the rules on changes")
    limit: float
    window: int = Field(1, ge=1, le=MOST_VALUES, description="newest values: of evaluations, or of steps")


class NoStepRule(Spec):
    """Watches for a run that starts or trains without finishing a step."""

    kind: Literal["no_step"] = "no_step"
    seconds: float = Field(ge=10, description="longest time without a step, evaluations included")


MetricRule = ChangeRule | LimitRule
Rule = Annotated[ChangeRule | LimitRule | NoStepRule, Field(discriminator="kind")]


class WebhookSpec(Spec):
    """A server that gets a signed POST when something happens to the run."""

    url: str = Field(description="http(s)://host/path; whoever may read the run sees it")
    states: tuple[State, ...] = Field(("failed", "paused", "done"), description="states of the run to report")
    rules: tuple[Rule, ...] = Field((), description="each is reported when it begins to hold")
    secret_env: str | None = Field(
        None, description=f"variable with the signing key, {SECRET_PREFIX}...; null sends unsigned"
    )

    @field_validator("secret_env")
    @classmethod
    def _name_fits(cls, name: str | None) -> str | None:
        if name is not None and not re.fullmatch(rf"{SECRET_PREFIX}[A-Z0-9_]+", name):
            raise ValueError(f"write the name of a variable such as {SECRET_PREFIX}KEY: others are not used to sign")
        return name

    @field_validator("url")
    @classmethod
    def _url_fits(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.fragment:
            raise ValueError("write http://host:port/path or https://host/path")
        if not url.isascii() or any(each.isspace() for each in url):
            raise ValueError("contains characters that a URL must encode, as in %20")
        if "@" in parts.netloc:
            raise ValueError(
                "contains a user name or password, but run records are not private: sign with secret_env instead"
            )
        written = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        if not re.fullmatch(rf"{re.escape(written)}(:\d*)?", parts.netloc.lower()):  # urlsplit takes a[::1]x for ::1
            raise ValueError("has more than a host and a port between // and /: write http://host:port/path")
        if parts.port == 0:
            raise ValueError("port 0 is no port")
        plain_host(parts.hostname)
        return url

    @model_validator(mode="after")
    def _reports_something(self) -> "WebhookSpec":
        if not self.states and not self.rules:
            raise ValueError("would never be called: give it states, rules, or both")
        return self

    @property
    def host(self) -> str:
        """The host's name or address, in lower case."""
        return urlsplit(self.url).hostname or ""


def check_webhooks(webhooks: Sequence[WebhookSpec], kind: str, ks: Collection[int] | None) -> None:
    """Reject rules about what a job of this kind never reports.

    Args:
        ks: the k that its evaluations estimate; None if it has no evaluations.

    Raises:
        ValueError: names the change to make.
    """
    for rule in (rule for webhook in webhooks for rule in webhook.rules):
        if isinstance(rule, NoStepRule):
            if kind == "eval":
                raise ValueError("notify: an eval job has no steps: remove the rule no_step")
        elif (name := evaluated(rule.metric)) is not None:
            _check_evaluated(rule.metric, name, kind, ks)
        else:
            _check_of_steps(rule.metric, kind)


def _check_evaluated(metric: str, name: str, kind: str, ks: Collection[int] | None) -> None:
    if ks is None:
        remedy = "give it evaluation" if kind == "rl" else "remove the rule"
        raise ValueError(f"notify: {metric} is never reported, because this {kind} job evaluates nothing: {remedy}")
    found = re.search(r"_(?:at|of)_(\d+)$", name)
    if found and int(found[1]) not in ks:
        raise ValueError(f"notify: {metric} is never reported: add {found[1]} to ks, which are {sorted(ks)}")


def _check_of_steps(metric: str, kind: str) -> None:
    if kind == "eval":
        raise ValueError(f"notify: an eval job has no steps: write metric: {EVALUATION}pass_at_<k> instead of {metric}")
    known = family(metric.partition("/")[0])
    if kind != "rl" and (known is None or METRICS[known].when != SUPERVISED):
        raise ValueError(
            f"notify: steps of a job of kind {kind} have no {metric}: docs/metrics.md marks with † what they have"
        )
