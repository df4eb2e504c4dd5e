"""Texts of others in messages, the log, model cards and figures. For commands see `cli/test_hostile_names.py`."""

from __future__ import annotations

import csv
import html.parser
import io
import logging
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from markdown_it import MarkdownIt

import models
import onnxtrain
from onnxtrain import CSVLogger, History, Trainer, errors
from onnxtrain._printable import get_logger, printable
from onnxtrain.trainer._show.notebook import NotebookReport

EVIL = "\x1b]0;t\x07\x9b2J\u202e\n# a\r|`<script>alert(1)</script>[b](http://c)**d**$e$_f_\\"


def characters(text: str) -> set[str]:
    return {c for c in text if not c.isprintable()} - {"\n"}


def test_what_is_left_has_no_control_format_or_line_character() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    categories = {unicodedata.category(c) for c in printable(everything)}
    assert categories.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
    assert printable(everything).encode()
    assert printable(printable(EVIL)) == printable(EVIL)
    plain = "layers[0].fc/重み é ✓ 'a' \\x1b"
    assert printable(plain) == plain


@pytest.mark.parametrize("name", errors.__all__)
def test_messages_of_errors_are_one_line(name: str) -> None:
    error = getattr(errors, name)(f"the input '{EVIL}'")
    assert "\n" not in str(error)
    assert characters(str(error)) == set()
    assert "\\x1b]0;t\\x07\\x9b2J\\u202e" in str(error)
    assert error.args == (f"the input '{EVIL}'",)


@pytest.mark.parametrize("name", ["onnxtrain", "onnxtrain.flower"])
def test_the_log_escapes_names_for_every_handler(name: str, caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    logger, handler = get_logger(name), logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        logger.warning("the node '%s' has %d inputs", EVIL, 2)
    finally:
        logger.removeHandler(handler)
    assert characters(stream.getvalue()) == set()
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().endswith("' has 2 inputs\n")
    assert caplog.messages == [stream.getvalue()[:-1]]


def test_the_package_logs_through_these_loggers_alone() -> None:
    """Elsewhere, `logging.getLogger` returns the logger of another package, or the parent of one with the filter."""
    package = Path(onnxtrain.__file__).parent
    calls = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"logging\.getLogger\((?!\)|\"(?!onnxtrain))", path.read_text(encoding="utf-8"))
    }
    assert calls == {"_printable.py", "ortmodule/_options.py", "ortmodule/capture/_nodes.py"}


class Tags(html.parser.HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_model_card_shows_names_as_text(tmp_path: Path) -> None:
    model = models.mlp()
    onnx.compose.add_prefix(model, EVIL, inplace=True)
    trainer = Trainer(model, "mse")
    trainer.history.epochs.append({"epoch": 1, EVIL: 0.5})
    trainer.model_card(tmp_path / "plain.md", "t", results={"set": {"m": 0.1}})
    trainer.model_card(
        tmp_path / "evil.md", f"t{EVIL}", tags=[EVIL], results={EVIL: {EVIL: 0.1}}, license=EVIL
    )
    text = (tmp_path / "evil.md").read_text(encoding="utf-8")
    assert characters(text) == set()
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == EVIL
    assert yaml.safe_load(front)["model-index"][0]["results"][0]["dataset"]["name"] == EVIL
    page = Tags(MarkdownIt("commonmark").enable("table").render(body))
    plain = (tmp_path / "plain.md").read_text(encoding="utf-8").split("---\n", 2)[2]
    usual = Tags(MarkdownIt("commonmark").enable("table").render(plain))
    assert set(page.tags) == set(usual.tags)
    for name in (f"{EVIL}x", f"{EVIL}logits", EVIL, f"t{EVIL}"):
        assert printable(name) in page.text


def test_a_notebook_shows_names_as_text() -> None:
    report = NotebookReport()
    report._rows, report._notes, report._values = [{"epoch": 1, EVIL: 0.5}], [EVIL], EVIL
    page = Tags(report._text())
    assert set(page.tags) == {"div", "progress", "table", "thead", "tr", "th", "tbody", "td", "p"}
    assert page.text.count(printable(EVIL)) == 3
    assert characters(report._text()) == set()


def test_a_figure_shows_dollar_signs() -> None:
    """Two of them begin a formula of matplotlib, which is an error where it is no formula."""
    figure = History([{"epoch": 1, f"$\\frac${EVIL}": 0.5}]).plot()
    figure.savefig(io.BytesIO())
    assert figure.axes[0].get_title(loc="left") == printable(f"$\\frac${EVIL}".replace("_", " "))


def test_a_csv_log_escapes_names_in_its_header(tmp_path: Path) -> None:
    x = np.ones((4, 4), np.float32)
    trainer = Trainer(models.mlp(), "mse", metrics=[named_metric])
    trainer.fit(
        x, np.ones((4, 3), np.float32), epochs=1, verbose=False, callbacks=[CSVLogger(tmp_path / "log.csv")]
    )
    with open(tmp_path / "log.csv", encoding="utf-8", newline="") as file:
        header, row = csv.reader(file)
    assert printable(EVIL) in header
    assert row[header.index(printable(EVIL))] == "1.0"


def named_metric(prediction: np.ndarray, target: np.ndarray) -> float:
    return 1.0


named_metric.__name__ = EVIL
