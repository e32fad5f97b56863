from hypothesis import settings

# The same examples in every run, so that a failure is about the change at hand; no deadline, because
# machines that run tests are busy.
settings.register_profile("samestep", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("samestep")
