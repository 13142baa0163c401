"""How a group is made by programs: n sessions on one actor, n episodes on one environment worker, n verdicts.

request ─> sessions ─> episodes ──> record of the sessions ─> group
                          │                  │
                          └─ outcomes ───────┴─> verdicts (from the scorer where a program leaves them to it)
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from actors.config import EpisodesRequest, GenerateRequest, OpenedSessions
from actors.gateway.groups import EpisodeReport
from actors.gateway.session import End, Limits
from environments.records import EpisodesDone, Outcome
from reward_servers.scorers.base import infra_error
from services.coordinator.episode_figures import EpisodeFigures, end_of
from services.coordinator.roles import Actors, Environments, RewardWorkers, Sessions
from services.coordinator.turns import ATTEMPTS, MadeGroup, Stage, Turns, make_group
from volley.errors import GroupGone
from volley.records import Prompt, Scores, Verdict, VerdictStatus
from volley.rollout import Rollout
from volley.scoring import RewardValues

_RAN_OUT = {
    End.CALLS: "the model ran out of calls (rollout.max_calls)",
    End.TOKENS: "the model ran out of tokens (sampling.max_tokens)",
    End.CONTEXT: "the model ran out of context (rollout.max_context)",
}


@dataclass(frozen=True, slots=True)
class Episodes:
    """Makes groups by running programs.

    Attributes:
        context: longest prompt plus answer of a call, in tokens.
        scored: whether the job has a scorer, for programs that return None.
    """

    rollout: Rollout
    sessions: Sessions
    environments: Environments
    context: int
    scored: bool

    async def make(
        self,
        request: GenerateRequest,
        prompt: Prompt,
        *,
        rewards: RewardWorkers,
        on_stage: Callable[[Stage], None],
    ) -> MadeGroup:
        """n episodes and their verdicts. Episodes lost `ATTEMPTS` times with their workers become infra errors.

        Args:
            request: ``max_tokens`` is the limit of an episode's sampled tokens; its prompt is not used.
            on_stage: called as each stage begins.
        """
        asked = self._asked(request)
        lost = 0

        async def run(opened: OpenedSessions) -> EpisodesDone:
            nonlocal lost
            try:
                return await self.environments.run(prompt, opened.url, opened.keys)
            except GroupGone as gone:
                lost += 1
                if lost < ATTEMPTS:
                    raise
                return EpisodesDone((Outcome(failure=str(gone), kind="lost"),) * request.n, 0.0)

        begun = time.time()
        on_stage("generate")
        while True:
            try:
                done, group, meta, reports = await self.sessions.episodes(asked, run)
            except GroupGone:
                continue
            break
        generated = time.time()
        on_stage("score")
        verdicts = [verdict_of(*pair, self.rollout.values) for pair in zip(done.outcomes, reports, strict=True)]
        seconds, worker = 0.0, ""
        if self.scored and None in verdicts:
            scores = await rewards.score(group, prompt)
            verdicts = [own or judged for own, judged in zip(verdicts, scores.verdicts, strict=True)]
            seconds, worker = scores.seconds, scores.worker
        packed = Scores.pack([each or _UNJUDGED for each in verdicts], seconds=seconds, worker=worker)
        figures = EpisodeFigures(
            actor=meta.actor,
            worker=done.worker,
            opened=generated - meta.seconds,
            begun=generated - done.seconds,
            seconds_n=tuple(each.seconds for each in done.outcomes),
            waited_n=tuple(each.waited for each in done.outcomes),
            ends_n=tuple(end_of(*pair) for pair in zip(done.outcomes, reports, strict=True)),
            reports=reports,
            tool_errors_n=tuple(each.tool_errors for each in done.outcomes),
        )
        return MadeGroup(group, meta, packed, (begun, generated), figures)

    def _asked(self, request: GenerateRequest) -> EpisodesRequest:
        return EpisodesRequest(
            group_id=request.group_id,
            prompt_id=request.prompt_id,
            n=request.n,
            temperature=request.temperature,
            top_p=request.top_p,
            limits=Limits(self.rollout.max_calls, request.max_tokens, self.context, self.rollout.on_rewrite),
            seed=request.seed,
        )


def verdict_of(outcome: Outcome, report: EpisodeReport, values: RewardValues) -> Verdict | None:
    """The verdict on an episode; None if the scorer is to judge it.

    What the gateway saw comes first: after the end of its session, a program can only fail.
    """
    if report.end is End.REWRITTEN:
        return infra_error(f"the history was rewritten: {report.rewrite}")
    if report.end in _RAN_OUT:
        return Verdict(VerdictStatus.NO_ANSWER, values.failed, detail=_RAN_OUT[report.end])
    if outcome.failure:
        return infra_error(outcome.failure)
    if report.calls == 0:
        return infra_error("the program ended without a call of the model")
    if outcome.reward is None:
        return None
    passed = outcome.reward >= values.passed
    status = VerdictStatus.PASSED if passed else VerdictStatus.WRONG_ANSWER
    return Verdict(status, outcome.reward, answer=outcome.answer, detail=outcome.detail)


async def make_samples(
    request: GenerateRequest,
    prompt: Prompt,
    *,
    actors: Actors,
    rewards: RewardWorkers,
    turns: Turns | Episodes | None,
    on_stage: Callable[[Stage], None] = lambda _stage: None,
) -> MadeGroup:
    """n samples of a prompt and their verdicts, made by the job's program if it has one; see `make_group`."""
    if isinstance(turns, Episodes):
        return await turns.make(request, prompt, rewards=rewards, on_stage=on_stage)
    return await make_group(request, prompt, actors=actors, rewards=rewards, turns=turns, on_stage=on_stage)


_UNJUDGED = infra_error("the program returned no reward, and the job has no scorer: return one, or write scorer")
