"""Encodes tables as arrays for a model, and prepends the same encoding to the trained model.

`TableEncoder` fills missing values, encodes categories, scales numbers, and numbers the classes of a target. It is
fitted to the training table and then encodes other tables in the same way:

```python
encoder = TableEncoder(target="survived", impute="median", encode="one-hot", scale=True)
encoder.fit("passengers.csv")
trainer.fit(encoder.transform("passengers.csv"), encoder.transform_target("passengers.csv"))
trainer.export("network.onnx")
onnx.save(encoder.attach("network.onnx", logits="logits", activation="softmax"), "model.onnx")
```

The commands `onnxtrain train`, `evaluate`, `predict` and `export` use it for .csv, .tsv and .parquet files. This
package requires `pip install 'onnxtrain[data]'`.
"""

from __future__ import annotations

# First of all imports: where onnx is missing, the error then says what to install.
import onnxtrain._desk  # noqa: F401  # isort: skip

from onnxtrain.tables._columns import CategoryColumn, Column, NumberColumn
from onnxtrain.tables._dialect import Dialect
from onnxtrain.tables._encoder import PROPERTY, TableEncoder
from onnxtrain.tables._graph import class_names
from onnxtrain.tables._impute import is_fill_rule
from onnxtrain.tables._spelling import category_numbers
from onnxtrain.tables._table import TABLE_SUFFIXES, Table, Values, read_table, table_suffix

__all__ = [
    "PROPERTY",
    "TABLE_SUFFIXES",
    "CategoryColumn",
    "Column",
    "Dialect",
    "NumberColumn",
    "Table",
    "TableEncoder",
    "Values",
    "category_numbers",
    "class_names",
    "is_fill_rule",
    "read_table",
    "table_suffix",
]
