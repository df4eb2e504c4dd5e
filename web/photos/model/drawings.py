"""Draws pictures of things that do not exist: shapes, textures and colours on any background.

A *thing* has an outline, a texture and colours, which its seed chooses. Its pictures differ in what photos of one thing
differ in: place, size, angle, light, sharpness and background.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import ndimage

SIZE = 64
"""Width and height of a picture in pixels."""

_AXIS = (np.arange(SIZE, dtype=np.float32) + 0.5) / SIZE * 2 - 1
_Y, _X = np.meshgrid(_AXIS, _AXIS, indexing="ij")
_FREQUENCY = np.hypot(np.fft.fftfreq(SIZE)[:, None], np.fft.rfftfreq(SIZE)[None, :]) + 1 / SIZE


def _noise(rng: np.random.Generator, slope: float) -> np.ndarray:
    """Returns noise of mean 0 and deviation 1 whose amplitudes fall as frequency^-slope: [64, 64]."""
    phases = np.exp(2j * math.pi * rng.random(_FREQUENCY.shape))
    field = np.fft.irfft2(phases * _FREQUENCY**-slope, (SIZE, SIZE)).astype(np.float32)
    return (field - field.mean()) / (field.std() + 1e-6)


def _colour(rng: np.random.Generator) -> np.ndarray:
    """Returns RGB, each 0 to 1: any hue, often pale or dark, as things are."""
    hue, saturation, value = rng.random(), rng.beta(1.2, 1.2), rng.uniform(0.15, 1) ** 0.7
    wheel = np.clip(np.abs((hue * 6 + np.array([0, 4, 2])) % 6 - 3) - 1, 0, 1)
    return (value * (1 - saturation + saturation * wheel)).astype(np.float32)


@dataclass(frozen=True)
class Thing:
    """What the pictures of a thing have in common.

    Attributes:
        seed: chooses all of it.
    """

    seed: int
    _outline: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([7, self.seed])
        # The radius by angle as a Fourier series: discs, stars, leaves, blobs.
        order = int(rng.integers(2, 7))
        waves = rng.normal(0, 1, 8) * np.exp(-0.5 * np.arange(8)) * 0.25
        waves[order] += rng.uniform(0, 0.4)
        object.__setattr__(self, "_outline", waves)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Returns a picture: float32 [3, 64, 64], RGB of 0 to 1."""
        own = np.random.default_rng([8, self.seed])
        fills, hole, stretch = own.random() < 0.12, own.random() < 0.2, own.uniform(0.35, 1)
        angle = rng.normal(0, 0.5) + (math.pi if rng.random() < 0.1 else 0)
        size = rng.uniform(0.5, 1.15)
        x, y = _X - rng.uniform(-0.35, 0.35), _Y - rng.uniform(-0.35, 0.35)
        u = (math.cos(angle) * x + math.sin(angle) * y) / size
        v = (math.cos(angle) * y - math.sin(angle) * x) / (size * stretch)
        radius, turn = np.hypot(u, v), np.arctan2(v, u)
        rim = 0.9 + sum(wave * np.cos(k * turn) for k, wave in enumerate(self._outline))
        inside = np.clip((rim - radius) * 12, 0, 1)
        if hole:
            inside = inside * np.clip((radius - 0.4 * rim) * 12, 0, 1)
        if fills:
            inside = np.ones_like(inside)
        thing = self._surface(own, u, v, radius, turn, rng)
        # Light from one side.
        light = 1 + rng.uniform(0, 0.35) * (math.cos(t := rng.uniform(0, 7)) * u + math.sin(t) * v)
        picture = inside * thing * light + (1 - inside) * _background(rng)
        return _photograph(picture, rng)

    def _surface(
        self,
        own: np.random.Generator,
        u: np.ndarray,
        v: np.ndarray,
        radius: np.ndarray,
        turn: np.ndarray,
        rng: np.random.Generator,
    ) -> np.ndarray:
        """Returns the colours of the surface: [3, 64, 64]."""
        colours = [_colour(own)[:, None, None] for _ in range(3)]
        kind, period, phase = own.integers(8), own.uniform(3, 14), own.uniform(0, 6)
        if kind == 0:  # plain
            pattern = np.zeros_like(u)
        elif kind == 1:  # stripes
            pattern = np.sin(period * u + phase)
        elif kind == 2:  # checks
            pattern = np.sin(period * u) * np.sin(period * v)
        elif kind == 3:  # rings
            pattern = np.sin(period * radius + phase)
        elif kind == 4:  # rays
            pattern = np.sin(round(period) * turn + phase)
        elif kind == 5:  # halves
            pattern = u * math.cos(phase) + v * math.sin(phase)
        elif kind == 6:  # dots
            pattern = np.cos(period * u) + np.cos(period * v) - 1
        else:  # marble, wood, fur
            pattern = _noise(rng, own.uniform(0.6, 2))
        mix = 1 / (1 + np.exp(-own.uniform(2, 12) * pattern))
        rough = own.choice([0, 0.05, 0.15]) * _noise(rng, own.uniform(0, 1.5))
        surface = mix * colours[0] + (1 - mix) * colours[1] + rough
        if own.random() < 0.3:  # a spot of another colour
            cx, cy, r = *own.uniform(-0.4, 0.4, 2), own.uniform(0.15, 0.4)
            spot = np.clip((r - np.hypot(u - cx, v - cy)) * 12, 0, 1)
            surface = spot * colours[2] + (1 - spot) * surface
        return surface.astype(np.float32)


def _background(rng: np.random.Generator) -> np.ndarray:
    """Returns a background: smooth, rough or striped, in two colours."""
    a, b = _colour(rng)[:, None, None], _colour(rng)[:, None, None]
    kind = rng.random()
    if kind < 0.3:
        turn = rng.uniform(0, 7)
        mix = 0.5 + 0.4 * (math.cos(turn) * _X + math.sin(turn) * _Y)
    elif kind < 0.85:
        mix = 0.5 + rng.uniform(0.05, 0.5) * _noise(rng, rng.uniform(0.7, 2.2))
    else:
        turn = rng.uniform(0, 7)
        mix = 0.5 + 0.5 * np.tanh(
            3 * np.sin(rng.uniform(4, 20) * (math.cos(turn) * _X + math.sin(turn) * _Y))
        )
    mix = np.clip(mix, 0, 1)
    return mix * a + (1 - mix) * b


def _photograph(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Changes sharpness, light and white balance, and adds the noise of a camera."""
    if rng.random() < 0.5:
        picture = ndimage.gaussian_filter(picture, (0, s := rng.uniform(0.3, 1.2), s))
    gain = rng.uniform(0.65, 1.25) * rng.normal(1, 0.06, (3, 1, 1))
    picture = np.clip(picture, 0, 1) ** rng.uniform(0.75, 1.3) * gain + rng.normal(0, 0.05)
    picture = picture + rng.normal(0, rng.uniform(0, 0.04), picture.shape)
    return np.clip(picture, 0, 1).astype(np.float32)


def pictures(things: range, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `count` pictures of each thing, float32 [n, 3, 64, 64], and labels from 0, int64 [n]."""
    rng = np.random.default_rng(seed)
    drawn = [Thing(number).draw(rng) for number in things for _ in range(count)]
    return np.stack(drawn), np.repeat(np.arange(len(things)), count)
