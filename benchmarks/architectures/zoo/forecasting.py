"""Forecasting networks of darts."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from darts import models
from torch import nn

from zoo.architecture import Batch, architecture

INPUT, OUTPUT, CHANNELS = 12, 4, 2


def _network(kind: str, **settings: Any) -> nn.Module:
    model = getattr(models, kind)(input_chunk_length=INPUT, output_chunk_length=OUTPUT, **settings)
    shapes = ((INPUT, CHANNELS), None, None, None, None, (OUTPUT, CHANNELS))
    sample = tuple(None if shape is None else np.zeros(shape, np.float32) for shape in shapes)
    model.train_sample = sample
    made: nn.Module = model._create_model(sample)
    return made


def _series(parts: int = 3) -> list[Batch]:
    return [{"x_in": (torch.randn(b, INPUT, CHANNELS), *[None] * (parts - 1))} for b in (4, 5)]


def _darts(kind: str, parts: int = 3, **settings: Any) -> None:
    architecture(f"darts/{kind}", partial(_network, kind, **settings), partial(_series, parts))


_darts("TCNModel", num_filters=4, dilation_base=2, weight_norm=True, dropout=0.1)
_darts("DLinearModel", kernel_size=5)
_darts("NLinearModel")
_darts("NBEATSModel", generic_architecture=False, num_blocks=1, num_layers=2, layer_widths=8)
_darts("NHiTSModel", num_stacks=2, num_blocks=1, num_layers=2, layer_widths=8)
_darts("TransformerModel", d_model=8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=16)
_darts("BlockRNNModel", model="LSTM", hidden_dim=8, n_rnn_layers=2, dropout=0.1)
_darts("TiDEModel", hidden_size=8, decoder_output_dim=4, temporal_decoder_hidden=8, use_layer_norm=True)
_darts("TSMixerModel", hidden_size=8, ff_size=8, num_blocks=2)
