"""``gossamer topology``: print the constants of a topology, and draw it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gossamer.cli.options import parse_number
from gossamer.cli.output import print_json, print_table
from gossamer.report.formats import counted
from gossamer.topology import build, describe, draw, names


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    if parsed.name is None:
        if parsed.json:
            table = [{"topology": name, "summary": describe(name)} for name in names()]
            print_json({"topologies": table})
        else:
            print_table("", ["topology", "description"], [[name, describe(name)] for name in names()])
        return 0
    rate = parse_number(parsed.rate, "--rate", float, 0)
    workers = None if parsed.workers is None else parse_number(parsed.workers, "--workers", int, 1)
    if workers is None and (parsed.name in names() or parsed.name.partition(":")[0] in names()):
        workers = None if parsed.name.startswith("torus:") else 16
    nodes = None if parsed.nodes is None else parse_number(parsed.nodes, "--nodes", int, 1)
    topology = build(parsed.name, workers=workers, seed=parse_number(parsed.seed, "--seed", int, 0), nodes=nodes)
    constants = topology.constants(rate)
    degrees = topology.degrees
    document = {
        "topology": topology.name,
        "workers": topology.workers,
        "edges": topology.num_edges,
        "degree": {"min": int(degrees.min()), "max": int(degrees.max())},
        "rate": rate,
        "chi1": constants.chi1,
        "chi2": constants.chi2,
        "eta": constants.eta,
        "alpha_tilde": constants.alpha_tilde,
        "spectral_gap": constants.spectral_gap,
        "period": topology.period,
        "contraction": topology.contraction(),
        "rounds_to_consensus": topology.rounds_to_consensus(),
        "note": topology.note,
    }
    if parsed.plot is not None:
        draw(topology, Path(parsed.plot))
        document["plot"] = parsed.plot
    if parsed.json:
        print_json(document)
        return 0
    consensus = document["rounds_to_consensus"]
    rows = [
        ["edges", f"{topology.num_edges}", "pairs of neighbours"],
        ["degree", f"{degrees.min()} to {degrees.max()}", "neighbours of a worker"],
        ["χ1", f"{constants.chi1:.4g}", "1/λ₂ of the exchange rates' Laplacian: how slowly gossip mixes"],
        ["χ2", f"{constants.chi2:.4g}", "half the largest effective resistance of an edge"],
        ["η", f"{constants.eta:.4g}", "A²CiD²'s momentum"],
        ["α̃", f"{constants.alpha_tilde:.4g}", "A²CiD²'s second step size"],
        ["spectral gap", f"{constants.spectral_gap:.4g}", "of the Metropolis–Hastings mixing matrix"],
        ["period", f"{topology.period}", "rounds of its schedule (overlap)"],
        ["contraction", f"{document['contraction']:.3g}", "largest share of a difference that a period leaves"],
        ["exact consensus", "never" if consensus is None else counted(consensus, "round"), "of the schedule"],
    ]
    print_table(
        f"{topology.name}, {counted(topology.workers, 'worker')}, rate {rate:g}", ["", "value", "meaning"], rows
    )
    if topology.note:
        print(f"note: {topology.note}")
    if parsed.plot:
        print(f"drawn to {parsed.plot}")
    return 0
