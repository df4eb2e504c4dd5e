"""Classes, files and splits of folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from images.problems import CLASSES, draw, write
from onnxtrain import ImageFolder
from onnxtrain.errors import InputError


def test_classes_are_sorted_and_files_belong_to_them(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "circle" / "deep").mkdir()
    draw("circle", 9).save(tmp_path / "circle" / "deep" / "a.JPG")
    for hidden in (".checkpoints", "circle/.git"):
        (tmp_path / hidden).mkdir()
        draw("circle", 9).save(tmp_path / hidden / "a.png")
    draw("circle", 9).save(tmp_path / "circle" / "._a.png")
    (tmp_path / "circle" / "notes.txt").write_text("x")
    (tmp_path / "README.md").write_text("x")
    folder = ImageFolder(tmp_path)
    assert folder.classes == list(CLASSES)
    assert folder.files[:5] == [
        *(f"circle/00{i}.png" for i in range(3)),
        "circle/deep/a.JPG",
        "square/000.png",
    ]
    assert folder.labels is not None
    assert folder.labels.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(folder) == 10
    assert Path(folder.path(3)).is_file()
    assert folder.open(0).size == (48, 40)


def test_torchvision_finds_the_same(tmp_path: Path) -> None:
    datasets = pytest.importorskip("torchvision.datasets")
    write(tmp_path, 4)
    ours, theirs = ImageFolder(tmp_path), datasets.ImageFolder(str(tmp_path))
    assert theirs.classes == ours.classes
    assert theirs.samples == [(ours.path(i), int(label)) for i, label in enumerate(ours.labels)]


def test_links_are_followed_once(tmp_path: Path) -> None:
    root = write(tmp_path / "real", 2)
    (tmp_path / "linked").mkdir()
    for name in CLASSES:
        (tmp_path / "linked" / name).symlink_to(root / name)
    (root / "circle" / "loop").symlink_to(root / "circle")
    (root / "square" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    os.mkfifo(root / "triangle" / "pipe.png")
    folder = ImageFolder(tmp_path / "linked")
    assert folder.files == [
        *("circle/000.png", "circle/001.png", "square/000.png", "square/001.png", "square/gone.png"),
        *("triangle/000.png", "triangle/001.png"),
    ]


def test_splits_are_recognized(tmp_path: Path) -> None:
    write(tmp_path / "train", 3)
    write(tmp_path / "valid", 2)
    write(tmp_path / "test", 1)
    folder = ImageFolder(tmp_path, size=24, flip=True)
    assert folder.splits == ["train", "valid", "test"]
    assert folder.classes == list(CLASSES)
    assert folder.files[0] == "train/circle/000.png"
    assert folder.open(0).size == (48, 40)
    validation = folder.validation
    assert validation is not None
    assert len(validation) == 6
    assert validation.passed.size == (24, 24)
    assert len(folder.split("test")) == 3
    with pytest.raises(InputError, match="no split 'val'"):
        folder.split("val")
    with pytest.raises(InputError, match="has the splits train, valid, test"):
        folder.require_no_splits()


def test_classes_may_be_called_train_and_test(tmp_path: Path) -> None:
    for name in ("train", "test", "plane"):
        (tmp_path / name).mkdir()
        draw("circle", 0).save(tmp_path / name / "a.png")
    assert ImageFolder(tmp_path).classes == ["plane", "test", "train"]
    (tmp_path / "plane" / "a.png").unlink()
    (tmp_path / "plane").rmdir()
    # Without subfolders in them, these two are classes.
    assert ImageFolder(tmp_path).splits == []


def test_flat_folders_and_lists_have_no_classes(tmp_path: Path) -> None:
    draw("circle", 0).save(tmp_path / "a.png")
    for folder in (ImageFolder(tmp_path), ImageFolder([tmp_path / "a.png"])):
        assert folder.classes == []
        assert folder.labels is None
        assert len(folder) == 1
        with pytest.raises(InputError, match="have no classes"):
            folder.labels_for(())


def test_labels_follow_the_names_of_the_model_s_classes(tmp_path: Path) -> None:
    folder = ImageFolder(write(tmp_path, 1))
    assert folder.labels_for(["triangle", "dog", "circle", "square"]).tolist() == [2, 3, 0]
    with pytest.raises(
        InputError, match="has the subfolders triangle, but the classes of the model are circle"
    ):
        folder.labels_for(["circle", "square"])


def test_empty_classes_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "hexagon").mkdir()
    with pytest.raises(InputError, match="no images of hexagon"):
        ImageFolder(tmp_path).require_full_classes()


def test_readable_leaves_out_damaged_files(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (tmp_path / "square" / "000.png").write_bytes(b"")
    folder = ImageFolder(tmp_path)
    whole = folder.readable()
    assert len(whole) == 5
    assert "square/000.png" not in whole.files
    assert list(folder.unreadable) == [2]
    assert "is not an image" in folder.unreadable[2]
    assert whole.labels is not None
    assert whole.labels.tolist() == [0, 0, 1, 2, 2]


def test_the_digest_depends_on_names_and_sizes(tmp_path: Path) -> None:
    before = ImageFolder(write(tmp_path, 2)).digest()
    assert ImageFolder(tmp_path).digest() == before
    (tmp_path / "circle" / "000.png").rename(tmp_path / "circle" / "009.png")
    renamed = ImageFolder(tmp_path).digest()
    (tmp_path / "circle" / "001.png").write_bytes(b"")
    assert len({before, renamed, ImageFolder(tmp_path).digest()}) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"size": "big"}, "size must be a number of pixels"),
        ({"size": (1, 2, 3)}, "size must be a number of pixels"),
        ({"size": True}, "size must be a number of pixels"),
        ({"mean": "a"}, "mean must be a number"),
        ({"mean": 0.5}, "mean is given without std"),
        ({"crop": 0.0}, "crop must be the smallest share"),
        ({"crop": (0.9, 0.1)}, "crop must be the smallest share"),
        ({"crop": "much"}, "crop must be the smallest share"),
        ({"workers": 0}, "workers must be"),
        ({"workers": True}, "workers must be"),
    ],
)
def test_impossible_arguments_are_refused(settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        ImageFolder(write(tmp_path, 1), **settings)


def test_numpy_numbers_are_numbers(tmp_path: Path) -> None:
    folder = ImageFolder(
        write(tmp_path, 1),
        size=np.int64(9),
        mean=np.float32([0.5] * 3),
        std=np.ones(3),
        crop=True,
        workers=np.int32(2),
    )
    assert (folder.passed.size, folder.passed.mean, folder.crop) == ((9, 9), (0.5, 0.5, 0.5), (0.08, 1.0))


def test_folders_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "nothing", "no such folder"),
        (tmp_path / "a.csv", "it is a file"),
        (tmp_path / "empty", "there are none"),
        ([], "list of paths is empty"),
    ):
        with pytest.raises(InputError, match=words):
            ImageFolder(path)
