"""No error shows a pattern: each that a job or a request may break has words. Limits of tokens that submit nothing."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from services.api.app import create_app
from services.api.problems import field_problems
from services.api.settings import ApiSettings
from services.jobs.job_file import explain
from volley.job import JOB
from volley.patterns import NAME, WORDS
from volley.state import Limits
from volley.views import NewToken, TokenName

APP = create_app(ApiSettings(redis_url="redis://127.0.0.1:1", redis_retries=0))


def patterns(schema: Any) -> Iterator[str]:
    """The patterns in a JSON schema; a property that is itself called pattern has a schema, not a string."""
    if isinstance(schema, dict):
        if isinstance(schema.get("pattern"), str):
            yield schema["pattern"]
        for part in schema.values():
            yield from patterns(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from patterns(part)


def test_every_pattern_of_jobs_and_requests_has_words() -> None:
    found = {*patterns(JOB.json_schema()), *patterns(APP.openapi())}
    assert found == set(WORDS)


@given(st.text(max_size=80))
def test_the_words_of_a_name_say_which_names_are_accepted(text: str) -> None:
    plain = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789")
    fits = 0 < len(text) <= 64 and set(text) <= plain | {".", "-", "_"} and text[0] in plain
    try:
        TypeAdapter(TokenName).validate_python(text)
    except ValidationError as error:
        assert not fits
        (problem,) = field_problems(error)
        assert "pattern" not in problem.detail.partition(", not ")[0]
        assert "^[" not in problem.detail.partition(", not ")[0]
        assert problem.detail.startswith(WORDS[NAME])
    else:
        assert fits


async def test_a_tokens_name_is_explained_in_the_body_and_in_the_path() -> None:
    wanted = "must be at most 64 letters from A to Z, digits, dots, hyphens and underscores, and begin with a letter"
    transport = httpx.ASGITransport(APP)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        made = await http.post("/v1/tokens", json={"name": "Jörg K.", "scope": "read"})
        gone = await http.delete("/v1/tokens/-x")
    assert made.json()["detail"] == f"/name: {wanted} or digit, not 'Jörg K.'"
    assert gone.json()["detail"] == f"path/name: {wanted} or digit, not '-x'"


def test_a_jobs_name_is_explained() -> None:
    with pytest.raises(ValidationError) as caught:
        JOB.validate_python({"kind": "sft", "name": "my job"})
    (line,) = [line for line in explain("job.yaml", caught.value).splitlines() if "name:" in line]
    assert line == f"job.yaml: name: {WORDS[NAME]}, not 'my job'"


limits = st.builds(
    Limits,
    runs=st.none() | st.integers(0, 3),
    cpus=st.none() | st.floats(0, 4),
    gpus=st.none() | st.floats(0, 4),
    priority=st.integers(-10, 10),
)


@given(limits, st.sampled_from(["read", "operate", "admin"]))
def test_a_token_that_submits_nothing_has_no_limits(given_limits: Limits, scope: str) -> None:
    token = {"name": "ci", "scope": scope, "limits": given_limits.model_dump()}
    without = Limits().model_dump()
    useless = [name for name, value in given_limits.model_dump().items() if value != without[name]]
    if scope != "read" or not useless:
        assert NewToken.model_validate(token).limits == given_limits
        return
    with pytest.raises(ValidationError, match="submits no runs to limit: give it scope operate, or no") as caught:
        NewToken.model_validate(token)
    assert re.findall(r"no (runs|cpus|gpus|priority)\b", str(caught.value).partition("operate")[2]) == useless
