"""hypothesis: the same examples every time, and no deadline on a shared machine."""

from hypothesis import settings

settings.register_profile("objectives", derandomize=True, deadline=None, max_examples=60, database=None)
settings.load_profile("objectives")
