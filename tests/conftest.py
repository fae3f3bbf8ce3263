import hypothesis
import pytest
import torch

# The same examples on every machine and in every run: a failure seen once can be seen again.
hypothesis.settings.register_profile("seeded", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("seeded")


@pytest.fixture(autouse=True)
def _one_thread():
    # The machine may be shared; the models here are too small to gain from more.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
