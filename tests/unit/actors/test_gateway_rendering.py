"""What is new in a conversation, under real chat templates: recorded ids stay, and nothing is missing behind them."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import jinja2
import pytest

from actors.gateway.messages import BadMessages
from actors.gateway.rendering import NoEnd, Renderer, Setting
from tests.chat_models import CHATML, END, chat_tokenizer, split

ZOO = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr, arg-type]
TEMPLATES = sorted(ZOO.glob("*.jinja"))
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
STRIPS = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
FORGETS_REASONING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
USER, REPLY, NEXT = "What is two and two?", " It is four, I think.\n ", "And doubled?"
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALLS = [
    {"id": f"call{i}xxxx", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {i}}}'}}
    for i in (1, 2)
]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def made(template: str, end: str = END) -> tuple[Any, Renderer]:
    tokenizer = chat_tokenizer(template, end=end)
    return tokenizer, Renderer(tokenizer, [tokenizer.eos_token_id])


def turn_end(template: str, *, calls: bool = False) -> str:
    """The special token that ends a reply under this template; one it does not use if it has none."""
    tokenizer = chat_tokenizer(template)
    reply = assistant("" if calls else "ANSWER", **({"tool_calls": CALLS[:1]} if calls else {}))
    text = tokenizer.apply_chat_template([user("q"), reply], tokenize=False)
    tail = text.rpartition("add" if calls else "ANSWER")[2]
    ends = [each for each in re.findall(r"<[^<>\s/]+>", tail) if "call" not in each.lower() and "arg" not in each]
    return ends[0] if ends else END


def test_a_reply_may_end_in_the_token_that_begins_the_next_message() -> None:
    """GLM's replies end in <|user|> or, with tool calls, in <|observation|>."""
    text = (ZOO / "glm4moe.jinja").read_text()
    tokenizer = chat_tokenizer(text, end="<|user|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|observation|>"]})
    asks, observes = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    renderer = Renderer(tokenizer, [asks, observes])
    behind = renderer.continuation([user(USER), assistant("Four.")], [user(NEXT)], Setting(), stop=asks)
    assert tokenizer.decode(behind).startswith(f"\n{NEXT}")
    calling = [user(USER), assistant("", tool_calls=CALLS)]
    result = {"role": "tool", "tool_call_id": "call1xxxx", "content": "5"}
    behind = renderer.continuation(calling, [result], Setting((TOOL,)), stop=observes)
    assert tokenizer.decode(behind).startswith("\n<tool_response>\n5\n</tool_response>")
    cut = renderer.continuation(calling, [result], Setting((TOOL,)), stop=None)
    assert cut == [observes, *behind]


def takes_text(template: str) -> bool:
    """Whether it renders messages whose content is a text; those of vision models take lists of parts only."""
    tokenizer = chat_tokenizer(template)
    try:
        text = tokenizer.apply_chat_template([user(USER), assistant("ANSWER"), user(NEXT)], tokenize=False)
    except (jinja2.TemplateError, TypeError):
        return False
    return all(each in text for each in (USER, "ANSWER", NEXT))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_real_templates_continue_behind_the_reply(template: Path) -> None:
    """What is put behind the recorded ids is what the template renders behind the reply, to the last character."""
    text = template.read_text()
    if not takes_text(text):
        pytest.skip("the template does not take plain text")
    end = turn_end(text)
    tokenizer, renderer = made(text, end)
    history, new = [user(USER), assistant("ANSWER")], [user(NEXT)]
    whole = renderer.text([*history, *new], Setting())
    before, _, behind = whole.rpartition("ANSWER")
    ids = renderer.continuation([user(USER), assistant(REPLY)], new, Setting(), stop=tokenizer.eos_token_id)
    got = tokenizer.decode(ids)
    assert NEXT in got
    assert behind in (got, end + got), "the reply's end is in the recorded ids already"
    assert (end in behind.partition(NEXT)[0]) == (behind != got)
    assert (
        renderer.prompt([user(USER)], Setting())
        == tokenizer(
            tokenizer.apply_chat_template([user(USER)], tokenize=False, add_generation_prompt=True),
            add_special_tokens=False,
        ).input_ids
    )
    assert before


def test_most_real_templates_were_tried() -> None:
    assert sum(takes_text(template.read_text()) for template in TEMPLATES) > 50


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "glm4moe", "llama3_1", "nemotron_3_nano"])
@pytest.mark.parametrize("content", ["", "Let me see."])
def test_real_templates_continue_behind_tool_calls(name: str, content: str) -> None:
    text = (ZOO / f"{name}.jinja").read_text()
    tokenizer, renderer = made(text, turn_end(text))
    calls = CALLS[:1] if name == "llama3_1" else CALLS  # that template takes one call at a time
    history = [user(USER), assistant(content, tool_calls=calls)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "add", "content": f"R{call['id']}"} for call in calls
    ]
    setting = Setting(tools=(TOOL,))
    ids = renderer.continuation(history, results, setting, stop=tokenizer.eos_token_id)
    got = tokenizer.decode(ids)
    assert all(result["content"] in got for result in results)
    assert "add" not in got.partition("Rcall")[0]
    whole = renderer.text([*history, *results], setting)
    assert whole.endswith(got)
    assert not got.startswith((tokenizer.eos_token, '"', "}"))


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, STRIPS, FORGETS_REASONING])
def test_ids_are_those_of_the_whole_conversation(template: str) -> None:
    """If the sampled ids are the tokenizer's own and the template changes no reply, both ways give equal ids."""
    tokenizer, renderer = made(template)
    messages = [user(USER)]
    ids = renderer.prompt(messages, Setting())
    for reply, question in (("Four.", NEXT), ("Eight.", "Sure?")):
        ids += [*renderer.tokens(reply), tokenizer.eos_token_id]
        messages.append(assistant(reply))
        ids += renderer.continuation(messages, [user(question)], Setting(), stop=tokenizer.eos_token_id)
        messages.append(user(question))
    assert ids == renderer.prompt(messages, Setting())


@pytest.mark.parametrize("template", [STRIPS, FORGETS_REASONING])
def test_sampled_ids_stay_although_the_template_would_change_the_reply(template: str) -> None:
    tokenizer, renderer = made(template)
    reply = " <think>well</think> Four.\n"
    behind = renderer.continuation([user(USER), assistant(reply)], [user(NEXT)], Setting(), stop=tokenizer.eos_token_id)
    ids = [*renderer.prompt([user(USER)], Setting()), *split(tokenizer, reply), tokenizer.eos_token_id, *behind]
    expected = f"<|im_start|>user\n{USER}{END}\n<|im_start|>assistant\n{reply}{END}\n<|im_start|>user\n{NEXT}{END}\n"
    assert tokenizer.decode(ids) == expected + "<|im_start|>assistant\n"
    assert ids != renderer.prompt([user(USER), assistant(reply), user(NEXT)], Setting())


def test_a_cut_reply_is_closed_by_the_template() -> None:
    tokenizer, renderer = made(CHATML)
    ids = renderer.continuation([user(USER), assistant("Fo")], [user(NEXT)], Setting(), stop=None)
    assert tokenizer.decode(ids) == f"{END}\n<|im_start|>user\n{NEXT}{END}\n<|im_start|>assistant\n"
    assert ids[0] == tokenizer.eos_token_id
    calls = renderer.continuation([user(USER), assistant("", tool_calls=CALLS)], [user(NEXT)], Setting(), stop=None)
    assert calls == ids


def test_a_template_that_ends_no_reply() -> None:
    tokenizer, renderer = made(PLAIN)
    for stop in (tokenizer.eos_token_id, None):
        ids = renderer.continuation([user(USER), assistant("Four.")], [user(NEXT)], Setting(), stop=stop)
        assert tokenizer.decode(ids) == f"\nuser: {NEXT}\nassistant:"
    with pytest.raises(NoEnd, match="leaves earlier replies out"):
        renderer.continuation([user(USER), assistant("", tool_calls=CALLS)], [user(NEXT)], Setting(), stop=None)
    only_last = "{{ messages[-1].content }}"
    tokenizer, renderer = made(only_last)
    with pytest.raises(NoEnd, match="leaves earlier replies out"):
        renderer.continuation([user(USER), assistant("Four.")], [user(NEXT)], Setting(), stop=None)


def test_an_end_that_only_others_have_is_not_taken_for_the_replys() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if m.role == 'assistant' else '<|im_end|>' }}\n"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer, renderer = made(template)
    ids = renderer.continuation([user(USER), assistant("Four.")], [user(NEXT)], Setting(), stop=tokenizer.eos_token_id)
    assert tokenizer.decode(ids) == f"\nuser: {NEXT}{END}\nassistant: "


def test_tokenizers_that_mark_the_beginning_of_a_text() -> None:
    """Behind a stop token there is no beginning, so no mark."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz?:|_<>/[]\n")}
    core = Tokenizer(models.BPE(vocab={**letters, "?!": len(letters)}, merges=[], unk_token="?!"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '</s>' if m.role == 'assistant' }}{% endfor %}"
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template=template)
    renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
    assert tokenizer("[user]", add_special_tokens=False).input_ids[0] == letters["▁"]
    ids = renderer.continuation([user("a"), assistant("b")], [user("c")], Setting(), stop=tokenizer.eos_token_id)
    assert [tokenizer.convert_ids_to_tokens(each) for each in ids] == list("[user]c")


def test_options_and_tools_reach_the_template() -> None:
    _, renderer = made(CHATML + "{{ mood }}")
    text = renderer.text([user(USER)], Setting((TOOL,), {"mood": "calm"}))
    assert '"name": "add"' in text
    assert text.endswith("calm")


ADDS = "{% for m in messages %}{{ m.role }}: {{ m.content + '\n' }}{% endfor %}"
MADE_FOR_TOOLS = "it was not made for tools: use a model that was, or send content as an empty string"


@pytest.mark.parametrize(
    ("template", "messages", "advice"),
    [
        (ADDS, [user(USER), assistant(None, tool_calls=CALLS)], f"message 1 has no content, .*; {MADE_FOR_TOOLS}$"),
        (ADDS, [user(USER), assistant(None)], "message 1 has no content, .*needs; send content as an empty string$"),
        (ADDS + "{{ 1/0 }}", [user(USER), assistant(None)], "NoneType[^:]*$"),
        ("{{ 1/0 }}", [user(USER)], "division by zero$"),
    ],
)
def test_a_message_without_content_is_named_if_it_is_why_the_template_fails(
    template: str, messages: list[dict[str, Any]], advice: str
) -> None:
    _, renderer = made(template)
    with pytest.raises(BadMessages, match=f"rejects the messages: .*{advice}"):
        renderer.prompt(messages, Setting())


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1/0 }}", "rejects"),
    ],
)
def test_what_the_template_refuses_is_said(template: Any, problem: str) -> None:
    _, renderer = made(template)
    with pytest.raises(BadMessages, match=problem):
        renderer.prompt([user(USER)], Setting())
