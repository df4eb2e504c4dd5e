"""Chooses how to show the progress of a fit."""

from __future__ import annotations

from onnxtrain._console import PlainConsole
from onnxtrain.trainer._show.notebook import NotebookReport, in_notebook
from onnxtrain.trainer._show.report import Report
from onnxtrain.trainer._show.terminal import BarReport, PlainReport


def make_report(verbose: bool) -> Report:
    """Returns a report that suits the output: a notebook, a terminal (progress bar), or anything else (plain lines).

    If `verbose` is False, the report shows nothing.
    """
    if not verbose:
        return Report()
    if in_notebook():
        return NotebookReport()
    # On standard error, because a program may print its results to standard output.
    console = PlainConsole(stderr=True)
    return BarReport(console) if console.is_terminal else PlainReport(console)
