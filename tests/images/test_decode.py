"""Files of all kinds are decoded as Pillow's documentation says, and damaged ones are named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from images.problems import draw
from onnxtrain.images._decode import UnreadableImageError, open_image


def test_modes_become_the_model_s_channels(tmp_path: Path) -> None:
    rgb = draw("circle", 0)
    files = {
        "rgb.png": rgb,
        "rgba.png": rgb.convert("RGBA"),
        "gray.png": rgb.convert("L"),
        "bits.png": rgb.convert("1"),
        "palette.png": rgb.quantize(64),
        "palette.gif": rgb.quantize(64),
        "gray_alpha.png": rgb.convert("LA"),
        "cmyk.jpg": rgb.convert("CMYK"),
        "lossless.webp": rgb,
        "plain.bmp": rgb,
    }
    for name, image in files.items():
        image.save(tmp_path / name, **({"lossless": True} if name.endswith("webp") else {}))
        for mode in ("RGB", "L", "RGBA"):
            opened = open_image(tmp_path / name, mode)
            assert (opened.mode, opened.size) == (mode, rgb.size), name
        with Image.open(tmp_path / name) as image:
            expected = np.asarray(image.convert("RGB"))
        np.testing.assert_array_equal(np.asarray(open_image(tmp_path / name)), expected, name)


def test_a_palette_with_transparency_keeps_its_colors(tmp_path: Path) -> None:
    image = draw("square", 1).quantize(32)
    image.save(tmp_path / "a.png", transparency=bytes(range(32)))
    # Pillow would warn, and warnings are errors in tests.
    got = np.asarray(open_image(tmp_path / "a.png"))
    np.testing.assert_array_equal(got, np.asarray(image.convert("RGB")))


def test_16_bits_are_scaled(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(open_image(tmp_path / "a.png", "L")), np.rint(values / 257))
    assert open_image(tmp_path / "a.png").mode == "RGB"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_upright(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for name in ("a.jpg", "a.png", "a.webp"):
        draw("triangle", 2).save(tmp_path / name, exif=exif)
        with Image.open(tmp_path / name) as image:
            expected = np.asarray(ImageOps.exif_transpose(image))
        assert np.array_equal(np.asarray(open_image(tmp_path / name)), expected)
        assert (open_image(tmp_path / name).size == (40, 48)) == (orientation >= 5)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_is_ignored(tmp_path: Path) -> None:
    draw("circle", 3).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert open_image(tmp_path / "a.jpg").size == (48, 40)


def test_the_first_frame_of_an_animation(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (9, 9), color) for color in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert open_image(tmp_path / "a.gif").getpixel((4, 4)) == (255, 0, 0)


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = draw("circle", 4, 200)
    for suffix in ("jpg", "png", "webp", "gif", "bmp"):
        image.save(tmp_path / f"whole.{suffix}")
        content = (tmp_path / f"whole.{suffix}").read_bytes()
        for size in (0, 3, 12, 30, len(content) // 3):
            (tmp_path / f"cut.{suffix}").write_bytes(content[:size])
            with pytest.raises(UnreadableImageError, match=rf"cut\.{suffix}' (is damaged|is not an image)"):
                open_image(tmp_path / f"cut.{suffix}")
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(UnreadableImageError, match="is not an image"):
        open_image(tmp_path / "text.jpg")
    with pytest.raises(UnreadableImageError, match="does not exist"):
        open_image(tmp_path / "missing.jpg")
    with pytest.raises(UnreadableImageError, match="cannot be read"):
        open_image(tmp_path)
    # Other decoders of Pillow are not used, whatever the name says.
    image.save(tmp_path / "tiff.jpg", "TIFF")
    with pytest.raises(UnreadableImageError, match="is not an image"):
        open_image(tmp_path / "tiff.jpg")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UnreadableImageError, match="too many pixels"):
        open_image(tmp_path / "whole.png")


def test_random_bytes_in_a_file_never_raise_another_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for suffix in ("jpg", "png", "webp", "gif", "bmp"):
        draw("square", 5).save(tmp_path / f"whole.{suffix}")
        content = np.frombuffer((tmp_path / f"whole.{suffix}").read_bytes(), np.uint8)
        for _ in range(40):
            broken = content.copy()
            broken[rng.integers(0, len(content), 4)] = rng.integers(0, 256, 4)
            (tmp_path / f"a.{suffix}").write_bytes(broken.tobytes())
            try:
                assert open_image(tmp_path / f"a.{suffix}").mode == "RGB"
            except UnreadableImageError:
                continue
