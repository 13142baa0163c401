"""One episode of a job's program, with a stub in place of the model: what `volley check` shows of it.

The gateway is the run's own, so what is recorded of the calls is what a run would record.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actors.config import EpisodesRequest
from actors.gateway.calls import Gateway, OnTokens
from actors.gateway.groups import EpisodeReport
from actors.gateway.http import create_app
from actors.gateway.messages import Message
from actors.gateway.rendering import Renderer, Setting, Tokenizer
from actors.gateway.server import Server
from actors.gateway.session import Drawn, End, Limits
from actors.stops import stop_token_ids
from environments.outside.interpreter import kill_group
from environments.outside.process import GRACE_SECONDS, Tail, exited
from environments.records import Outcome
from services.coordinator.episode_figures import end_of
from services.coordinator.episodes import verdict_of
from services.data.chat import tools_notice
from services.data.tokens import load_tokenizer
from volley.errors import JobError
from volley.gateway import GatewaySpec
from volley.job import EvalJob, RFTJob, RLJob
from volley.records import Group, ModelCall, Prompt
from volley.rollout import Rollout
from volley.sampling import EvalSampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_SECONDS = 60.0  # an episode against a stub that answers at once should need no more
SAYS = "This is the answer of a stub."
OWN_ADDRESS = "make the calls with the base_url and api_key that the program is given"
NO_CALL = f"No call of the model was answered until then: {OWN_ADDRESS}"
UNPARSED = (
    "the program sends tools, but no gateway.tool_parser is set, so calls of tools stay text in the model's answers: "
    "write gateway: {tool_parser: hermes}, or the name that vLLM has for the model's format, unless the program finds "
    "the calls in the text itself"
)
LINES = 12  # of the program's own output in an error


@dataclass(frozen=True, slots=True)
class EpisodeTrial:
    """One episode.

    Attributes:
        prompt: the prompt's id.
        status: of the verdict; "" if the job's scorer is to judge the last answer.
        sampled: tokens that the stub answered with.
        observed: tokens of context between its answers.
        notes: advice on what the episode showed.
    """

    target: str
    prompt: str
    seconds: float
    status: str
    reward: float | None
    answer: str | None
    detail: str
    sampled: int
    observed: int
    calls: tuple[ModelCall, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        earned = f"reward {self.reward:g} ({self.status})" if self.status else "no reward: the scorer judges the answer"
        answer = "" if self.answer is None else f", answer {self.answer!r}"
        detail = f", {self.detail}" if self.detail else ""
        made = f"{_counted(len(self.calls), 'call')} of the model, {_counted(self.sampled, 'token')} sampled"
        lines = [
            f"{self.target} ran one episode with prompt {self.prompt} and a stub as model, in {self.seconds:.1f} s: "
            f"{made}, {self.observed} observed; {earned}{answer}{detail}"
        ]
        for number, call in enumerate(self.calls, 1):
            lines += [
                f"  call {number}, {_counted(call.observed, 'token')} of context: {call.context!r}",
                f"    -> {call.answer!r}",
            ]
        return "\n".join(lines)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def try_program(
    job: RLJob | RFTJob | EvalJob, rollout: Rollout, prompt: Prompt, *, length: int, says: str = ""
) -> EpisodeTrial:
    """Run one episode with the row of ``prompt``, in a process of its own.

    Args:
        length: longest prompt plus answer of a call, in tokens.
        says: what the stub answers every call with, parsed as the job's `gateway` says; "" for a sentence of its own.

    Raises:
        JobError: the program raised, hung, ended its process, made no call or rewrote the history, or its first prompt
            exceeds the context; or vLLM has no such parser.
    """
    return asyncio.run(_try(job, rollout, prompt, length, says))


async def _try(job: RLJob | RFTJob | EvalJob, rollout: Rollout, prompt: Prompt, length: int, says: str) -> EpisodeTrial:
    tokenizer = load_tokenizer(job.model.folder)
    stops = stop_token_ids(job.model.folder, tokenizer)
    # The stub's own sentence has nothing to parse, so it does without the seconds that importing vLLM takes.
    spec = job.gateway if says else GatewaySpec(sampling=job.gateway.sampling)
    gateway = Gateway(StubEngine(tokenizer, stops, says or SAYS), tokenizer, stops, spec)
    gateway.renderer = seen = ToolWatch(tokenizer, stops)
    sampling = job.sampling
    top_p = sampling.top_p if isinstance(sampling, EvalSampling) else 1.0
    limits = Limits(rollout.max_calls, sampling.max_tokens, length, rollout.on_rewrite)
    keys = gateway.open_sessions(EpisodesRequest(0, prompt.id, 1, sampling.temperature, top_p, limits))
    async with _served(gateway) as url:
        row = {**prompt.reference, "id": prompt.id, "prompt": prompt.text}
        seconds = min(rollout.timeout_s, TRIAL_SECONDS)
        program = {
            "rollout": rollout.model_dump(mode="json"),
            "workers": job.environment_workers.model_dump(mode="json"),
        }
        asked = {**program, "row": row, "base_url": url, "api_key": keys[0], "timeout_s": seconds}
        outcome, output = await _in_process(asked, seconds + job.environment_workers.start_deadline_s)
        group, (report,) = await gateway.close_sessions(keys, group_id=0, prompt_id=prompt.id, actor="stub")
    tried = _described(job, rollout, prompt, outcome, report, group, output)
    return replace(tried, notes=_notes_on_tools(tokenizer, job.gateway)) if seen.saw_tools else tried


def _notes_on_tools(tokenizer: "PreTrainedTokenizerBase", spec: GatewaySpec) -> tuple[str, ...]:
    unseen = tools_notice(tokenizer, "the tools that the program sends")
    return tuple(note for note in (unseen, UNPARSED if spec.tool_parser is None else "") if note)


def _described(
    job: RLJob | RFTJob | EvalJob,
    rollout: Rollout,
    prompt: Prompt,
    outcome: Outcome,
    report: EpisodeReport,
    group: Group,
    output: str,
) -> EpisodeTrial:
    verdict = verdict_of(outcome, report, rollout.values)
    if verdict is None and job.scorer is None:
        problem = "the program returned no reward, and the job has no scorer: return one, or write scorer"
    elif report.calls == 0 and report.end is End.CONTEXT:
        problem = _too_long(rollout)
    elif verdict is not None and verdict.reward is None:
        problem = _advised(end_of(outcome, report), verdict.detail, report.calls) + (f"\n{output}" if output else "")
    else:
        return EpisodeTrial(
            target=rollout.program,
            prompt=prompt.id,
            seconds=outcome.seconds,
            status=str(verdict.status) if verdict else "",
            reward=verdict.reward if verdict else None,
            answer=verdict.answer if verdict else None,
            detail=verdict.detail if verdict else outcome.detail,
            sampled=int(group.lengths_n[0]),
            observed=len(group.observation_S),
            calls=group.calls[0],
        )
    raise JobError(f"rollout.target {rollout.program!r}, in an episode with prompt {prompt.id} and a stub: {problem}")


def _too_long(rollout: Rollout) -> str:
    """What to do about a first prompt that leaves no room for an answer."""
    if rollout.max_context is None:
        return "its first prompt is as long as the model's context: shorten the prompt, or take another model"
    return (
        f"its first prompt leaves no room for an answer in {rollout.max_context} tokens of context: raise "
        "rollout.max_context, or shorten the prompt"
    )


def _advised(end: str, detail: str, calls: int) -> str:
    match end:
        case "raised" if calls == 0:
            return f"{detail}. {NO_CALL}"
        case "raised":
            return f"{detail}. If it does so only because of what the stub says, try volley check --answer TEXT"
        case "timeout":
            late = f"{detail}, though the stub answers at once: give what it waits for a time limit"
            return late if calls else f"{late}. {NO_CALL}"
        case "no_call":
            return f"{detail}: {OWN_ADDRESS}"
        case _:
            return detail


class ToolWatch(Renderer):
    """Notes whether any prompt had tools."""

    saw_tools = False

    def prompt(self, messages: Sequence[Message], setting: Setting, *, room: int | None = None) -> list[int]:
        """As `Renderer.prompt`."""
        self.saw_tools = self.saw_tools or bool(setting.tools)
        return super().prompt(messages, setting, room=room)


class StubEngine:
    """Answers every call with the same text at once. It has no weights, so all log-probs are 0."""

    def __init__(self, tokenizer: Tokenizer, stops: list[int], says: str) -> None:
        self._tokens = [*tokenizer(says, add_special_tokens=False)["input_ids"], *stops[:1]]
        self.vocab_size = 2**31 - 1

    async def draw(
        self,
        prompt: list[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        on_tokens: OnTokens | None,
    ) -> Drawn:
        tokens = self._tokens[:max_tokens]
        end = on_tokens(tokens) if on_tokens else None
        drawn = Drawn(tokens, [0.0] * len(tokens), [0] * len(tokens), stopped=len(tokens) == len(self._tokens))
        return drawn if end is None else drawn.first(end)


@contextlib.asynccontextmanager
async def _served(gateway: Gateway) -> AsyncIterator[str]:
    server = Server("127.0.0.1")
    try:
        server.start(create_app(gateway, "stub", [server.host]))
        yield server.url
    finally:
        await server.stop()


async def _in_process(asked: Mapping[str, Any], seconds: float) -> tuple[Outcome, str]:
    """The outcome of the episode, and the last lines that its process printed.

    Raises:
        JobError: the program could not be started.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "environments.trial"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # one signal ends it with all that it started
    )
    in_time, answer, output = await _talk(child, json.dumps({**asked, "import_path": sys.path}).encode(), seconds)
    if not in_time:
        return Outcome(failure=f"the program did not end within {seconds:g} s", kind="timeout"), output
    if not answer.endswith(b"\n"):
        return Outcome(failure=f"the program ended its process ({child.returncode})", kind="lost"), output
    fields = json.loads(answer)
    if "error" in fields:
        raise JobError(f"{fields['error']}\n{output}".rstrip())
    return Outcome(**fields), output


async def _talk(child: asyncio.subprocess.Process, request: bytes, seconds: float) -> tuple[bool, bytes, str]:
    """Whether the child ended within ``seconds``, the line that it answered with, and the last lines that it printed.

    What the program has started may hold the child's pipes, so nothing waits for their end.
    """
    printed, answer = Tail(), bytearray()
    reading = {asyncio.create_task(printed.take_all(child.stderr)), asyncio.create_task(_read_line(child, answer))}
    ending = asyncio.create_task(exited(child.pid))
    try:
        if child.stdin is not None:
            child.stdin.write(request)
            child.stdin.close()
        in_time = bool((await asyncio.wait({ending}, timeout=seconds))[0])
    finally:
        kill_group(child.pid)
    waiting = {*reading, ending, asyncio.create_task(child.wait())}
    _, late = await asyncio.wait(waiting, timeout=GRACE_SECONDS)  # for what it wrote before
    for task in late:
        task.cancel()
    child._transport.close()  # type: ignore[attr-defined] # no public call lets go of pipes that others hold
    lines = printed.text.decode(errors="replace").splitlines()[-LINES:]
    return in_time, bytes(answer), "\n".join(lines)


async def _read_line(child: asyncio.subprocess.Process, line: bytearray) -> None:
    """Read a line of any length into ``line``."""
    while child.stdout is not None and not line.endswith(b"\n") and (piece := await child.stdout.read(1 << 16)):
        line += piece
