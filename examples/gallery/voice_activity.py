"""Fine-tunes the voice activity detector Silero VAD on synthesised voices in strong noise.

The recordings are made on the spot: syllables of a pulse train through three formants, in white and pink noise and in
the hum of a motor. The held-out recordings have other voices, texts and noise.

Usage: python examples/gallery/voice_activity.py [--seed 0]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from silero_vad import SileroVADSequence, get_speech_timestamps_sequence

from onnxtrain import Trainer

DEPLOYED = str(
    resources.files("silero_vad.data").joinpath("silero_vad_16k_sequence.onnx")
)
RATE, FRAME, CONTEXT = 16_000, 512, 64
SECONDS = 8


def voice(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Synthesises voiced syllables: harmonics of a gliding pitch, through formants that change with each syllable."""
    time_ = np.arange(samples) / RATE
    beats = max(2, int(samples / RATE * rng.uniform(3, 6)))  # syllables
    at = np.linspace(0, samples / RATE, beats)
    pitch = np.interp(time_, at, rng.uniform(90, 250) * rng.uniform(0.85, 1.15, beats))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    formants = [
        np.interp(time_, at, rng.uniform(*span, beats))
        for span in ((300, 900), (900, 2300), (2300, 3200))
    ]
    sound = np.zeros(samples)
    for harmonic in range(1, 30):
        frequency = harmonic * pitch
        gain = sum(
            weight / (1 + ((frequency - f) / 120) ** 2)
            for weight, f in zip((1, 0.6, 0.3), formants, strict=True)
        )
        sound += np.where(frequency < RATE / 2, gain, 0) * np.sin(harmonic * phase)
    rise = np.abs(np.sin(np.pi * np.linspace(0, beats, samples))) ** 0.5
    return sound * rise / np.sqrt(np.mean(sound**2))


def noise(rng: np.random.Generator, samples: int) -> np.ndarray:
    """Returns noise between white and brown, and the hum of a motor."""
    spectrum = np.fft.rfft(rng.standard_normal(samples))
    spectrum /= np.maximum(np.arange(len(spectrum)), 50) ** rng.uniform(0, 1)
    sound = np.fft.irfft(spectrum, samples)
    sound /= np.sqrt(np.mean(sound**2))
    turns = rng.uniform(30, 120) * np.arange(samples) / RATE
    hum = sum(
        rng.uniform(0, 1) / k * np.sin(2 * np.pi * k * turns + rng.uniform(0, 6))
        for k in range(1, 8)
    )
    return sound + rng.uniform(0, 1) * hum


def recording(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns a recording, float32 [samples], and for each frame if there is a voice in it, float32 [frames]."""
    samples = SECONDS * RATE // FRAME * FRAME
    clean, active = np.zeros(samples), np.zeros(samples)
    begin = int(rng.uniform(0.2, 1.5) * RATE)
    while begin < samples:
        end = min(samples, begin + int(rng.uniform(0.6, 2.5) * RATE))
        if end - begin > RATE // 4:
            clean[begin:end], active[begin:end] = voice(rng, end - begin), 1
        begin = end + int(rng.uniform(0.4, 1.8) * RATE)
    signal = clean * 10 ** (rng.uniform(-8, 4) / 20) + noise(rng, samples)
    speech = active.reshape(-1, FRAME).mean(axis=1) > 0.5
    return (signal * rng.uniform(0.02, 0.1)).astype(np.float32), speech.astype(
        np.float32
    )


def frames(signal: np.ndarray) -> np.ndarray:
    """Returns the frames of a recording, each behind the last 64 samples of the frame before, float32 [frames, 576]."""
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), signal])
    return np.stack(
        [padded[k : k + CONTEXT + FRAME] for k in range(0, len(signal), FRAME)]
    )


def for_training(path: str) -> onnx.ModelProto:
    """Returns the model in a form in which the samples of a batch, the frames of a recording, lie along axis 0.

    Zeros take the place of the inputs `h` and `c`, because each recording begins with an empty state. The new output
    `logits` is the input of the last sigmoid, one number per frame.
    """
    model = onnx.load(path)
    graph = model.graph
    for value in [v for v in graph.input if v.name in ("h", "c")]:
        graph.input.remove(value)
        graph.initializer.append(
            numpy_helper.from_array(np.zeros((1, 1, 128), np.float32), value.name)
        )
    sigmoid, _, reshape = graph.node[-3:]
    graph.node.append(
        helper.make_node("Reshape", [sigmoid.input[0], reshape.input[1]], ["logits"])
    )
    graph.output.append(
        helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["frames"])
    )
    return model


def write_weights(path: str, weights: dict[str, np.ndarray], to: Path) -> None:
    """Writes the model at `path` with other weights, and with all its inputs."""
    model = onnx.load(path)
    for initializer in model.graph.initializer:
        if initializer.name in weights:
            initializer.CopyFrom(
                numpy_helper.from_array(weights[initializer.name], initializer.name)
            )
    onnx.save(model, to)


def accuracy(
    package: SileroVADSequence, recordings: list[tuple[np.ndarray, np.ndarray]]
) -> float:
    """Returns the fraction of frames that the package judges correctly."""
    return float(
        np.mean(
            [
                (package.audio_forward(signal) > 0.5) == speech
                for signal, speech in recordings
            ]
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    rng = np.random.default_rng(seed)
    train, test = ([recording(rng) for _ in range(count)] for count in (48, 24))
    deployed = SileroVADSequence(DEPLOYED)
    before = accuracy(deployed, test)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        # A batch is one recording, in order, so that the gradient flows through the whole LSTM.
        for k in rng.permutation(len(train)):
            signal, speech = train[k]
            yield frames(signal), speech

    began = time.process_time()
    with tempfile.TemporaryDirectory() as directory:
        trainer = Trainer(
            for_training(DEPLOYED),
            loss="bce_with_logits",
            loss_input_names=["logits"],
            frozen_params=["h", "c", "stft.*"],
            learning_rate=1e-3,
            clip_grad_norm=1.0,
            seed=seed,
        )
        trainer.fit(batches, epochs=4, accumulate=2, verbose=False)
        weights = {name: parameter.data for name, parameter in trainer.parameters}
        write_weights(DEPLOYED, weights, Path(directory) / "tuned.onnx")
        seconds = time.process_time() - began

        # Back into the package, which cuts a recording into stretches of speech with the new file.
        tuned = SileroVADSequence(str(Path(directory) / "tuned.onnx"))
        after = accuracy(tuned, test)
        print(f"{len(train)} recordings of {SECONDS} s, {len(test)} held out")
        print(
            f"accuracy before {before:.3f}, after {after:.3f}, {seconds:.0f} s of processor time"
        )
        signal, speech = test[0]
        edges = (
            np.flatnonzero(np.diff(speech, prepend=0, append=0)).reshape(-1, 2)
            * FRAME
            / RATE
        )
        print("spoken:  ", " ".join(f"{begin:.1f}-{end:.1f}" for begin, end in edges))
        for name, package in (("deployed", deployed), ("tuned", tuned)):
            stretches = get_speech_timestamps_sequence(
                signal, package, return_seconds=True
            )
            print(
                f"{name + ':':9}",
                " ".join(f"{s['start']:.1f}-{s['end']:.1f}" for s in stretches)
                or "no speech",
            )


if __name__ == "__main__":
    main()
