import shutil

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


@pytest.fixture(scope="session")
def browser():
    """Debian's Chromium, without a window; one for all, since a process can have only one."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium here: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=chromium, args=flags)
        yield started
        started.close()
