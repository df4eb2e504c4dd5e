"""scikit-learn's handwritten digits for the examples: 8x8 images, or sequences of 64 gray levels from 0 to 16."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Train images, test images (float [n, 1, 8, 8], 0 to 1), train labels, test labels (int64 [n])."""
    data = load_digits()
    pixels = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return train_test_split(
        pixels, torch.tensor(data.target), test_size=0.2, random_state=0, stratify=data.target
    )


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with each image as 64 tokens (int64 [n, 64])."""
    train_x, test_x, train_y, test_y = images()
    return (train_x * 16).long().flatten(1), (test_x * 16).long().flatten(1), train_y, test_y
