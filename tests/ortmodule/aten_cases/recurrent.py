"""Recurrent layers, as `torch.nn` calls them."""

import torch

from ortmodule.aten_case import Case, T


def _shapes(gates, features, hidden, layers=1, directions=1, bias=True):
    shapes = []
    for layer in range(layers):
        width = features if layer == 0 else hidden * directions
        for _ in range(directions):
            shapes += [T(gates * hidden, width), T(gates * hidden, hidden)]
            shapes += [T(gates * hidden)] * 2 if bias else []
    return shapes


def _lstm(layers=1, directions=1, bias=True, dropout=0.0, batch_first=False):
    def run(x, h, c, *weights):
        return torch.lstm(x, (h, c), list(weights), bias, layers, dropout, True, directions == 2, batch_first)

    state = T(layers * directions, 2, 3)
    return run, (
        T(*((2, 5) if batch_first else (5, 2)), 4),
        state,
        state,
        *_shapes(4, 4, 3, layers, directions, bias),
    )


def _other(function, gates, layers=1, directions=1, bias=True, dropout=0.0, batch_first=False):
    def run(x, h, *weights):
        return function(x, h, list(weights), bias, layers, dropout, True, directions == 2, batch_first)

    state = T(layers * directions, 2, 3)
    return run, (
        T(*((2, 5) if batch_first else (5, 2)), 4),
        state,
        *_shapes(gates, 4, 3, layers, directions, bias),
    )


CASES = [
    Case("lstm", *_lstm(), dynamic=(0,)),
    Case("lstm_batch_first", *_lstm(batch_first=True), dynamic=(0,)),
    Case("lstm_without_bias", *_lstm(bias=False), dynamic=(0,)),
    Case("lstm_bidirectional", *_lstm(directions=2), dynamic=(0,)),
    Case("lstm_two_layers", *_lstm(layers=2, directions=2), dynamic=(0,)),
    Case("lstm_dropout", *_lstm(layers=3, dropout=0.4), random=True, dynamic=(0,)),
    Case("gru", *_other(torch.gru, 3), dynamic=(0,)),
    Case(
        "gru_batch_first_bidirectional", *_other(torch.gru, 3, directions=2, batch_first=True), dynamic=(0,)
    ),
    Case("gru_two_layers_without_bias", *_other(torch.gru, 3, layers=2, bias=False), dynamic=(0,)),
    Case("rnn_tanh", *_other(torch.rnn_tanh, 1), dynamic=(0,)),
    Case("rnn_relu_bidirectional", *_other(torch.rnn_relu, 1, directions=2), dynamic=(0,)),
]
