"""Trains linear heads of exactly the right size in PyTorch, in float64, and prints data and results as JSON.

There are three lessons: two classes; one more class, which begins with weights of 0; without the first class. Each
lesson has its own optimizer, as on the page.
"""

import json

import numpy as np
import torch

FEATURES, PICTURES, STEPS = 37, 12, 20
LESSONS = [["cup", "pen"], ["cup", "pen", "key"], ["pen", "key"]]


def main() -> None:
    """Prints features [12, 37] and per lesson its classes, labels, losses and the head after it."""
    rng = np.random.default_rng(0)
    centres = rng.normal(0, 1, (3, FEATURES))
    names = [LESSONS[1][i % 3] for i in range(PICTURES)]
    values = (centres[np.arange(PICTURES) % 3] + rng.normal(0, 0.7, (PICTURES, FEATURES))).astype(np.float32)
    known: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    lessons = []
    for classes in LESSONS:
        chosen = [i for i, name in enumerate(names) if name in classes]
        x = torch.tensor(values[chosen], dtype=torch.float64)
        y = torch.tensor([classes.index(names[i]) for i in chosen])
        layer = torch.nn.Linear(FEATURES, len(classes), dtype=torch.float64)
        with torch.no_grad():
            for i, name in enumerate(classes):
                weight, bias = known.get(name, (torch.zeros(FEATURES), torch.zeros(())))
                layer.weight[i], layer.bias[i] = weight, bias
        optimizer = torch.optim.AdamW(layer.parameters(), lr=2e-3, weight_decay=0.01)
        losses = []
        for _ in range(STEPS):
            loss = torch.nn.functional.cross_entropy(layer(x), y)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        weights, biases = layer.weight.detach(), layer.bias.detach()
        known = {name: (weights[i], biases[i]) for i, name in enumerate(classes)}
        readings = torch.softmax(layer(torch.tensor(values, dtype=torch.float64)), 1)
        lessons.append(
            {
                "classes": classes,
                "pictures": chosen,
                "labels": y.tolist(),
                "losses": losses,
                "weights": weights.tolist(),
                "biases": biases.tolist(),
                "readings": readings.tolist(),
            }
        )
    print(json.dumps({"features": values.tolist(), "lessons": lessons}))


if __name__ == "__main__":
    main()
