"""The tool `python` on a real sandbox: what the model sees, what is its own fault, and that nothing is kept."""

import asyncio
from collections.abc import Iterator

import pytest

from environments.tools.base import ToolProblem
from environments.tools.python import Python
from volley.errors import ToolUnavailable
from volley.rollout import PythonTool

pytestmark = pytest.mark.integration

LIMITS = {"cpu_s": 1, "memory_mb": 128, "stdout_kb": 8}


@pytest.fixture(scope="module")
def python() -> Iterator[Python]:
    tool = Python(PythonTool.model_validate({"slots": 2, "sandbox": {"limits": LIMITS}}))
    yield tool
    tool.close()


async def use(tool: Python, code: object) -> str:
    async with tool.episode() as call:
        return (await call({"code": code})).text


async def test_what_is_printed_is_seen(python: Python) -> None:
    assert await use(python, "print(123456 * 654321)") == str(123456 * 654321)
    assert await use(python, "x = 1") == "(the program printed nothing)"
    assert await use(python, "import sys\nprint('a')\nprint('b', file=sys.stderr)") == "a\nb"


async def test_failures_are_seen_without_the_sandbox_itself(python: Python) -> None:
    seen = await use(python, "print('before')\ndef f():\n    return 1 / 0\nf()")
    assert seen.startswith("before\nTraceback (most recent call last):\n  File")
    assert "line 4, in <module>" in seen
    assert "ZeroDivisionError: division by zero\nerror: exit status 1" in seen
    assert "run_as_main" not in seen
    assert "SyntaxError" in await use(python, "print(")
    assert "error: wall time over 4 s" in await use(python, "import time\ntime.sleep(60)")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: pass", "error: processor time"),
        ("x = 'a' * (1 << 29)", "emory"),
        ("print('a' * 100_000)", "error: wrote more than its output limit"),
        ("import os\nos.kill(os.getpid(), 9)", "error: killed by signal 9"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "PermissionError"),
    ],
)
async def test_limits_are_seen(python: Python, code: str, message: str) -> None:
    assert message in await use(python, code)


async def errors(tool: Python, *codes: str) -> list[bool]:
    """Which of an episode's calls are errors in the model's eyes."""
    async with tool.episode() as call:
        return [(await call({"code": code})).is_error for code in codes]


async def test_what_fails_counts_as_an_error(python: Python, kept: Python) -> None:
    codes = ("print(1)", "1 / 0", "print(", "import sys\nprint('a', file=sys.stderr)", "while True: pass", "print(2)")
    for tool in (python, kept):
        assert await errors(tool, *codes) == [False, True, True, False, True, False]


async def test_nothing_is_kept(python: Python) -> None:
    await use(python, "x = 1\nopen('/tmp/x', 'w').write('kept')")
    seen = await use(python, "import os\nprint(os.path.exists('/tmp/x'), 'x' in globals())")
    assert seen == "False False"


async def test_arguments_are_checked(python: Python) -> None:
    with pytest.raises(ToolProblem, match="only argument of python is code"):
        await use(python, 3)
    assert await use(python, "print('\\ud800'.encode('utf-8', 'backslashreplace'))") == "b'\\\\ud800'"
    assert "SyntaxError" in await use(python, "'\ud800'")


async def test_programs_run_at_once_and_cancelled_ones_not_at_all(python: Python) -> None:
    running = [asyncio.create_task(use(python, f"print({number})")) for number in range(6)]
    await asyncio.sleep(0)
    running[-1].cancel()
    seen = await asyncio.gather(*running, return_exceptions=True)
    assert seen[:5] == [str(number) for number in range(5)]
    assert isinstance(seen[5], asyncio.CancelledError)


async def test_a_sandbox_that_fails_is_not_the_models_fault() -> None:
    tool = Python(PythonTool.model_validate({"slots": 1}))
    try:
        waiting = asyncio.create_task(use(tool, "import time\ntime.sleep(60)"))
        await asyncio.sleep(0.5)
        tool._slots[0]._sandbox.end()  # type: ignore[union-attr]
        with pytest.raises(ToolUnavailable):
            await asyncio.wait_for(waiting, 20)
    finally:
        tool.close()


@pytest.fixture(scope="module")
def kept() -> Iterator[Python]:
    tool = Python(PythonTool.model_validate({"slots": 1, "state": "episode", "sandbox": {"limits": LIMITS}}))
    yield tool
    tool.close()


async def say(tool: Python, *codes: str) -> list[str]:
    """What one episode sees of its calls."""
    async with tool.episode() as call:
        return [(await call({"code": code})).text for code in codes]


async def test_an_episode_keeps_what_it_defines(kept: Python) -> None:
    codes = ("import math\nx = 20", "def f(y):\n    return x + y", "print(f(math.floor(1.5)))", "1 / 0", "print(x)")
    nothing, _, total, failed, still = await say(kept, *codes)
    assert (nothing, total, still) == ("(the program printed nothing)", "21", "20")
    assert failed.startswith("Traceback (most recent call last):\n  File")
    assert "1 / 0" in failed
    assert failed.endswith("ZeroDivisionError: division by zero")
    assert await say(kept, "open('/tmp/x', 'w').write('kept')", "print(open('/tmp/x').read())") == [
        "(the program printed nothing)",
        "kept",
    ]


async def test_the_next_episode_has_nothing_of_it(kept: Python) -> None:
    await say(kept, "x = 1\nopen('/tmp/x', 'w').write('kept')")
    (seen,) = await say(kept, "import os\nprint(os.path.exists('/tmp/x'), 'x' in globals())")
    assert seen == "False False"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("while True: pass", "error: processor time over 1 s"),
        ("import time\ntime.sleep(60)", "error: wall time"),
        ("x = 'a' * (1 << 29)", "emory"),
        ("print('a' * 100_000)", "error: wrote more than its output limit"),
        ("import os\nos._exit(3)", "error: exit status 3"),
        ("import os\nos._exit(0)", "restarted"),
        ("import os\nos.kill(os.getpid(), 9)", "error: killed by signal 9"),
    ],
)
async def test_a_limit_or_an_end_loses_the_state(kept: Python, code: str, message: str) -> None:
    before, seen, after = await say(kept, "y = 5\nprint(y)", code, "print('y' in globals())")
    assert before == "5"
    assert message in seen
    if "Traceback" not in seen:
        assert seen.endswith("all that was defined is gone)")
        assert after == "False"


async def test_hostile_pieces_only_harm_their_episode(kept: Python) -> None:
    codes = (
        "import os\nos.write(1, b'\\0' + b'0' * 16 + b'\\n')\nprint(1)",
        "print(repr(input()) if 0 else 2)\ntry:\n    input()\nexcept EOFError:\n    print('no input')",
        "import sys\nsys.exit(4)",
        "compile(",
        "import threading\nthreading.Thread(target=lambda: [0 for _ in iter(int, 1)], daemon=True).start()\nprint(3)",
    )
    forged, without, left, broken, threaded = await say(kept, *codes)
    assert forged.endswith("1")
    assert without == "2\nno input"
    assert "SystemExit: 4" in left
    assert "SyntaxError" in broken
    assert threaded == "3"
    assert await say(kept, "print('fine')") == ["fine"]


async def test_an_episode_that_is_cancelled_frees_its_slot(kept: Python) -> None:
    running = asyncio.create_task(say(kept, "import time\ntime.sleep(60)"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.wait_for(say(kept, "print('free')"), 60) == ["free"]
