"""The record of an episode: recorded ids stay, other histories are named, limits end it; and n of them make a group."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.gateway.groups import group_of
from actors.gateway.messages import BadMessages, checked
from actors.gateway.rendering import Renderer, Setting
from actors.gateway.session import Chat, Drawn, End, Limits, Rewritten, Session
from learner.layout import Piece, micro_batches
from tests.chat_models import CHATML, chat_tokenizer, split

TOKENIZER = chat_tokenizer()
RENDERER = Renderer(TOKENIZER, [TOKENIZER.eos_token_id])
LIMITS = Limits(calls=4, tokens=200, context=1000)
TOOL = {"type": "function", "function": {"name": "add"}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def chat(*messages: dict[str, Any], tools: tuple[dict[str, Any], ...] = ()) -> Chat:
    return Chat(checked(list(messages)), Setting(tools))


def drawn(text: str, *, stopped: bool = True, version: int = 0) -> Drawn:
    """A reply in an encoding that the tokenizer never makes."""
    tokens = split(TOKENIZER, text) + ([TOKENIZER.eos_token_id] if stopped else [])
    return Drawn(tokens, [-0.5 - 0.01 * i for i in range(len(tokens))], [version] * len(tokens), stopped)


def call(session: Session, asked: Chat, reply: str, **how: Any) -> list[int]:
    """One call with its answer; returns the prompt that the model got."""
    plan = session.plan(session.draft_chat(asked, RENDERER))
    assert plan is not None
    session.record_chat(plan, drawn(reply, **how), asked, assistant(reply))
    return plan.prompt


def test_each_call_sees_exactly_what_was_seen_and_sampled_before() -> None:
    session = Session(LIMITS)
    first = call(session, chat(user("one and one?")), "two")
    assert first == RENDERER.prompt([user("one and one?")], Setting())
    history = [user("one and one?"), assistant("two")]
    second = call(session, chat(*history, user("sure?")), "yes")
    answer = drawn("two").tokens
    assert second[: len(first) + len(answer)] == first + answer
    assert (
        TOKENIZER.decode(second[len(first) + len(answer) :])
        == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    )
    third = call(session, chat(*history, user("sure?"), assistant("yes")), "very")
    assert third[len(second) + len(drawn("yes").tokens) :] == RENDERER.tokens("\n<|im_start|>assistant\n")
    assert (session.calls, session.rewrites, len(session.branches)) == (3, 0, 1)


def test_an_empty_content_of_a_call_is_rendered_as_the_client_writes_it() -> None:
    """Which is what the error about a null one advises."""
    concatenating = Renderer(
        chat_tokenizer(CHATML.replace("{% if m.content %}{{ m.content }}{% endif %}", "{{ m.content + '' }}")),
        [TOKENIZER.eos_token_id],
    )
    session, asked = Session(LIMITS), chat(user("add"), tools=(TOOL,))
    plan = session.plan(session.draft_chat(asked, concatenating))
    assert plan is not None
    calls = [{"id": "c00000000", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    session.record_chat(plan, drawn("<tool_call>"), asked, {"role": "assistant", "content": None, "tool_calls": calls})
    result = {"role": "tool", "tool_call_id": "c00000000", "content": "4"}
    with pytest.raises(BadMessages, match="message 1 has no content"):
        session.draft_chat(
            chat(user("add"), {"role": "assistant", "tool_calls": calls}, result, tools=(TOOL,)), concatenating
        )
    again = session.draft_chat(chat(user("add"), assistant("", tool_calls=calls), result, tools=(TOOL,)), concatenating)
    assert (again.branch, again.rewrite) == (session.branches[0], "")


@pytest.mark.parametrize(
    ("second", "named"),
    [
        (chat(user("one  and one?"), assistant("two"), user("sure?")), "message 0 was user"),
        (chat(user("one and one?"), assistant("two."), user("sure?")), 'message 1 was assistant "two" and is'),
        (chat(user("one and one?")), "ends before message 1"),
        (chat(user("one and one?"), user("sure?")), "message 1 was assistant"),
        (chat(user("one and one?"), assistant("two"), user("sure?"), tools=(TOOL,)), "tools"),
    ],
)
def test_another_history_ends_the_session_and_is_named(second: Chat, named: str) -> None:
    session = Session(LIMITS)
    call(session, chat(user("one and one?")), "two")
    before = list(session.branches[0].ids)
    with pytest.raises(Rewritten, match=named):
        session.plan(session.draft_chat(second, RENDERER))
    assert (session.end, session.rewrites, session.calls) == (End.REWRITTEN, 1, 1)
    assert named in session.rewrite
    assert session.branches[0].ids == before


def test_another_history_starts_a_branch_if_the_job_keeps_the_longest() -> None:
    session = Session(Limits(4, 200, 1000, on_rewrite="keep_longest"))
    call(session, chat(user("a")), "long reply")
    summary = chat(user("in short: a"))
    prompt = call(session, summary, "b")
    assert prompt == RENDERER.prompt(summary.messages, Setting())
    call(session, chat(user("a"), assistant("long reply"), user("more")), "c")
    assert [len(branch.calls) for branch in session.branches] == [2, 1]
    assert (session.rewrites, session.end) == (1, None)
    assert session.longest is session.branches[0]
    call(session, chat(user("in short: a"), assistant("b"), user("go on")), "a much longer answer than all others")
    assert session.longest is session.branches[1]
    assert "message 0 was user" in session.rewrite


def test_the_longest_matching_branch_is_continued() -> None:
    session = Session(Limits(5, 500, 1000, on_rewrite="keep_longest"))
    call(session, chat(user("a")), "b")
    call(session, chat(user("a")), "b")
    call(session, chat(user("a"), assistant("b"), user("c")), "d")
    call(session, chat(user("a"), assistant("b"), user("c"), assistant("d"), user("e")), "f")
    assert [len(branch.calls) for branch in session.branches] == [3, 1]
    assert session.rewrites == 1


def test_calls_tokens_and_context_are_limited() -> None:
    asked = [user("a")]
    session = Session(Limits(calls=2, tokens=200, context=1000))
    for reply in ("b", "c"):
        call(session, chat(*asked), reply)
        asked += [assistant(reply), user("again")]
    assert not session.end
    assert session.plan(session.draft_chat(chat(*asked), RENDERER)) is None
    assert str(session.end) == End.CALLS
    assert session.calls == 2

    session = Session(Limits(calls=9, tokens=5, context=1000))
    call(session, chat(user("a")), "bcd")
    plan = session.plan(session.draft_chat(chat(user("a"), assistant("bcd"), user("e")), RENDERER))
    assert plan is not None
    assert plan.room == 5 - len(drawn("bcd").tokens)
    session.record_chat(plan, drawn("f" * plan.room, stopped=False), chat(user("a")), assistant("f"))
    assert session.end is End.TOKENS

    prompt = len(RENDERER.prompt([user("a")], Setting()))
    session = Session(Limits(calls=9, tokens=99, context=prompt + 3))
    plan = session.plan(session.draft_chat(chat(user("a")), RENDERER))
    assert plan is not None
    assert plan.room == 3
    session.record_chat(plan, drawn("xyz", stopped=False), chat(user("a")), assistant("xyz"))
    assert session.end is End.CONTEXT
    session = Session(Limits(calls=9, tokens=99, context=prompt))
    assert session.plan(session.draft_chat(chat(user("a")), RENDERER)) is None
    assert session.end is End.CONTEXT


def test_an_answer_cut_by_the_request_ends_nothing() -> None:
    session = Session(LIMITS)
    call(session, chat(user("a")), "bc", stopped=False)
    assert session.end is None
    call(session, chat(user("a"), assistant("bc"), user("d")), "e")
    assert TOKENIZER.eos_token_id == session.branches[0].calls[1].context[0]


def test_what_a_template_refuses_is_not_recorded() -> None:
    renderer = Renderer(chat_tokenizer("{{ raise_exception('no') if messages|length > 2 }}" + CHATML), [])
    session = Session(LIMITS)
    asked = chat(user("a"))
    plan = session.plan(session.draft_chat(asked, renderer))
    assert plan is not None
    session.record_chat(plan, drawn("b"), asked, assistant("b"))
    with pytest.raises(BadMessages):
        session.plan(session.draft_chat(chat(user("a"), assistant("b"), user("c")), renderer))
    assert (session.end, session.rewrites, session.calls) == (None, 0, 1)


def test_prompts_of_completions_continue_as_text_and_as_ids() -> None:
    session = Session(LIMITS)
    plan = session.plan(session.draft_text("one two", RENDERER))
    assert plan is not None
    session.record_text(plan, drawn(" three", stopped=False), "one two three")
    plan = session.plan(session.draft_text("one two three four", RENDERER))
    assert plan is not None
    assert plan.prompt == RENDERER.tokens("one two") + split(TOKENIZER, " three") + RENDERER.tokens(" four")
    session.record_text(plan, drawn(" five"), "one two three four five")
    plan = session.plan(session.draft_text([*session.branches[0].ids, 7, 8], RENDERER))
    assert plan is not None
    assert plan.context == [7, 8]
    with pytest.raises(Rewritten, match="does not begin with"):
        session.plan(session.draft_text("one two thr", RENDERER))


@pytest.mark.parametrize("on_rewrite", ["drop", "keep_longest"])
@pytest.mark.parametrize("stop_text", ["", "|"])
@pytest.mark.parametrize("answer", ["", "b", "b c"])
def test_a_prompt_that_adds_nothing_to_an_answer_that_ended_is_a_rewrite(
    answer: str, stop_text: str, on_rewrite: Any
) -> None:
    """Behind what ended the answer, the model would answer something else than the prompt."""
    session = Session(Limits(9, 200, 1000, on_rewrite=on_rewrite))
    ended = replace(drawn(answer + stop_text, stopped=not stop_text), stopped=True, stop_text=stop_text)
    plan = session.plan(session.draft_text("a ", RENDERER))
    assert plan is not None
    session.record_text(plan, ended, f"a {answer}{stop_text}", f"a {answer}")
    again = session.draft_text(f"a {answer}", RENDERER)
    assert again.branch is not session.branches[0]
    if on_rewrite == "drop":
        with pytest.raises(Rewritten, match="adds nothing to an answer that had ended"):
            session.plan(again)
    else:
        plan = session.plan(again)
        assert plan is not None
        assert plan.prompt == RENDERER.tokens(f"a {answer}")
    more = session.draft_text(f"a {answer}more", RENDERER)
    assert (more.branch, more.context, more.rewrite) == (session.branches[0], RENDERER.tokens("more"), "")


@pytest.mark.parametrize("stop_text", ["", "|"])
def test_a_prompt_that_adds_nothing_goes_on_behind_what_it_repeats_to_the_last_token(stop_text: str) -> None:
    session = Session(LIMITS)
    cut = replace(drawn(f"b{stop_text}", stopped=False), stopped=bool(stop_text), stop_text=stop_text)
    plan = session.plan(session.draft_text("a ", RENDERER))
    assert plan is not None
    session.record_text(plan, cut, f"a b{stop_text}", "a b")
    assert session.draft_text(f"a b{stop_text}", RENDERER) == (session.branches[0], [], "")


def test_a_chat_does_not_continue_a_prompt() -> None:
    session = Session(LIMITS)
    plan = session.plan(session.draft_text("a", RENDERER))
    assert plan is not None
    session.record_text(plan, drawn("b"), "ab")
    with pytest.raises(Rewritten, match="cannot continue"):
        session.plan(session.draft_chat(chat(user("a")), RENDERER))


def grouped(*sessions: Session) -> Any:
    decode = lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False)  # noqa: E731
    return group_of(sessions, decode, group_id=3, prompt_id="p", actor="actor-0", seconds=1.0)


def test_sessions_become_a_group_whose_rows_are_what_the_model_saw() -> None:
    sessions = [Session(LIMITS) for _ in range(4)]
    call(sessions[0], chat(user("same, a")), "one", version=3)
    call(sessions[0], chat(user("same, a"), assistant("one"), user("more")), "two", version=4)
    call(sessions[1], chat(user("same, bc")), "three", version=3)
    call(sessions[3], chat(user("same, a")), "x" * 7, stopped=False)
    sessions[3].end = End.TOKENS
    group, reports = grouped(*sessions)
    rows = [session.branches[0].ids if session.branches else [] for session in sessions]
    piece = Piece(
        group.prompt_p,
        group.tokens_T,
        group.lengths_n,
        np.arange(len(group.tokens_T)),
        group.observation_S,
        group.observation_at_S,
    )
    for number in (0, 1, 3):
        one = piece.only(np.arange(4) == number)
        assert [*group.prompt_p, *one.body()[0]] == rows[number]
        (batch,) = micro_batches([one], 10_000, width=8, allow_shared=False)
        assert batch.ids_RL[0].tolist() == rows[number]
        predicted = [rows[number][at + 1] for at in batch.at_T.tolist()]
        assert predicted == one.tokens_T.tolist(), "each sampled token is predicted at the place before it"
    assert TOKENIZER.decode(group.prompt_p).endswith("same,")
    assert group.lengths_n.tolist() == [
        len(drawn("one").tokens) + len(drawn("two").tokens),
        len(drawn("three").tokens),
        0,
        7,
    ]
    assert group.stopped_n.tolist() == [True, True, False, False]
    assert group.texts == ("two", "three", "", "xxxxxxx")
    assert [len(calls) for calls in group.calls] == [2, 1, 0, 1]
    first, second = group.calls[0]
    assert TOKENIZER.decode(group.prompt_p) in first.context
    assert (first.answer, first.tokens, second.answer) == ("one", len(drawn("one").tokens), "two")
    assert second.context == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    assert second.observed == len(TOKENIZER.encode(second.context, add_special_tokens=False))
    assert set(group.versions_T[: group.lengths_n[0]].tolist()) == {3, 4}
    assert group.logprobs_T[0] == np.float32(-0.5)
    assert [report.calls for report in reports] == [2, 1, 0, 1]
    assert reports[3].end is End.TOKENS
    assert sum(report.observed for report in reports) == len(group.observation_S)
    meta = group.meta()
    assert (meta.truncated, meta.oldest_version, meta.newest_version) == (2, 0, 4)
    assert meta.turns == 5


def test_sessions_without_any_answer() -> None:
    group, reports = grouped(Session(LIMITS), Session(LIMITS))
    assert (group.n, len(group.tokens_T), len(group.prompt_p), group.texts) == (2, 0, 0, ("", ""))
    assert (reports[0].calls, group.meta().oldest_version) == (0, 0)
