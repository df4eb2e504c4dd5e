"""A LightningModule whose network is an ORTModule.

Needs: pip install lightning
Usage: python examples/ortmodule/lightning_module.py [--epochs 8]
"""

import argparse

import lightning
import torch
from digits import images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from onnxtrain.ortmodule import ORTModule


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = ORTModule(
            nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
        )

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("test_accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    lightning.seed_everything(0)
    train_x, test_x, train_y, test_y = images()
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(train_x, train_y), batch_size=32, shuffle=True))
    (result,) = trainer.test(model, DataLoader(TensorDataset(test_x, test_y), batch_size=360))
    print(f"test accuracy {result['test_accuracy']:.4f}")
    print(model.net.report())


if __name__ == "__main__":
    main()
