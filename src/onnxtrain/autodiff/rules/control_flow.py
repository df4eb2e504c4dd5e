"""Control flow."""

from __future__ import annotations

from onnxtrain.autodiff._registry import not_yet

not_yet("If", reason="branches are not differentiated; export the model with the branch that is taken")
not_yet("Loop", reason="its iterations are not recorded; export the model with the loop unrolled")
not_yet("Scan", reason="its iterations are not recorded; export the model with the loop unrolled")
