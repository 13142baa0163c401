"""Code is parsed in several threads at once, between which finalisers switch."""

import gc
import threading
import time

import pytest

from volley.syntax import syntax_tree

CODE = "\n".join(f"x{i} = [{i}, (1, 2, {{3: 4}})]" for i in range(200))


class Garbage:
    """Lets other threads run when it is collected."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def test_threads_do_not_disturb_each_other() -> None:
    stop, parsed, errors = threading.Event(), list[int](), list[BaseException]()

    def parse() -> None:
        while not stop.is_set():
            for _ in range(50):
                Garbage()
            try:
                parsed.append(len(syntax_tree(CODE).body))
            except BaseException as error:  # noqa: BLE001 - the test reports it
                errors.append(error)

    before = gc.get_threshold()
    gc.set_threshold(50)
    threads = [threading.Thread(target=parse) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        time.sleep(2)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        gc.set_threshold(*before)
    assert errors == []
    assert set(parsed) == {200}


def test_a_parse_that_was_disturbed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import ast

    disturbed, parse = iter([True, True, False]), ast.parse

    def sometimes(code: str) -> ast.Module:
        if next(disturbed):
            raise SystemError("AST constructor recursion depth mismatch (before=144, after=35)")
        return parse(code)

    monkeypatch.setattr(ast, "parse", sometimes)
    assert len(syntax_tree("x = 1").body) == 1


def test_what_does_not_parse_is_an_error_as_before() -> None:
    with pytest.raises(SyntaxError):
        syntax_tree("x =")
