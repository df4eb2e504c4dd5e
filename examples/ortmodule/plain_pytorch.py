"""A PyTorch training loop, unchanged but for one line: `model = ORTModule(model)`.

Usage: python examples/ortmodule/plain_pytorch.py [--epochs 8]
"""

import argparse

import torch
from digits import images
from torch import nn

from onnxtrain.ortmodule import ORTModule


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 16, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    train_x, test_x, train_y, test_y = images()

    model = make_model()
    model = ORTModule(model)  # the one line

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for batch in torch.randperm(len(train_x)).split(32):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(train_x[batch]), train_y[batch])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        model.eval()
        with torch.no_grad():
            accuracy = (model(test_x).argmax(1) == test_y).float().mean().item()
        print(f"epoch {epoch + 1}  loss {total / len(train_x):.4f}  test accuracy {accuracy:.4f}")
    print(model.report())


if __name__ == "__main__":
    main()
