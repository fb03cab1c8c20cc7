"""Property tests here have no time limit per example: a busy machine is no failure, and each suite has its own timeout."""

try:
    from hypothesis import settings
except ImportError:  # the environment with the real engine runs other tests and may not have it
    pass
else:
    settings.register_profile("kvtools", deadline=None)
    settings.load_profile("kvtools")
