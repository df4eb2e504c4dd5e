"""Random modules under ORTModule, against eager PyTorch and `torch.compile(backend="aot_eager")`.

`generate` writes a program (a module, and what is done with it) as Python text from a seed, `run` runs it, `judge`
compares, `shrink` takes lines away from what differs. notes/fuzzing.md says how to use it:

    PYTHONPATH=src:tests python -m ortmodule.fuzz --modules 2000 --workers 2
"""
