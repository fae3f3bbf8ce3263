"""Draw the diagrams of ARCHITECTURE.md: ``python docs/make_diagrams.py``. Needs nothing beyond Python."""

from __future__ import annotations

import html
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

INK, SOFT, LINE = "#22313a", "#5b6b74", "#8aa0aa"
FILLS = {"user": "#fdf1dc", "method": "#dff3ee", "engine": "#e8eef4", "network": "#f7e3e3", "plain": "#ffffff"}
"""Whose code a box is: the user's, a method's, the engine's, or the network."""


class Diagram:
    """An SVG picture on a light card, so that it reads the same on a dark page."""

    def __init__(self, name: str, width: int, height: int) -> None:
        self.name, self.width, self.height = name, width, height
        self.shapes: list[str] = []

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle", fill: str = INK) -> None:
        weight = ' font-weight="600"' if words.startswith("*") else ""
        mono = ' font-family="ui-monospace, Menlo, Consolas, monospace"' if words.startswith("`") else ""
        words = html.escape(words.strip("*`"))
        style = f'font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}{mono}'
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "engine") -> None:
        """A rounded box; the first line is its title, the others are small."""
        corners = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"'
        self.shapes.append(f'<rect {corners} fill="{FILLS[kind]}" stroke="{LINE}"/>')
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text(
                x + width / 2, top + 17 * number, line, 13 if number == 0 else 11, fill=INK if number == 0 else SOFT
            )

    def arrow(self, *points: tuple[float, float], label: str = "", both: bool = False, dashed: bool = False) -> None:
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        style = ' stroke-dasharray="5 4"' if dashed else ""
        start = ' marker-start="url(#tip)"' if both else ""
        self.shapes.append(
            f'<path d="M {path}" fill="none" stroke="{SOFT}" stroke-width="1.4"{style}{start} marker-end="url(#tip)"/>'
        )
        if label:
            (x1, y1), (x2, y2) = points[len(points) // 2 - 1], points[len(points) // 2]
            self.text((x1 + x2) / 2 + (8 if x1 == x2 else 0), (y1 + y2) / 2 - 6, label, 11,
                      "start" if x1 == x2 else "middle", SOFT)  # fmt: skip

    def save(self) -> None:
        tip = (
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{SOFT}"/></marker>'
        )
        IMAGES.joinpath(f"{self.name}.svg").write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" font-family="system-ui, Helvetica, Arial, sans-serif">\n'
            f'<defs>{tip}</defs>\n<rect width="100%" height="100%" rx="10" fill="#fbfcfc"/>\n'
            + "\n".join(self.shapes)
            + "\n</svg>\n",
            encoding="utf-8",
        )


def hops(name: str, title: str, rows: list[tuple[str, str, str, str]]) -> None:
    """The way of a batch: numbered boxes from top to bottom, each with what happens and in which file."""
    height = 46
    diagram = Diagram(name, 760, 52 + height * len(rows) + 10)
    diagram.text(24, 32, f"*{title}", 15, "start")
    for number, (kind, what, where, note) in enumerate(rows):
        y = 50 + height * number
        diagram.shapes.append(f'<circle cx="36" cy="{y + 17}" r="12" fill="{FILLS[kind]}" stroke="{LINE}"/>')
        diagram.text(36, y + 21.5, str(number + 1), 12)
        diagram.text(60, y + 13, what, 13, "start")
        diagram.text(60, y + 30, f"`{where}", 11, "start", SOFT)
        diagram.text(740, y + 13, note, 11, "end", SOFT)
        if number:
            diagram.arrow((36, y - 17), (36, y + 4))
    diagram.save()


def real_step() -> None:
    hops(
        "architecture-real-step",
        "One mini-batch on a real worker",
        [
            ("user", "loss.backward(), then optimizer.step()", "the user's loop", "training thread"),
            (
                "engine",
                "Step pre-hook: take the lock, point the parameters at x",
                "process/runtime/driver.py, flat_model.py",
                "training thread",
            ),
            ("method", "The method's step() runs up to its Update", "methods/*.py", "training thread"),
            (
                "engine",
                "It yields Mean or Wait: the lock is free while it waits",
                "process/runtime/effect_handler.py",
                "methods that wait",
            ),
            (
                "network",
                "The collective runs among the members that are alive",
                "process/collectives/membership.py, gloo.py",
                "methods that wait",
            ),
            ("user", "The optimizer updates x", "torch.optim", "training thread"),
            (
                "engine",
                "Step post-hook: rest of step(), weights = eval_point(x), release the lock",
                "process/runtime/driver.py, flat_model.py",
                "training thread",
            ),
            (
                "method",
                "Concurrently background() yields Pair: two neighbours agree",
                "process/pairwise/pairing.py",
                "background thread",
            ),
            (
                "network",
                "Swap: both send their snapshot, each screens what it received",
                "process/pairwise/exchanges.py, edge.py, screening.py",
                "background thread",
            ),
            (
                "method",
                "The method adds the displacement to x under the lock",
                "methods/*.py, vector_math.py",
                "background thread",
            ),
        ],
    )


def virtual_step() -> None:
    hops(
        "architecture-virtual-step",
        "One mini-batch in the virtual cluster",
        [
            (
                "engine",
                "The simulation runs the next event of the queue",
                "virtual/simulation.py, sim/event_queue.py",
                "",
            ),
            (
                "engine",
                "A gradient begins: the clock says how long it takes",
                "virtual/sim/cluster.py, sim/clock.py",
                "",
            ),
            ("engine", 'The tape records "gradient of this row", computes nothing yet', "virtual/compute/tape.py", ""),
            ("method", "The gradient ends: the method's step() runs", "virtual/sim/method_driver.py, methods/*.py", ""),
            ("engine", "Update: the tape records an optimizer step", "virtual/compute/tape.py", ""),
            ("method", "background() yields Pair: two workers meet", "virtual/sim/pairing.py", ""),
            (
                "network",
                "Swap: the network model says when the vectors arrive",
                "virtual/sim/exchanges.py, sim/network.py",
                "",
            ),
            ("method", "The displacement is recorded as sums of rows", "virtual/compute/rows.py, vector_math.py", ""),
            (
                "engine",
                "Somebody reads a row: all stages of the tape are executed in batches",
                "virtual/compute/executor.py, evaluator.py, optimizers.py",
                "",
            ),
            ("engine", "A point of the history: losses, consensus, accuracy", "virtual/simulation.py, results.py", ""),
        ],
    )


def threads() -> None:
    d = Diagram("architecture-threads", 860, 400)
    d.text(24, 32, "*Threads of a real worker, and the lock they share", 15, "start")
    d.box(30, 60, 220, 74, "*training thread", "the user's loop, optimizer hooks", "runtime/driver.py", kind="user")
    d.box(30, 210, 220, 74, "*gossamer-background", "the method's background()", "runtime/driver.py", kind="method")
    d.box(
        330, 124, 230, 80, "*state.lock", "guards x and the method's vectors", "runtime/worker_state.py", kind="plain"
    )
    d.arrow((250, 97), (330, 145))
    d.arrow((250, 247), (330, 185))
    d.text(290, 84, "holds it during a step, not while it waits", 11, "start", SOFT)
    d.text(290, 252, "holds it while it merges,", 11, "start", SOFT)
    d.text(290, 268, "not while it communicates", 11, "start", SOFT)
    d.box(620, 60, 210, 62, "*gossamer-async", "collectives that Start began", "daemon_executor.py")
    d.box(620, 140, 210, 62, "*gossamer-edge-N", "receives messages of peer N", "pairwise/edge.py", kind="network")
    d.box(620, 220, 210, 62, "*gossamer-heartbeat", "heartbeats, membership, edges", "store/heartbeats.py")
    d.box(
        620, 310, 210, 62, "*gossamer-store", "talks to the key-value store", "store/failover_store.py", kind="network"
    )
    d.arrow((725, 282), (725, 310))
    d.box(
        30,
        310,
        530,
        62,
        "*x and weights",
        "the method changes x at any time, forward and backward read weights;",
        "they meet at the step boundary only: weights are never torn (runtime/flat_model.py)",
        kind="plain",
    )
    d.arrow((500, 204), (500, 310), label="guards")
    d.save()


def generations() -> None:
    d = Diagram("architecture-generations", 860, 340)
    d.text(24, 32, "*The life of a membership generation g", 15, "start")
    d.box(30, 70, 170, 60, "*requested", "key …/requested is g", kind="plain")
    d.box(345, 70, 170, 60, "*present", "each worker marks itself", kind="plain")
    d.box(660, 70, 170, 60, "*agreed", "members are published", kind="plain")
    d.box(660, 220, 170, 60, "*connected", "process groups are built", kind="plain")
    d.box(345, 220, 170, 60, "*aligned", "all are at the same step", kind="plain")
    d.box(30, 220, 170, 60, "*active", "collectives run", kind="method")
    d.arrow((200, 100), (345, 100), label="each worker polls")
    d.arrow((515, 100), (660, 100), label="all present or gone")
    d.arrow((745, 130), (745, 220))
    d.arrow((660, 250), (515, 250), label="state transfer")
    d.arrow((345, 250), (200, 250), label="step is repeated")
    d.arrow((70, 220), (70, 130))
    d.text(82, 172, "a collective fails, a worker dies or", 11, "start", SOFT)
    d.text(82, 188, "comes back: request g + 1", 11, "start", SOFT)
    d.arrow((430, 220), (430, 152), (170, 152), (170, 130), dashed=True)
    d.text(442, 178, "a connection or a transfer fails: request g + 1", 11, "start", SOFT)
    d.text(430, 316, "process/collectives/membership.py, group_builder.py, state_transfer.py", 11, fill=SOFT)
    d.save()


def tape() -> None:
    d = Diagram("architecture-tape", 760, 184)
    d.text(24, 32, "*The stages of the tape", 15, "start")
    stages = [
        ("*program", "sums of rows", "executor.py", "engine"),
        ("*batch", "gradients", "evaluator.py", "method"),
        ("*program", "sums of rows", "executor.py", "engine"),
        ("*batch", "optimizer steps", "optimizers.py", "method"),
        ("*program", "sums of rows", "executor.py", "engine"),
        ("*batch", "means of all", "tape.py", "method"),
    ]
    for number, (title, what, where, kind) in enumerate(stages):
        x = 30 + 120 * number
        d.box(x, 70, 100, 78, title, what, where, kind=kind)
        d.text(x + 50, 166, f"stage {number}", 11, fill=SOFT)
        if number:
            d.arrow((x - 20, 109), (x, 109))
    d.save()


if __name__ == "__main__":
    for draw in (real_step, virtual_step, threads, generations, tape):
        draw()
