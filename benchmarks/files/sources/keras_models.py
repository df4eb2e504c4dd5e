"""Models of Keras, by tf2onnx and by Keras's own export."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras  # isort: skip
import numpy as np
import tensorflow as tf
import tf2onnx
from keras import layers

__all__ = ["make"]

OPSETS = (13, 15, 17, 18, 11, 16)
IMAGES, ROWS, SEQUENCES, TOKENS = (12, 12, 3), (8,), (6, 8), (7,)


def stack(*parts: layers.Layer, shape: tuple[int, ...], dtype: str = "float32") -> keras.Model:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def residual() -> keras.Model:
    x = keras.Input(IMAGES)
    y = layers.Conv2D(6, 3, padding="same", use_bias=False)(x)
    y = layers.ReLU()(layers.BatchNormalization()(y))
    z = layers.BatchNormalization()(layers.Conv2D(6, 3, padding="same")(y))
    y = layers.ReLU()(layers.add([y, z]))
    return keras.Model(x, layers.Dense(4)(layers.GlobalAveragePooling2D()(y)))


def unet() -> keras.Model:
    x = keras.Input(IMAGES)
    a = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    b = layers.Conv2D(6, 3, padding="same", activation="relu")(layers.MaxPooling2D()(a))
    c = layers.concatenate([a, layers.UpSampling2D(interpolation="bilinear")(b)])
    return keras.Model(x, layers.Conv2D(2, 1)(c))


def transformer() -> keras.Model:
    x = keras.Input(TOKENS, dtype="int32")
    y = layers.Embedding(30, 8)(x)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4)(y, y))
    y = layers.LayerNormalization()(y + layers.Dense(8)(layers.Dense(16, activation="gelu")(y)))
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y)))


def squeeze() -> keras.Model:
    x = keras.Input(IMAGES)
    y = layers.DepthwiseConv2D(3, padding="same")(x)
    y = layers.Activation("swish")(layers.BatchNormalization()(layers.Conv2D(8, 1)(y)))
    s = layers.Dense(8, activation="sigmoid")(
        layers.Dense(2, activation="relu")(layers.GlobalAveragePooling2D()(y))
    )
    return keras.Model(
        x, layers.Dense(4)(layers.Flatten()(layers.multiply([y, layers.Reshape((1, 1, 8))(s)])))
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    "dense": lambda: stack(
        layers.Dense(16, activation="relu"), layers.Dense(3, activation="softmax"), shape=ROWS
    ),
    **{
        f"dense-{act}": lambda act=act: stack(layers.Dense(12, activation=act), layers.Dense(2), shape=ROWS)
        for act in (
            "tanh",
            "elu",
            "selu",
            "gelu",
            "swish",
            "softplus",
            "softsign",
            "hard_sigmoid",
            "exponential",
            "mish",
        )
    },
    "prelu": lambda: stack(layers.Dense(12), layers.PReLU(), layers.Dense(2), shape=ROWS),
    "lenet": lambda: stack(
        layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(6, 3, activation="tanh"),
        layers.AveragePooling2D(2), layers.Flatten(), layers.Dense(4, activation="softmax"), shape=IMAGES,
    ),
    "batchnorm": lambda: stack(
        layers.Conv2D(4, 3, use_bias=False), layers.BatchNormalization(), layers.ReLU(6.0),
        layers.GlobalMaxPooling2D(), layers.Dropout(0.5), layers.Dense(2), shape=IMAGES,
    ),
    "residual": residual,
    "unet": unet,
    "squeeze": squeeze,
    "separable": lambda: stack(
        layers.SeparableConv2D(6, 3, strides=2, padding="same"), layers.LeakyReLU(), layers.ZeroPadding2D(1),
        layers.Conv2DTranspose(3, 3, strides=2, padding="same"), layers.Cropping2D(2), shape=IMAGES,
    ),
    "dilated": lambda: stack(
        layers.Conv2D(4, 3, dilation_rate=2), layers.Conv2D(2, 3, groups=2), shape=IMAGES
    ),
    "conv1d": lambda: stack(
        layers.Conv1D(8, 3, padding="causal", activation="relu"), layers.MaxPooling1D(),
        layers.GlobalAveragePooling1D(), layers.Dense(2), shape=SEQUENCES,
    ),
    "conv3d": lambda: stack(layers.Conv3D(3, 3), layers.MaxPooling3D(), shape=(6, 6, 6, 2)),
    "layer-norm": lambda: stack(
        layers.Dense(8), layers.LayerNormalization(), layers.Dense(2), shape=SEQUENCES
    ),
    "group-norm": lambda: stack(
        layers.Conv2D(4, 3), layers.GroupNormalization(2), layers.Flatten(), layers.Dense(2), shape=IMAGES
    ),
    "unit-norm": lambda: stack(layers.Dense(6), layers.UnitNormalization(), layers.Dense(2), shape=ROWS),
    "simple-rnn": lambda: stack(layers.SimpleRNN(5), layers.Dense(2), shape=SEQUENCES),
    "lstm": lambda: stack(layers.LSTM(5, return_sequences=True), layers.Dense(2), shape=SEQUENCES),
    "lstm-unrolled": lambda: stack(layers.LSTM(5, unroll=True), layers.Dense(2), shape=SEQUENCES),
    "gru": lambda: stack(layers.GRU(5), layers.Dense(2), shape=SEQUENCES),
    "bidirectional": lambda: stack(
        layers.Bidirectional(layers.LSTM(4, return_sequences=True)), layers.Dense(2), shape=SEQUENCES
    ),
    "text": lambda: stack(
        layers.Embedding(30, 6), layers.LSTM(5), layers.Dense(1, activation="sigmoid"), shape=TOKENS,
        dtype="int32",
    ),
    "time-distributed": lambda: stack(
        layers.TimeDistributed(layers.Conv1D(4, 2)), layers.Flatten(), layers.Dense(2), shape=(3, 5, 4)
    ),
    "transformer": transformer,
    "autoencoder": lambda: stack(
        layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        layers.Conv2DTranspose(3, 3, strides=2, padding="same", activation="sigmoid"), shape=IMAGES,
    ),
    "resizing": lambda: stack(
        layers.Conv2D(4, 3), layers.Resizing(7, 9), layers.UpSampling2D(2), layers.Dense(2), shape=IMAGES
    ),
    "mlp-mixer": lambda: stack(
        layers.Dense(8, activation="gelu"), layers.Permute((2, 1)), layers.Dense(6, activation="gelu"),
        layers.Permute((2, 1)), layers.Dense(3), shape=SEQUENCES,
    ),
}  # fmt: skip


def make(folder: Path) -> None:
    """Converts every model with tf2onnx, and every second one with Keras too."""
    rng = np.random.default_rng(0)
    for number, (name, new) in enumerate(MODELS.items()):
        keras.utils.set_random_seed(number)
        model = new()
        for weight in model.weights:
            weight.assign(np.asarray(weight) + 0.05 * np.abs(rng.standard_normal(weight.shape)))
        shape = (3, *model.input_shape[1:])
        given = rng.integers(0, 30, shape) if "int" in model.inputs[0].dtype else rng.standard_normal(shape)
        given = given.astype(model.inputs[0].dtype)
        opset = OPSETS[number % len(OPSETS)]
        try:
            _by_tool(model, given, folder / "tf2onnx" / f"{name}-{opset}.onnx", opset)
        except Exception as error:
            print(f"tf2onnx {name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
        if number % 2:
            path = folder / "keras" / f"{name}.onnx"
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                model.export(path, format="onnx", verbose=False)
                np.savez(path.with_suffix(".npz"), **{_input(path): given})
            except Exception as error:
                print(f"keras {name}: {type(error).__name__}: {' '.join(str(error).split())[:150]}")


def _by_tool(model: keras.Model, given: np.ndarray, path: Path, opset: int) -> None:
    spec = tf.TensorSpec((None, *given.shape[1:]), given.dtype, name="x")
    function = tf.function(lambda x: model(x, training=False), input_signature=[spec])
    path.parent.mkdir(parents=True, exist_ok=True)
    tf2onnx.convert.from_function(function, input_signature=[spec], opset=opset, output_path=str(path))
    np.savez(path.with_suffix(".npz"), **{_input(path): given})


def _input(path: Path) -> str:
    import onnx

    return str(onnx.load(path).graph.input[0].name)
