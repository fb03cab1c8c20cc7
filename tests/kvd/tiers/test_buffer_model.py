"""The same machine as `test_tier_model`, with the arena as a mere buffer: values leave it as soon as the tier has them."""

from kvd.tiers.policies import Asking, PrefetchPolicy, SkipL1
from tests.kvd.tiers import test_tier_model
from tests.kvd.tiers.test_tier_model import Model, Shared


def setup_module() -> None:
    Shared.start(policies=Asking(SkipL1(), PrefetchPolicy()), evicting=False, prefetch_in_flight=1)


def teardown_module() -> None:
    Shared.stack.close()


class BufferModel(Model):
    """Its rules and what it asserts are those of `Model`."""


BufferModel.TestCase.settings = test_tier_model.Model.TestCase.settings
TestBufferModel = BufferModel.TestCase
