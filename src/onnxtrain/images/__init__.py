"""Reads folders of images as training data: finds files and classes, decodes, resizes, crops and normalizes.

`ImageFolder` describes a folder with one subfolder per class, and :class:`Trainer` reads it:

```python
from onnxtrain.images import ImageFolder

photos = ImageFolder("photos/train", flip=True, crop=0.25)
trainer.fit(photos, validation="photos/val", epochs=5)
```

A plain path, `trainer.fit("photos/train")`, uses the defaults. Size, mean and standard deviation come from the model,
see :class:`Preprocessing`. This package requires `pip install 'onnxtrain[images]'`.
"""

from __future__ import annotations

# First of all imports: where onnx is missing, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.images._folder import ImageFolder
from onnxtrain.images._preprocessing import Preprocessing

__all__ = ["ImageFolder", "Preprocessing"]
