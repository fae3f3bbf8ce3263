"""Typed settings: a value out of bounds or of the wrong type is an error of one line."""

from dataclasses import dataclass

import pytest

from gossamer.errors import InputError
from gossamer.settings import Settings, field_types, from_values, option


@dataclass(frozen=True, kw_only=True)
class Example(Settings):
    count: int = option(3, "how many", minimum=1, maximum=9)
    step_size: float = option(0.5, "how far", above=0)
    kind: str = option("plain", "which", choices=("plain", "fancy"))
    loud: bool = option(False, "whether")


def test_defaults_are_taken_and_values_win():
    assert from_values(Example, {}) == Example()
    assert from_values(Example, {"count": 4, "loud": True}) == Example(count=4, loud=True)


def test_text_becomes_the_fields_own_type():
    given = {"count": "4", "step_size": "1e-2", "kind": "fancy", "loud": "yes"}
    assert from_values(Example, given) == Example(count=4, step_size=0.01, kind="fancy", loud=True)
    assert from_values(Example, {"count": 4.0}).count == 4
    assert from_values(Example, {"step_size": 2}).step_size == 2.0
    assert [from_values(Example, {"loud": text}).loud for text in ("true", "1", "No", "FALSE")] == [
        True,
        True,
        False,
        False,
    ]


def test_names_of_others_are_left_alone():
    assert from_values(Example, {"elsewhere": 1}) == Example()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "--count is 0: expected 1 or more"),
        ({"count": 10}, "--count is 10: expected 9 or less"),
        ({"count": "many"}, "--count is 'many': expected a whole number"),
        ({"count": 2.5}, "--count is 2.5: expected a whole number"),
        ({"count": True}, "--count is True: expected a whole number"),
        ({"count": None}, "--count is None: expected a whole number"),
        ({"step_size": 0}, "--step-size is 0.0: expected more than 0"),
        ({"step_size": "nan"}, "--step-size is not a number: give one, such as 0.5"),
        ({"step_size": []}, r"--step-size is \[\]: expected a number"),
        (
            {"kind": "fancier"},
            "unknown value for --kind 'fancier': expected one of fancy, plain. Did you mean 'fancy'?",
        ),
        ({"loud": "loudly"}, "--loud is 'loudly': expected true or false"),
        ({"count": float("inf")}, "--count is inf: expected a whole number"),
        ({"step_size": float("inf")}, "--step-size is inf: expected a finite number"),
    ],
)
def test_a_wrong_value_is_one_line_with_what_was_expected(values, message):
    with pytest.raises(InputError, match=message) as caught:
        from_values(Example, values)
    assert "\n" not in str(caught.value)


def test_bounds_hold_however_settings_are_made():
    with pytest.raises(InputError, match="--count is -1"):
        Example(count=-1)


def test_field_types():
    assert field_types(Example) == {"count": int, "step_size": float, "kind": str, "loud": bool}
