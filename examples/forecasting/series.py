"""The real series, as they come with statsmodels."""

from __future__ import annotations

import numpy as np
import statsmodels.datasets as datasets
from protocol import Series


def load(name: str) -> Series:
    return {"co2": _co2, "sunspots": _sunspots, "elnino": _elnino}[name]()


def _co2() -> Series:
    """CO2 at Mauna Loa, 1958-2001: weekly, here by month; five months without a measurement are interpolated."""
    monthly = datasets.co2.load_pandas().data["co2"].resample("MS").mean().interpolate("time")
    times = monthly.index.year + (monthly.index.month - 1) / 12
    return Series("co2", "CO₂ at Mauna Loa", "ppm", np.asarray(times, float), monthly.to_numpy(float))


def _sunspots() -> Series:
    """Sunspot numbers by year, 1700-2008."""
    data = datasets.sunspots.load_pandas().data
    return Series(
        "sunspots",
        "Sunspots",
        "mean number",
        data["YEAR"].to_numpy(float),
        data["SUNACTIVITY"].to_numpy(float),
    )


def _elnino() -> Series:
    """Temperature of the sea off Peru by month, 1950-2010."""
    data = datasets.elnino.load_pandas().data
    values = data.drop(columns="YEAR").to_numpy(float).reshape(-1)
    times = data["YEAR"].to_numpy(float)[0] + np.arange(len(values)) / 12
    return Series("elnino", "Sea surface off Peru (El Niño)", "°C", times, values)
