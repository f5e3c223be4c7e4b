"""PyTorch Geometric: graph networks on one graph and on batches of graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.frameworks.support import installed, reads

installed("torch_geometric")
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

USES_DEVICE = True
STEPS = 5
# How often two layers wait in all steps: what masks the self-loops of the edges has a shape that depends on data.
READS = {"gcn": 2 * STEPS, "gcn_cached": 2, "gat": 2 * STEPS}
FEATURES, CLASSES = 6, 3
LAYERS: dict[str, Any] = {
    "gcn": GCNConv,
    "gcn_cached": lambda i, o: GCNConv(i, o, cached=True),
    "gat": lambda i, o: GATConv(i, o, heads=2, concat=False),
    "gat_plain": lambda i, o: GATConv(i, o, heads=2, concat=False, add_self_loops=False),
    "sage": SAGEConv,
    "gin": lambda i, o: GINConv(torch.nn.Sequential(torch.nn.Linear(i, o), torch.nn.ReLU(), torch.nn.Linear(o, o))),
}


def _graph(seed: int, nodes: int) -> Data:
    source = torch.Generator().manual_seed(seed)
    edges = torch.randint(nodes, (2, 3 * nodes), generator=source)
    x = torch.randn(nodes, FEATURES, generator=source)
    return Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,), generator=source), label=x.argmax(1) % CLASSES)


class Net(torch.nn.Module):
    """Two layers, as in PyTorch Geometric's introduction; with a pooling, it classifies graphs instead of nodes."""

    def __init__(self, kind: str, pool: Any = None) -> None:
        super().__init__()
        self.first, self.second = LAYERS[kind](FEATURES, 8), LAYERS[kind](8, CLASSES)
        self.pool = pool

    def forward(self, data: Any) -> torch.Tensor:
        x = F.relu(self.first(data.x, data.edge_index))
        x = self.second(x, data.edge_index)
        return F.log_softmax(x if self.pool is None else self.pool(x, data.batch), dim=1)


def _train(kind: str, device: str) -> tuple[torch.Tensor, Net]:
    torch.manual_seed(0)
    model, data = Net(kind).to(device), _graph(0, 12).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), data.label)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), model


@pytest.mark.parametrize("kind", list(LAYERS))
def test_node_classification_trains_as_on_the_cpu(kind: str) -> None:
    expected, _ = _train(kind, "cpu")
    with reads() as seen:
        losses, _ = _train(kind, "tarry")
    assert seen.count <= READS.get(kind, 0)
    torch.testing.assert_close(losses.cpu(), expected)


@pytest.mark.parametrize("pool", [global_mean_pool, global_add_pool, global_max_pool], ids=lambda pool: pool.__name__)
def test_batches_of_graphs_train_evaluate_and_resume(pool: Any, tmp_path: Path) -> None:
    loader = DataLoader([_graph(seed, 4 + seed) for seed in range(6)], batch_size=2)

    def epoch(model: Net, optimizer: Any, device: str) -> list[torch.Tensor]:
        losses = []
        for data in loader:
            data = data.to(device)
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), data.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def make(device: str) -> tuple[Net, Any]:
        torch.manual_seed(0)
        model = Net("gcn", pool).to(device)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2)

    def run(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = make(device)
        losses = epoch(model, optimizer, device)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / device)
        model, optimizer = make(device)
        saved = torch.load(tmp_path / device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses += epoch(model, optimizer, device)
        model.eval()
        right = torch.cat([model(data.to(device)).argmax(1) == data.y.to(device) for data in loader])
        return torch.stack(losses).cpu(), right.cpu()

    for actual, expected in zip(run("tarry"), run("cpu"), strict=True):
        torch.testing.assert_close(actual, expected)
