"""Graph networks of PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch_geometric.nn as geometric
from torch import nn

from zoo.architecture import Batch, architecture

FEATURES = 6


def graph(nodes: int, edges: int) -> Batch:
    """A random graph, whose every node has an edge to the next one."""
    chain = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    return {
        "x": torch.randn(nodes, FEATURES),
        "edge_index": torch.cat([chain, torch.randint(nodes, (2, edges))], 1),
    }


def graphs() -> list[Batch]:
    return [graph(9, 14), graph(11, 17)]


class Pooled(nn.Module):
    """Two convolutions, a pooling over each graph of a batch, a classifier."""

    def __init__(self, convolution: Callable[[int, int], nn.Module], pool: nn.Module | None = None) -> None:
        super().__init__()
        self.first = convolution(FEATURES, 8)
        self.second = convolution(8, 8)
        self.pool = pool or geometric.MeanAggregation()
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> Any:
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.last(self.pool(x, batch))


class Coarsened(nn.Module):
    """A convolution, a selection of nodes by a learned score, a convolution on what is left."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.first = geometric.GCNConv(FEATURES, 8)
        self.pool = pool
        self.second = geometric.GCNConv(8, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> Any:
        x = self.first(x, edge_index).relu()
        x, edge_index, _, batch, *_ = self.pool(x, edge_index, batch=batch)
        x = self.second(x, edge_index).relu()
        return self.last(geometric.global_max_pool(x, batch, 2))


def batched() -> list[Batch]:
    return [g | {"batch": (torch.arange(len(g["x"])) > 4).long()} for g in graphs()]


for _name in ("GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"):
    _own: dict[str, Any] = {}
    if _name == "PNA":
        _own = {
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification"],
            "deg": torch.tensor([0, 2, 5, 2]),
        }
    architecture(
        f"geometric/{_name}",
        partial(getattr(geometric, _name), FEATURES, 8, 2, out_channels=3, dropout=0.1, **_own),
        graphs,
    )
for _name, _convolution in {
    "GATv2Conv": partial(geometric.GATv2Conv, edge_dim=None),
    "TransformerConv": geometric.TransformerConv,
    "SGConv": partial(geometric.SGConv, K=2),
    "ChebConv": partial(geometric.ChebConv, K=2),
    "TAGConv": geometric.TAGConv,
    "ARMAConv": geometric.ARMAConv,
    "GraphConv": geometric.GraphConv,
    "LEConv": geometric.LEConv,
    "ClusterGCNConv": geometric.ClusterGCNConv,
    "FeaStConv": geometric.FeaStConv,
    "GENConv": geometric.GENConv,
    "ResGatedGraphConv": geometric.ResGatedGraphConv,
    "SuperGATConv": None,
}.items():
    if _convolution is not None:
        architecture(f"geometric/{_name}", partial(Pooled, _convolution), batched)
for _name, _pool in {
    "TopKPooling": lambda: geometric.TopKPooling(8, 0.5),
    "SAGPooling": lambda: geometric.SAGPooling(8, 0.5),
    "ASAPooling": lambda: geometric.ASAPooling(8, 0.5),
}.items():
    architecture(f"geometric/{_name}", lambda _pool=_pool: Coarsened(_pool()), batched)
for _name, _aggregation in {
    "SoftmaxAggregation": lambda: geometric.SoftmaxAggregation(learn=True),
    "SortAggregation": None,
    "Set2Set": None,
    "AttentionalAggregation": lambda: geometric.AttentionalAggregation(nn.Linear(8, 1)),
    "MedianAggregation": geometric.MedianAggregation,
    "LSTMAggregation": lambda: geometric.LSTMAggregation(8, 8),
}.items():
    if _aggregation is not None:
        architecture(
            f"geometric/{_name}",
            lambda _aggregation=_aggregation: Pooled(geometric.GCNConv, _aggregation()),
            batched,
        )
architecture(
    "geometric/SchNet",
    partial(
        geometric.SchNet,
        hidden_channels=16,
        num_filters=16,
        num_interactions=2,
        num_gaussians=8,
        interaction_graph=lambda pos, batch: _complete(pos, batch),
    ),
    lambda: [
        {"z": torch.randint(1, 9, (n,)), "pos": torch.randn(n, 3), "batch": (torch.arange(n) > 3).long()}
        for n in (7, 8)
    ],
)
architecture(
    "geometric/RGCNConv",
    lambda: _Relational(),
    lambda: [g | {"edge_type": torch.arange(g["edge_index"].shape[1]) % 3} for g in graphs()],
)


def _complete(pos: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs of the same molecule, and their distances."""
    same = (batch[:, None] == batch) & ~torch.eye(len(batch), dtype=torch.bool)
    row, column = same.nonzero().T
    return torch.stack([row, column]), (pos[row] - pos[column]).norm(dim=-1)


class _Relational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = geometric.RGCNConv(FEATURES, 8, 3, num_bases=2)
        self.second = geometric.FastRGCNConv(8, 3, 3)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor, edge_type: torch.Tensor) -> Any:
        return self.second(self.first(x, edge_index, edge_type).relu(), edge_index, edge_type)
