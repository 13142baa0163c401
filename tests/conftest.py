"""Settings of all tests."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("untimed")
