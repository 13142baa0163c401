"""Settings of all tests."""

import pytest
from hypothesis import settings

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
