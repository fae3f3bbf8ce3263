"""The contract of a method, as both worlds check it (``gossamer.effects`` has it in words)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

from gossamer.effects import (
    MAX_SCALARS,
    Effect,
    Gather,
    Mean,
    MethodGenerator,
    Pair,
    Shift,
    Start,
    Swap,
    Update,
    Wait,
    WaitSteps,
)
from gossamer.errors import MethodError

COLLECTIVES = frozenset({Mean, Gather, Shift})
PAIRWISE = frozenset({Pair, Swap})
WAITING = COLLECTIVES | {Wait}
"""Effects that wait for other workers, if ``step`` yields them."""

ALLOWED: dict[str, frozenset[type]] = {
    "step": COLLECTIVES | {Update, Start, Wait},
    "background": COLLECTIVES | PAIRWISE | {WaitSteps, Start, Wait},
    "finish": frozenset({Mean, Gather, Wait}),
}
"""What each generator of a method may yield."""

PARTS = tuple(ALLOWED)


def declared(method: Any, part: str) -> frozenset[type]:
    """Return the effects that ``step``, ``background`` or ``finish`` of a method declares; empty without that part."""
    generator = getattr(method, part)
    if generator is None:
        return frozenset({Update}) if part == "step" else frozenset()
    return getattr(generator, "yields", frozenset())


def is_encodable(method: Any) -> bool:
    """Return whether a method sends models in effects that a codec can encode (``gossamer.wire``)."""
    effects = declared(method, "step") | declared(method, "background")
    return bool(method.sends_models and effects & {Mean, Swap})


def check_declaration(method: Any) -> None:
    """Raise ``MethodError`` if a method does not declare what the worlds need to know, or declares what none does."""
    name = getattr(method, "name", "") or type(method).__name__
    for attribute in ("name", "summary"):
        if not isinstance(getattr(method, attribute, None), str):
            raise MethodError(f"method {name} has no {attribute}: give its class one, a text")
    for part in PARTS:
        generator, effects = getattr(method, part), declared(method, part)
        if generator is None:
            continue
        if not callable(generator):
            raise MethodError(f"{part} of method {name} is {generator!r}: expected a generator, or None")
        if not hasattr(generator, "yields"):
            raise MethodError(
                f"{part} of method {name} does not say which effects it yields: decorate it, as @yields(Mean, Update)"
            )
        foreign = effects - ALLOWED[part]
        if foreign:
            raise MethodError(
                f"{part} of method {name} declares {_names(foreign)}: {part} may yield {_names(ALLOWED[part])}"
            )
        if Start in effects and not effects & (COLLECTIVES | {Swap}):
            raise MethodError(f"{part} of method {name} declares Start alone: name what it starts too, as Mean")
    background = declared(method, "background")
    if Pair in background and background & COLLECTIVES:
        raise MethodError(
            f"background of method {name} declares Pair and {_names(background & COLLECTIVES)}: a background part "
            "exchanges in pairs or communicates by collectives, not both; collectives may go into step"
        )


def check_generator(method: Any, part: str, generator: Any) -> MethodGenerator:
    """Return ``generator``, which ``part`` returned. Raise ``MethodError`` if it is none."""
    if not inspect.isgenerator(generator):
        raise MethodError(f"{part} of method {method.name} is not a generator: it contains no yield")
    return generator  # type: ignore[return-value]


def check_effect(method: Any, part: str, effect: Effect) -> None:
    """Raise ``MethodError`` if ``part`` of ``method`` may not yield ``effect``."""
    kind, effects = type(effect), declared(method, part)
    if kind not in effects:
        raise _undeclared(method, part, effect, effects)
    if kind is Start:
        effect = effect.effect  # type: ignore[union-attr]
        if type(effect) not in effects & (COLLECTIVES | {Swap}):
            raise _undeclared(method, part, effect, effects, what="started")
    if len(getattr(effect, "scalars", ())) > MAX_SCALARS:
        raise MethodError(
            f"{part} of method {method.name} sends {len(effect.scalars)} scalars: "  # type: ignore[union-attr]
            f"expected at most {MAX_SCALARS}; send a vector"
        )
    weight = getattr(effect, "weight", 1.0)
    if not 0 <= weight < float("inf"):
        raise MethodError(f"{part} of method {method.name} yielded Mean with weight {weight}: expected 0 or more")


def gradient_topic(method: Any) -> str:
    """Return the topic of the mean of the gradient with which ``step`` declares to begin; empty: with something else"""
    topic: str = getattr(method.step, "gradient_topic", "")
    return topic


def check_opening(method: Any, effect: Effect, step: int) -> None:
    """Raise ``MethodError`` if ``effect``, the first of a ``step``, is not the mean that the method declares."""
    topic = gradient_topic(method)
    opening = isinstance(effect, Mean) and (effect.topic, effect.round, effect.group) == (topic, step, None)
    if topic and (not opening or effect.weight != 1.0 or effect.scalars):  # type: ignore[union-attr]
        raise MethodError(
            f"step of method {method.name} declares gradient_topic={topic!r} and began with {type(effect).__name__}: "
            f"expected Mean(worker.gradient, worker.step, {topic!r}) of all workers, without weight and scalars"
        )


def _undeclared(method: Any, part: str, effect: Any, effects: frozenset[type], what: str = "yielded") -> MethodError:
    kind = type(effect)
    if kind not in ALLOWED[part] and kind not in frozenset().union(*ALLOWED.values()):
        return MethodError(f"{part} of method {method.name} {what} {effect!r}, which is not an effect")
    if kind not in ALLOWED[part]:
        where = [name for name in PARTS if kind in ALLOWED[name]]
        return MethodError(f"{part} of method {method.name} {what} {kind.__name__}: only {' or '.join(where)} may")
    return MethodError(
        f"{part} of method {method.name} {what} {kind.__name__}, which it does not declare: expected "
        f"{_names(effects)}; add it to @yields"
    )


def _names(effects: Iterable[type]) -> str:
    return ", ".join(sorted(effect.__name__ for effect in effects))
