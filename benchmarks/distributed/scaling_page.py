"""Print the tables of notes/scaling.md, by scaling_model.py and by what scaling_measured.py has measured.

Usage: python benchmarks/distributed/scaling_page.py [--write] [--plot notes/images/workers.png]
`--write` puts the tables into the page, each between the comments of its name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "common"))

import scaling_measured
from page_tables import lines, write_tables
from scaling_model import (
    ENGINES,
    FLOAT32,
    NETWORKS,
    RANK,
    RESULTS,
    SIZES,
    WORKERS,
    Net,
    Network,
    all_reduce,
    compute_seconds,
    exchange_seconds,
    state_bytes,
    step_bytes,
    step_seconds,
    transformer,
)

PAGE = Path(__file__).parents[2] / "notes" / "scaling.md"
WAYS = {"float32": "Trainer", "bfloat16": "Trainer, bfloat16", "adapters": "Trainer, LoRA"}
STATES = {
    "DDP": "DistributedDataParallel",
    "`fully_shard`": "fully_shard, each layer",
    "Trainer": "Trainer",
    "Trainer, ZeRO-1": "Trainer, ZeRO-1",
    "Trainer, adapters": "Trainer, LoRA",
}


def short(value: float, digits: int = 2) -> str:
    """Writes a number with some digits, e.g. 0.013, 1.7, 240."""
    text = f"{value:#.{digits}g}" if value < 10**digits else f"{value:,.0f}"
    return (f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text.rstrip(".")) if value else "0"


def net(size: str, way: str) -> Net:
    """Describes a net of `SIZES`, with adapters if the engine trains them."""
    return transformer(**SIZES[size], rank=RANK if "LoRA" in way else None)


def costs() -> str:
    """Bytes of a step and of the state per parameter, with 8 workers."""
    # A hundred layers, each larger than a bucket.
    layers = Net((10**7,) * 100)
    rows = []
    for name, engine in ENGINES.items():
        if "LoRA" in name:
            continue
        sent, kept = (
            [f(engine, layers, workers) / layers.size for workers in (8, 1024)]
            for f in (step_bytes, state_bytes)
        )
        rows.append(
            [
                f"`{name}`" if "," not in name else name,
                *(f"{x:.2f}" for x in sent),
                *(f"{x:.1f}" for x in kept),
            ]
        )
    return lines(["engine", "sent, 8 workers", "sent, 1,024", "kept, 8 workers", "kept, 1,024"], rows)


def measured_bytes(results: dict[str, Any]) -> str:
    """Bytes of a step of all workers, measured beside the model."""
    rows = []
    for row in results["bytes"]:
        count = row["workers"]
        said = count * step_bytes(
            ENGINES[row["engine"]],
            scaling_measured.net_of(row["engine"], scaling_measured.WIDTH),
            count,
            gloo=True,
        )
        rows.append(
            [
                row["engine"],
                str(count),
                f"{said:,.0f}",
                f"{row['bytes']:,.0f}",
                f"{100 * (row['bytes'] / said - 1):+.1f} %",
            ]
        )
    return lines(["engine", "workers", "model", "measured", "difference"], rows)


def said_memory(engine: str, workers: int) -> float:
    """Returns the bytes per parameter between the two nets of scaling_measured.py."""
    nets = [scaling_measured.net_of(engine, width) for width in scaling_measured.WIDTHS]
    small, large = (state_bytes(ENGINES[engine], one, workers, built=True) for one in nets)
    return (large - small) / (sum(nets[1].layers) - sum(nets[0].layers))


def measured_memory(results: dict[str, Any]) -> str:
    """Bytes that a worker keeps per parameter, measured beside the model."""
    rows = [
        [
            row["engine"],
            str(row["workers"]),
            f"{said_memory(row['engine'], row['workers']):.1f}",
            f"{row['bytes per parameter']:.1f}",
        ]
        for row in results["memory"]
    ]
    return lines(["engine", "workers", "model", "measured"], rows)


def measured_times(results: dict[str, Any]) -> str:
    """Seconds of a step, measured beside the model with the rate and the latency of this machine's all-reduce."""
    seconds = {(row["engine"], row["workers"]): row["seconds"] for row in results["times"]}
    rows = []
    for (engine, workers), measured in seconds.items():
        if workers == 1 or engine == "all-reduce":
            continue
        short_one, long_one = seconds["all-reduce", workers]
        network = Network(
            rate=all_reduce(scaling_measured.LONG_BYTES, workers) / (long_one - short_one),
            latency=short_one / (2 * (workers - 1)),
        )
        compute = seconds[engine, 1]
        one = scaling_measured.net_of(engine, scaling_measured.WIDTH)
        said = step_seconds(ENGINES[engine], one, workers, network, compute)
        rows.append(
            [engine, str(workers), *(f"{1000 * value:.1f} ms" for value in (compute, said, measured))]
        )
    return lines(["engine", "workers", "one worker", "model", "measured"], rows)


def exchanges() -> str:
    """Seconds of the messages of a step for sizes of nets and networks."""
    rows = []
    for size in SIZES:
        for way, engine in WAYS.items():
            cells = []
            for network in NETWORKS.values():
                counts = [n for n in WORKERS if network.most is None or n <= network.most]
                cells.append(
                    " / ".join(
                        short(exchange_seconds(ENGINES[engine], net(size, engine), n, network))
                        for n in counts
                    )
                )
            rows.append([size, way, *cells])
    return lines(["network", "gradients", *NETWORKS], rows)


def states() -> str:
    """Gigabytes that a worker keeps, by engine, size and number of workers."""
    rows = [
        [
            size,
            *(
                " / ".join(short(state_bytes(ENGINES[e], net(size, e), n) / 1e9) for n in WORKERS)
                for e in STATES.values()
            ),
        ]
        for size in SIZES
    ]
    return lines(["network", *STATES], rows)


def efficiency(engine: str, size: str, workers: int, network: str) -> float:
    """Returns the share of a step in which the devices compute."""
    one = net(size, engine)
    compute = compute_seconds(one)
    return compute / step_seconds(ENGINES[engine], one, workers, NETWORKS[network], compute)


def shares() -> str:
    """Percent of a step in which a device computes."""
    rows = []
    for size in SIZES:
        for way, engine in {**WAYS, "`fully_shard`": "fully_shard, each layer"}.items():
            cells = []
            for name, network in NETWORKS.items():
                counts = [n for n in WORKERS if network.most is None or n <= network.most]
                cells.append(" / ".join(f"{100 * efficiency(engine, size, n, name):.0f}" for n in counts))
            rows.append([size, way, *cells])
    return lines(["network", "gradients", *NETWORKS], rows)


def sizes() -> str:
    """Nets of the tables."""
    rows = []
    for size, shape in SIZES.items():
        adapters = transformer(**shape, rank=RANK)
        rows.append(
            [
                size,
                f"{shape['blocks']}, {shape['width']:,}, {shape['hidden']:,}",
                f"{FLOAT32 * shape['size'] / 1e9:.1f} GB",
                f"{FLOAT32 * sum(adapters.tensors) / 1e6:.1f} MB",
                f"{short(compute_seconds(transformer(**shape)))} s, {short(compute_seconds(adapters))} s",
            ]
        )
    return lines(
        [
            "network",
            "blocks, width, hidden",
            "gradients in float32",
            "gradients of adapters",
            "computation of a step, with adapters",
        ],
        rows,
    )


def read_results() -> dict[str, Any]:
    """Reads what scaling_measured.py has measured."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    return results


def tables() -> dict[str, str]:
    """Makes all tables of the page by name."""
    results = read_results()
    timed = {"measured-times": measured_times(results)} if "times" in results else {}
    return timed | {
        "costs": costs(),
        "measured-bytes": measured_bytes(results),
        "measured-memory": measured_memory(results),
        "sizes": sizes(),
        "exchanges": exchanges(),
        "shares": shares(),
        "states": states(),
    }


def plot(path: Path) -> None:
    """Draws the share of computation against the number of workers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    counts = [2**k for k in range(1, 11)]
    figure, panels = pyplot.subplots(1, len(SIZES), figsize=(11, 3.8), sharey=True)
    styles = {"float32": "-", "bfloat16": "--", "adapters": ":"}
    for axes, size in zip(panels, SIZES, strict=True):
        for colour, (name, network) in enumerate(NETWORKS.items()):
            known = [n for n in counts if network.most is None or n <= network.most]
            for way, engine in WAYS.items():
                values = [100 * efficiency(engine, size, n, name) for n in known]
                label = name if way == "float32" else None
                axes.plot(known, values, styles[way], color=f"C{colour}", label=label, linewidth=1.5)
        axes.set_xscale("log", base=2)
        axes.set_title(f"{size} parameters", fontsize=10)
        axes.set_xlabel("workers")
        axes.set_ylim(0, 102)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of a step that computes, %")
    for way, style in styles.items():
        panels[1].plot([], [], style, color="grey", label=way)
    handles = dict(zip(*reversed(panels[1].get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="lower center", ncols=len(handles), fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    write_tables(PAGE, tables(), plot)
