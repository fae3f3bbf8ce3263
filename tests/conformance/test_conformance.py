"""What every method must do: ``gossamer.testing`` checks each method of the table. A new one is taken up by its row."""

import pytest

from gossamer.methods import METHODS
from gossamer.testing import CHECKS, check_method

REAL = [name for name, check in CHECKS.items() if check.real]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_all_checks_in_the_virtual_cluster(name):
    check_method(METHODS[name], real=False, seeds=range(10))


@pytest.mark.parametrize(
    "name", [name for name in METHODS if "quasi_global" in METHODS[name].Config.__dataclass_fields__]
)
def test_methods_pass_with_quasi_global_momentum(name):
    check_method(METHODS[name], real=False, quasi_global=0.9)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_passes_all_checks_with_real_processes(name):
    check_method(METHODS[name], only=REAL)
