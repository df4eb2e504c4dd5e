"""Forecasting networks of darts."""

from __future__ import annotations

from typing import Any

import torch
from darts.models.forecasting.block_rnn_model import _BlockRNNModule
from darts.models.forecasting.dlinear_model import _DLinearModule
from darts.models.forecasting.nbeats import _NBEATSModule
from darts.models.forecasting.nhits import _NHiTSModule
from darts.models.forecasting.nlinear_model import _NLinearModule
from darts.models.forecasting.tcn_model import _TCNModule
from darts.models.forecasting.tide_model import _TideModule
from darts.models.forecasting.transformer_model import _TransformerModule
from darts.models.forecasting.tsmixer_model import _TSMixerModule

from zoo.architecture import Batch, architecture


def _series(n: int = 12, channels: int = 2) -> list[Batch]:
    return [{"x_in": (torch.randn(b, n, channels), None)} for b in (4, 5)]


_COMMON: dict[str, Any] = {"input_chunk_length": 12, "output_chunk_length": 4, "input_dim": 2, "output_dim": 2, "nr_params": 1,
                           "train_sample_shape": [(12, 2), None, None, None, None, (4, 2)]}  # fmt: skip


def _darts(name: str, cls: Any, batches: Any = _series, **settings: Any) -> None:
    architecture(f"darts/{name}", lambda: cls(**_COMMON, **settings), batches)


_darts("TCN", _TCNModule, input_size=2, target_size=2, target_length=4, kernel_size=3, num_filters=4, num_layers=2,
       dilation_base=2, weight_norm=True, dropout=0.1)  # fmt: skip
_darts("DLinear", _DLinearModule, future_cov_dim=0, static_cov_dim=0, shared_weights=False, kernel_size=5, const_init=True)
_darts("NLinear", _NLinearModule, future_cov_dim=0, static_cov_dim=0, shared_weights=False, const_init=True, normalize=True)
_darts("NBEATS", _NBEATSModule, generic_architecture=False, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=[8, 8],
       expansion_coefficient_dim=3, trend_polynomial_degree=2, batch_norm=False, dropout=0.0, activation="ReLU")  # fmt: skip
_darts("NHiTS", _NHiTSModule, num_stacks=2, num_blocks=1, num_layers=2, layer_widths=[8, 8], pooling_kernel_sizes=((2,), (1,)),
       n_freq_downsample=((2,), (1,)), batch_norm=False, dropout=0.1, activation="ReLU", MaxPool1d=True)  # fmt: skip
_darts("Transformer", _TransformerModule, input_size=2, output_size=2, d_model=8, nhead=2, num_encoder_layers=1,
       num_decoder_layers=1, dim_feedforward=16, dropout=0.1, activation="relu")  # fmt: skip
_darts("BlockRNN", _BlockRNNModule, name="LSTM", input_size=2, hidden_dim=8, num_layers=2, target_size=2,
       num_layers_out_fc=[4], dropout=0.1, activation="ReLU")  # fmt: skip
_darts("TiDE", _TideModule, future_cov_dim=0, static_cov_dim=0, num_encoder_layers=1, num_decoder_layers=1, decoder_output_dim=4,
       hidden_size=8, temporal_decoder_hidden=8, temporal_width_past=2, temporal_width_future=2, use_layer_norm=True,
       dropout=0.1, temporal_hidden_size_past=None, temporal_hidden_size_future=None)  # fmt: skip
_darts("TSMixer", _TSMixerModule, past_cov_dim=0, future_cov_dim=0, static_cov_dim=0, hidden_size=8, ff_size=8, num_blocks=2,
       activation="ReLU", dropout=0.1, norm_type="LayerNorm", normalize_before=False,
       project_after_n_blocks=0)  # fmt: skip
