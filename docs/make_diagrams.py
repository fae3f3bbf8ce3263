"""Draw the diagrams of ARCHITECTURE.md: ``python docs/make_diagrams.py``. Needs nothing beyond Python."""

from __future__ import annotations

import html
from pathlib import Path

IMAGES = Path(__file__).parent / "images"

INK, SOFT, LINE = "#22313a", "#5b6b74", "#8aa0aa"
FILLS = {"user": "#fdf1dc", "method": "#dff3ee", "world": "#e8eef4", "network": "#f7e3e3", "plain": "#ffffff"}
LEGEND = {
    "user": "the user's code",
    "method": "the method",
    "world": "Gossamer, outside of the method",
    "network": "network",
}
"""Whose work a box is."""


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

    def box(self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "world") -> None:
        """A rounded box; the first line is its title, the others are small."""
        corners = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7"'
        self.shapes.append(f'<rect {corners} fill="{FILLS[kind]}" stroke="{LINE}"/>')
        top = y + height / 2 - 8 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text(
                x + width / 2, top + 17 * number, line, 13 if number == 0 else 11, fill=INK if number == 0 else SOFT
            )

    def frame(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed frame around several shapes."""
        corners = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="9"'
        self.shapes.append(f'<rect {corners} fill="none" stroke="{LINE}" stroke-dasharray="2 4"/>')

    def hop(self, x: float, y: float, sign: str, kind: str, what: str, where: str) -> None:
        """A numbered step: what happens, and in which file."""
        self.shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="12" fill="{FILLS[kind]}" stroke="{LINE}"/>')
        self.text(x, y + 4.5, sign, 12)
        self.text(x + 24, y - 4, what, 13, "start")
        self.text(x + 24, y + 13, f"`{where}", 11, "start", SOFT)

    def legend(self, y: float, kinds: tuple[str, ...] = tuple(LEGEND)) -> None:
        x = 30
        for kind in kinds:
            self.shapes.append(
                f'<rect x="{x}" y="{y - 10:g}" width="13" height="13" rx="3" fill="{FILLS[kind]}" stroke="{LINE}"/>'
            )
            self.text(x + 20, y + 1, LEGEND[kind], 11, "start", SOFT)
            x += 46 + 6 * len(LEGEND[kind])

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


ROW = 46
"""Height of a step in a column."""


def column(d: Diagram, x: float, y: float, steps: list[tuple[str, str, str, str]]) -> None:
    """Steps under each other, with arrows between them."""
    for number, step in enumerate(steps):
        d.hop(x, y + ROW * number, *step)
        if number:
            d.arrow((x, y + ROW * (number - 1) + 13), (x, y + ROW * number - 13))


def real_step() -> None:
    d = Diagram("architecture-real-step", 900, 456)
    d.text(24, 32, "*One mini-batch on a real worker", 15, "start")
    d.text(30, 64, "*Training thread", 13, "start")
    files = "process/runtime/driver.py, flat_model.py"
    column(
        d,
        48,
        92,
        [
            ("1", "user", "loss.backward(), then optimizer.step()", "the user's loop"),
            ("2", "world", "Step pre-hook: take the lock, point parameters at x", files),
            ("3", "method", "The method's step() runs up to its Update", "methods/*.py"),
            ("4", "world", "It yields Mean or Wait: free the lock and wait", "process/runtime/effect_handler.py"),
            ("5", "network", "Collective among the members alive", "process/collectives/membership.py, peer_group.py"),
            ("6", "user", "The optimizer updates x", "torch.optim"),
            ("7", "world", "Post-hook: rest of step(), write weights, free the lock", files),
        ],
    )
    d.frame(28, 92 + 3 * ROW - 20, 418, 2 * ROW - 2)
    d.text(438, 92 + 4 * ROW - 24, "only methods that wait", 11, "end", SOFT)
    d.text(492, 64, "*Background thread, at the same time", 13, "start")
    column(
        d,
        510,
        92,
        [
            ("a", "method", "background() yields Pair: two neighbours agree", "process/pairwise/pairing.py"),
            (
                "b",
                "network",
                "Swap: each sends a snapshot, screens the other's",
                "pairwise/exchanges.py, edge.py, screening.py",
            ),
            ("c", "method", "Under the lock it adds the displacement to x", "methods/*.py, vectors/vector_math.py"),
        ],
    )
    d.arrow((498, 92 + 2 * ROW), (476, 92 + 2 * ROW), (476, 92), (498, 92))
    d.text(534, 92 + 3 * ROW - 14, "gossip and a2cid2; lasgd averages among all instead", 11, "start", SOFT)
    d.box(
        492,
        262,
        384,
        106,
        "*state.lock keeps 2, 3, 6, 7 and c apart",
        "A step does not hold it in 4 and 5, nor the background in a and b.",
        "Forward and backward read weights, a vector of its own.",
        "In 7, weights = eval_point(x) (process/runtime/flat_model.py).",
        kind="plain",
    )
    d.legend(432)
    d.save()


def virtual_step() -> None:
    d = Diagram("architecture-virtual-step", 900, 456)
    d.text(24, 32, "*One mini-batch in the virtual cluster", 15, "start")
    d.hop(
        48,
        70,
        "1",
        "world",
        "The simulation runs the next event of the queue",
        "virtual/simulation.py, sim/event_queue.py",
    )
    top = 148
    d.arrow((48, 83), (48, top - 13))
    d.arrow((48, 99), (510, 99), (510, top - 13))
    d.text(72, top - 28, "*Events of gradients", 13, "start")
    d.text(534, top - 28, "*Events of exchanges", 13, "start")
    column(
        d,
        48,
        top,
        [
            (
                "2",
                "world",
                "A gradient begins: the clock says how long it takes",
                "virtual/sim/cluster.py, sim/clock.py",
            ),
            ("3", "world", 'The tape records "gradient of this row"', "virtual/compute/tape.py"),
            (
                "4",
                "method",
                "The gradient ends: the method's step() runs",
                "virtual/sim/method_driver.py, methods/*.py",
            ),
            ("5", "world", "Update: the tape records an optimizer step", "virtual/compute/tape.py"),
        ],
    )
    column(
        d,
        510,
        top,
        [
            ("a", "method", "background() yields Pair: two workers meet", "virtual/comm/pairing.py"),
            (
                "b",
                "network",
                "Swap: the network says when vectors arrive",
                "virtual/comm/exchanges.py, comm/network.py",
            ),
            (
                "c",
                "method",
                "The displacement is recorded as sums of rows",
                "virtual/compute/rows.py, vectors/vector_math.py",
            ),
        ],
    )
    bottom = top + 4 * ROW + 14
    d.arrow((48, top + 3 * ROW + 13), (48, bottom - 13))
    d.arrow((510, top + 2 * ROW + 13), (510, bottom - 27), (49, bottom - 27))
    files = "virtual/compute/executor.py, evaluator.py, optimizers.py"
    d.hop(48, bottom, "6", "world", "When a row is read, the tape is executed in batches", files)
    d.arrow((48, bottom + 13), (48, bottom + ROW - 13))
    files = "virtual/simulation.py, results.py"
    d.hop(48, bottom + ROW, "7", "world", "A point of the history: loss, accuracy, consensus distance", files)
    d.legend(bottom + 2 * ROW - 4, ("method", "world", "network"))
    d.save()


def threads() -> None:
    d = Diagram("architecture-threads", 900, 452)
    d.text(24, 32, "*Threads of a real worker, and the lock", 15, "start")
    d.box(30, 56, 190, 70, "*training thread", "the user's loop,", "optimizer hooks", kind="user")
    d.box(30, 216, 190, 70, "*gossamer-background", "the method's", "background()", kind="method")
    d.box(262, 146, 170, 50, "*state.lock", "runtime/worker_state.py", kind="plain")
    d.arrow((220, 91), (347, 91), (347, 146))
    d.text(230, 66, "holds it in a step,", 11, "start", SOFT)
    d.text(230, 82, "not while it waits", 11, "start", SOFT)
    d.arrow((220, 251), (347, 251), (347, 196))
    d.text(230, 226, "holds it in a merge,", 11, "start", SOFT)
    d.text(230, 242, "not while it sends", 11, "start", SOFT)
    d.box(
        30,
        322,
        436,
        88,
        "*x and weights",
        "Steps and merges change x. Forward and backward read weights.",
        "The end of a step writes weights = eval_point(x):",
        "weights are never torn (runtime/flat_model.py).",
        kind="plain",
    )
    d.arrow((400, 196), (400, 322), label="guards")
    d.frame(484, 44, 398, 366)
    d.text(500, 66, "*These never touch x", 13, "start")
    boxes = [
        ("gossamer-async", "collectives that Start began", "world"),
        ("gossamer-heartbeat", "counts, looks for the dead", "world"),
        ("gossamer-follow", "reads the store", "world"),
        ("gossamer-net", "edges, heartbeats, store", "network"),
        ("gossamer-give-N", "gives the state to peer N", "network"),
        ("gossamer-batches", "numbers of shared batches", "world"),
        ("gossamer-status", "gossamer train: status", "world"),
        ("gossamer-monitor", "gossamer train: rank 0", "world"),
    ]
    for number, (name, what, kind) in enumerate(boxes):
        d.box(498 + 190 * (number % 2), 80 + 65 * (number // 2), 180, 54, f"*{name}", what, kind=kind)
    d.legend(436)
    d.save()


def generations() -> None:
    d = Diagram("architecture-generations", 860, 350)
    d.text(24, 32, "*The life of a membership generation g", 15, "start")
    d.box(30, 70, 170, 60, "*requested", "heartbeats tell all", kind="plain")
    d.box(345, 70, 170, 60, "*proposed", "coordinator lists members", kind="plain")
    d.box(660, 70, 170, 60, "*installed", "the view has begun", kind="plain")
    d.box(660, 230, 170, 60, "*connected", "process groups are built", kind="plain")
    d.box(345, 230, 170, 60, "*aligned", "all are at the same step", kind="plain")
    d.box(30, 230, 170, 60, "*active", "collectives run", kind="plain")
    d.arrow((200, 100), (345, 100), label="all wait or gone")
    d.arrow((515, 100), (660, 100), label="all have accepted")
    d.arrow((745, 130), (745, 230))
    d.arrow((660, 260), (515, 260), label="state transfer")
    d.arrow((345, 260), (200, 260), label="step is repeated")
    d.arrow((70, 230), (70, 130))
    d.text(82, 182, "a collective fails, or a worker", 11, "start", SOFT)
    d.text(82, 198, "comes back: request g + 1", 11, "start", SOFT)
    d.frame(331, 216, 513, 88)
    d.arrow((430, 216), (430, 156), (170, 156), (170, 130), dashed=True)
    d.text(442, 172, "here a connection or a transfer fails:", 11, "start", SOFT)
    d.text(442, 188, "request g + 1", 11, "start", SOFT)
    d.text(
        430,
        332,
        "process/views/view_change.py; process/collectives/membership.py; process/state/alignment.py",
        11,
        fill=SOFT,
    )
    d.save()


def tape() -> None:
    d = Diagram("architecture-tape", 760, 184)
    d.text(24, 32, "*Stages of the tape, for example", 15, "start")
    stages = [
        ("*program", "sums of rows", "executor.py", "plain"),
        ("*batch", "gradients", "evaluator.py", "world"),
        ("*program", "sums of rows", "executor.py", "plain"),
        ("*batch", "optimizer steps", "optimizers.py", "world"),
        ("*program", "sums of rows", "executor.py", "plain"),
        ("*batch", "means of all", "tape.py", "world"),
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
