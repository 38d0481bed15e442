"""What a step costs on 2 to 512 ranks: a model of three numbers, latency, bandwidth and compute.

    python benchmarks/cost_model.py           # prints the tables; takes seconds, measures nothing
    python benchmarks/cost_model.py --docs    # also writes them, and the plot, in docs/

A ring of n ranks sums N bytes in 2 (n - 1) messages, in which each rank sends 2 (n - 1) / n N bytes and receives as
many (Patarasuk and Yuan 2009). In a hierarchy, the ranks of an island first sum among themselves, so that each has its
part; the ranks with the same part then make a ring over the network, which they share; at last each island gathers.

`benchmarks/network_check.py` compares these times with real ones, over links of a bandwidth that it sets.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import report

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = "images/cost_model.png"  # beside the page
RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
BACKWARD = 2 / 3  # the part of a step's computation in which there are gradients to send


@dataclasses.dataclass(frozen=True)
class Link:
    """A full-duplex link of a rank.

    Args:
        latency: Seconds of a message without content.
        bandwidth: Bytes per second, each way.
    """

    latency: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class Network:
    """Islands of ranks that have fast links among themselves, and share one link to the others.

    Args:
        link: Of an island.
        island: How many ranks it has.
        inner: The links in it. `None`: those of the network, for islands of one rank.
    """

    link: Link
    island: int = 1
    inner: Link | None = None


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained.

    Args:
        compute: Seconds of a step on one rank, without communication.
        size: Bytes of the gradients.
    """

    compute: float
    size: float


def ring(ranks: int, size: float, link: Link) -> float:
    """Returns the seconds of an all-reduce over a ring.

    Args:
        ranks: How many, each with a link of its own.
        size: Bytes that each rank has.
        link: Between two of them.
    """
    return 2 * (ranks - 1) * (link.latency + size / ranks / link.bandwidth)


def flat(ranks: int, size: float, network: Network) -> float:
    """Returns the seconds of one ring over all ranks, island after island: its slowest link sets the pace."""
    if ranks <= network.island:
        return ring(ranks, size, network.inner or network.link)
    links = [network.link, *([network.inner] if network.inner else [])]
    slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
    return ring(ranks, size, slowest)


def hierarchical(ranks: int, size: float, network: Network) -> float:
    """Returns the seconds of a sum in the islands, over rings of their ranks, and in the islands again.

    Raises:
        ValueError: If the islands are not full.
    """
    if ranks <= network.island:
        return ring(ranks, size, network.inner or network.link)
    if ranks % network.island:
        raise ValueError(f"Islands of {network.island} can't have {ranks} ranks.")
    # Half of a ring's messages sum, the other half gather: before and after the network they are one ring together.
    inside = ring(network.island, size, network.inner or network.link)
    # Each rank of an island is in a ring with its part of the bytes; they share the link, so it carries all parts.
    part = Link(network.link.latency, network.link.bandwidth / network.island)
    return inside + ring(ranks // network.island, size / network.island, part)


def best(ranks: int, size: float, network: Network) -> float:
    """Returns the seconds of the faster of both ways."""
    return min(flat(ranks, size, network), hierarchical(ranks, size, network))


def step(model: Model, reduction: float, overlap: float) -> float:
    """Returns the seconds of a step.

    Args:
        model: What is trained.
        reduction: Seconds of its all-reduce.
        overlap: Which part of the computation can go on meanwhile: 0, or up to `BACKWARD`.
    """
    return model.compute + max(0.0, reduction - overlap * model.compute)


def efficiency(model: Model, reduction: float, overlap: float) -> float:
    """Returns which part of its speed alone each rank keeps: 1 is linear scaling."""
    return model.compute / step(model, reduction, overlap)


# --- What it says ---

# Bandwidths are those of the names; latencies are typical of a message between two processes, with TCP or in a GPU.
NETWORKS = {
    "25 GbE": Network(Link(30e-6, 25e9 / 8)),
    "100 GbE": Network(Link(20e-6, 100e9 / 8)),
    "islands of 8 with NVLink, 100 GbE between them": Network(Link(20e-6, 100e9 / 8), 8, Link(5e-6, 150e9)),
}
# The hosts of the Horovod paper: 4 Pascal GPUs each, on PCIe, with 25 GbE. The images per second of one P100 at
# batches of 64 are those that TensorFlow published in 2017 for a DGX-1; that of ResNet-101 lies between its ResNet-50
# (219) and ResNet-152 (92), by their operations.
PAPER_HOSTS = Network(Link(30e-6, 25e9 / 8), 4, Link(10e-6, 10e9))
PAPER = {
    "Inception V3": (Model(64 / 142, 4 * 27.2e6), 0.90),
    "ResNet-101": (Model(64 / 130, 4 * 44.5e6), 0.90),
    "VGG-16": (Model(64 / 154, 4 * 138.4e6), 0.68),
}
PAPER_RANKS = 512


def prediction(model: Model, network: Network, ranks: int) -> tuple[float, float]:
    """Returns the efficiency without overlap, and with all that is possible."""
    seconds = best(ranks, model.size, network)
    return efficiency(model, seconds, 0.0), efficiency(model, seconds, BACKWARD)


def paper_table() -> str:
    lines = ["| 512 GPUs, 25 GbE | No overlap | Full overlap | Measured in the paper |", "|---|:---:|:---:|:---:|"]
    for name, (model, measured) in PAPER.items():
        low, high = prediction(model, PAPER_HOSTS, PAPER_RANKS)
        lines.append(f"| {name} | {low:.2f} | {high:.2f} | {measured:.2f} |")
    return "\n".join(lines)


def networks_table(ranks: Sequence[int] = (2, 8, 64, 512)) -> str:
    lines = ["| | " + " | ".join(f"{count} ranks" for count in ranks) + " |", "|---|" + ":---:|" * len(ranks)]
    for name, (model, _) in PAPER.items():
        lines.append(f"| **{name}** " + "| " * len(ranks) + "|")
        for network, each in NETWORKS.items():
            bands = (prediction(model, each, count) for count in ranks)
            lines.append(f"| {network} | " + " | ".join(f"{low:.2f} to {high:.2f}" for low, high in bands) + " |")
    return "\n".join(lines)


def plot(path: Path) -> None:
    """Writes a picture: the efficiency by the number of ranks, for each model and network.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PAPER), sharey=True, layout="constrained", figsize=(10, 3.6))
    for axis, (name, (model, measured)) in zip(axes, PAPER.items(), strict=True):
        for label, network in {**NETWORKS, "hosts of the Horovod paper": PAPER_HOSTS}.items():
            low, high = zip(*(prediction(model, network, ranks) for ranks in RANKS), strict=True)
            (line,) = axis.plot(RANKS, high, label=label)
            axis.fill_between(RANKS, low, high, color=line.get_color(), alpha=0.12)
        axis.plot(PAPER_RANKS, measured, "k*", markersize=9, label="measured in the paper")
        axis.set_xscale("log", base=2)
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_xlabel("ranks")
        axis.set_ylim(0, 1.05)
    axes[0].set_ylabel("efficiency: no overlap to full overlap")
    axes[-1].legend(fontsize=7, loc="lower left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="also write the tables and the plot in docs/")
    args = parser.parse_args()
    text = f"{paper_table()}\n\n{networks_table()}"
    print(text)
    if args.docs:
        plot(PAGE.parent / PLOT)
        shown = f"{text}\n\n![Predicted efficiency by the number of ranks, for three models and four networks]({PLOT})"
        PAGE.write_text(report.replaced(PAGE.read_text(), shown, *report.markers("cost model")))


if __name__ == "__main__":
    sys.exit(main())
