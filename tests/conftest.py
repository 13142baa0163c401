"""Settings of all tests."""

import gc

import pytest
from hypothesis import settings

LAST_LINES = 40

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test an id of its own: of several with one id, lanes run only one."""
    seen: set[str] = set()
    for item in items:
        if not item.nodeid.endswith(item.name):  # schemathesis has the operation in the name alone
            item._id = item.id.with_params(item.name.partition("[")[2].removesuffix("]"))
        if item.nodeid in seen:
            raise pytest.UsageError(f"two tests have the id {item.nodeid}: lanes would run only one of them")
        seen.add(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect what a file leaves behind, then let no later collection walk what stays: all that was imported."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


class Failures:
    """Prints a failure when it happens: a session that is ended from outside never prints its summary."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.write_line(f"{report.nodeid} failed ({report.when}), and ended with:", red=True)
            self._terminal.write_line("\n".join(report.longreprtext.splitlines()[-LAST_LINES:]))


def pytest_sessionstart(session: pytest.Session) -> None:
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # only the process that prints has one
        session.config.pluginmanager.register(Failures(terminal))
