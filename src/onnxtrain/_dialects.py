"""Translates names from PyTorch, Keras, scikit-learn and Hugging Face to this package's, for error messages.

Nothing here is accepted as input: each argument, loss, optimizer, metric and schedule has one name. The tables only
decide which name an error suggests, in Python (`lr=` is `learning_rate=`) and in the shell (`--lr_rate`, `--loss ce`).

>>> suggested_name("loss", "sparse_categorical_crossentropy", {"cross_entropy": "CrossEntropyLoss"})
'cross_entropy'
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, ParamSpec, TypeVar

from onnxtrain._names import LOSSES, OPTIMIZERS
from onnxtrain._words import argument

P = ParamSpec("P")
R = TypeVar("R")

# Our argument: names of the same argument elsewhere.
_ARGUMENTS = {
    "model": "onnx_model model_path model_name model_file network net",
    "loss": "criterion loss_fn loss_func loss_function objective",
    "optimizer": "optim optimizers opt solver",
    "learning_rate": "lr lr0 eta eta0 base_lr learning_rate_init max_lr step_size_init",
    "metrics": "metric compute_metrics eval_metric eval_metrics scoring scorer",
    "scheduler": "lr_scheduler lr_scheduler_type lr_schedule schedule learning_rate_schedule",
    "warmup_steps": "warmup num_warmup_steps warm_up warmup_iters",
    "clip_grad_norm": "max_grad_norm gradient_clip_val clipnorm global_clipnorm clip_norm grad_clip",
    "clip_grad_value": "clipvalue clip_value",
    "requires_grad": "trainable trainable_params trainable_parameters params parameters train_params",
    "frozen_params": "freeze frozen freeze_layers frozen_parameters frozen_layers freeze_params",
    "directory": "output_dir out_dir save_dir log_dir logdir default_root_dir project save_path checkpoint_dir",
    "overwrite": "overwrite_output_dir exist_ok",
    "seed": "random_state random_seed data_seed",
    "threads": "n_jobs num_threads nthreads n_threads intra_op_num_threads",
    "artifact_directory": "artifacts_dir artifact_dir",
    "inputs": "x X x_train X_train train_dataset train_data train_set dataset data train_dataloader train_dataloaders "
    "train_loader dataloader x_test X_test eval_dataset test_dataset",
    "targets": "y y_train Y labels label target y_test",
    "epochs": "num_train_epochs num_epochs n_epochs nb_epoch nb_epochs max_epochs max_iter n_iter epoch",
    "batch_size": "batch batchsize bs minibatch_size mini_batch_size per_device_train_batch_size train_batch_size "
    "per_device_eval_batch_size eval_batch_size per_gpu_train_batch_size",
    "validation": "validation_data validation_split validation_fraction val_data val_split valid valid_data eval_set "
    "eval_data val_dataset valid_set val_size test_size val val_dataloaders val_loader",
    "callbacks": "callback",
    "accumulate": "gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accum_steps "
    "gradient_accumulation",
    "sample_weight": "sample_weights weights",
    "class_weight": "class_weights",
    "transform": "transforms augment augmentation augmentations preprocess train_transform",
    "drop_last": "dataloader_drop_last drop_remainder",
    "evaluate_every": "eval_steps val_check_interval eval_every",
    "limit_batches": "limit_train_batches limit_val_batches fast_dev_run",
    "verbose": "verbosity progress progress_bar",
}

# Arguments of other libraries that are no single argument here: what to write in Python, and in the shell. `{}` is the
# value, or `...`.
_ADVICE = {
    "weight_decay": ("optimizer=onnxtrain.optimizers.AdamW(weight_decay={})", "--weight-decay {}"),
    "alpha": ("optimizer=onnxtrain.optimizers.AdamW(weight_decay={})", "--weight-decay {}"),
    "momentum": ("optimizer=onnxtrain.optimizers.SGD(momentum={})", "--optimizer-option momentum={}"),
    "nesterov": ("optimizer=onnxtrain.optimizers.SGD(nesterov={})", "--optimizer-option nesterov={}"),
    "betas": ("optimizer=onnxtrain.optimizers.AdamW(betas={})", "--optimizer-option betas={}"),
    "label_smoothing": (
        "loss=onnxtrain.losses.CrossEntropyLoss(label_smoothing={})",
        "--loss-option label_smoothing={}",
    ),
    "early_stopping": ("callbacks=[onnxtrain.EarlyStopping()] to Trainer.fit", "--patience 5"),
    "patience": ("callbacks=[onnxtrain.EarlyStopping(patience={})] to Trainer.fit", "--patience {}"),
    "device": ("device='cuda'", "--device cuda"),
    "bf16": ("precision='bf16'", "--precision bf16"),
    "gradient_checkpointing": ("recompute=True", "--recompute"),
    "resume": ("the run's directory to Trainer.resume", "the run's directory: onnxtrain train DIR"),
    "num_classes": ("onnxtrain.replace_head(model, classes={}) as the model", "--replace-head {}"),
    "args": (
        "each setting by itself: learning_rate=... here, epochs=... and batch_size=... to Trainer.fit",
        "",
    ),
    "max_steps": ("epochs=1, steps_per_epoch={} to Trainer.fit", "--epochs 1 --steps-per-epoch {}"),
    "ema": ("ema_decay=0.999", "--ema-decay 0.999"),
    "save_steps": ("callbacks=[onnxtrain.ModelCheckpoint(...)] to Trainer.fit", "--save-every {}"),
}
_ADVICE_NAMES = {
    "weight_decay": "wd l2 l2_regularization",
    "betas": "beta_1 beta1 adam_beta1",
    "label_smoothing": "label_smoothing_factor smoothing",
    "patience": "early_stopping_patience early_stopping_rounds n_iter_no_change",
    "device": "gpu gpus cuda use_gpu use_cuda accelerator no_cuda",
    "bf16": "fp16 amp use_amp half mixed_precision",
    "gradient_checkpointing": "use_gradient_checkpointing activation_checkpointing",
    "resume": "resume_from resume_from_checkpoint ckpt_path checkpoint",
    "num_classes": "num_labels n_classes nc",
    "args": "training_args training_arguments config hyperparameters",
    "max_steps": "num_training_steps num_train_steps iterations",
    "ema": "use_ema model_ema",
    "save_steps": "save_strategy save_freq save_interval",
}

# Options of commands whose names do not follow from the Python argument.
_OPTIONS = {
    "inputs": "--data",
    "directory": "--output",
    "artifact_directory": "--output",
    "model": "the model as the first argument",
    "targets": "the targets in the file of --data, and for a table --target COLUMN",
    "verbose": "nothing: progress is written to standard error, where 2>/dev/null drops it",
    "callbacks": "--patience, --save-every or another option of `onnxtrain train --help-all`",
    "transform": "--mixup or --cutmix",
}

# Our name: the same loss elsewhere. Class names, and spellings that differ in case or punctuation, need no entry.
_LOSSES = {
    "cross_entropy": "ce xent categorical_crossentropy sparse_categorical_crossentropy log_loss multinomial "
    "softmax_cross_entropy softmax",
    "bce_with_logits": "binary_crossentropy binary_cross_entropy binary_cross_entropy_with_logits sigmoid logistic "
    "binary_logloss",
    "mse": "mean_squared_error squared_error l2 rmse ls",
    "l1": "mae mean_absolute_error absolute_error",
    "quantile": "pinball",
    "poisson_nll": "poisson",
    "nll": "negative_log_likelihood",
    "causal_lm": "clm lm language_modeling next_token",
    "focal": "binary_focal_crossentropy sigmoid_focal",
    "tversky": "dice",
}
_OPTIMIZERS = {
    "adamw": "adamw_torch adamw_hf adamw_torch_fused adam_weight_decay",
    "sgd": "momentum gradient_descent",
    "rmsprop": "rms_prop",
}
_METRICS = {
    "accuracy": "acc categorical_accuracy sparse_categorical_accuracy accuracy_score top1",
    "binary_accuracy": "",
    "auroc": "auc roc_auc roc_auc_score binary_auroc",
    "f1": "f1_score f_score",
    "mae": "mean_absolute_error neg_mean_absolute_error",
    "mse": "mean_squared_error neg_mean_squared_error",
    "rmse": "root_mean_squared_error neg_root_mean_squared_error",
    "r2": "r2_score",
    "precision": "precision_score",
    "recall": "recall_score",
    "top5_accuracy": "top5 top_5 top_k_categorical_accuracy",
}
_SCHEDULERS = {
    "cosine": "cosine_annealing cosine_annealing_lr cosine_decay",
    "cosine_with_restarts": "cosine_annealing_warm_restarts sgdr cosine_decay_restarts",
    "linear": "linear_lr linear_decay",
    "step": "step_lr",
    "multistep": "multi_step_lr",
    "exponential": "exponential_lr exponential_decay",
    "one_cycle": "one_cycle_lr 1cycle",
    "polynomial": "polynomial_lr polynomial_decay poly",
    "constant": "constant_lr none",
}
_VALUES: dict[str, Mapping[str, str]] = {
    "loss": _LOSSES,
    "optimizer": _OPTIMIZERS,
    "metrics": _METRICS,
    "scheduler": _SCHEDULERS,
}
# Names of an argument's values, for arguments whose name is another library's, too: `optim="adamw_torch"`.
_OURS: dict[str, Mapping[str, object]] = {**_VALUES, "loss": LOSSES, "optimizer": OPTIMIZERS}

# Methods of other trainers and models, and what does it here.
_METHODS = {
    "fit": "train fit_generator fit_transform",
    "evaluate": "test validate score",
    "export": "save_model save_pretrained to_onnx",
    "resume": "load load_model from_pretrained load_from_checkpoint restore",
    "predict": "forward transform inference infer run",
    "parameters": "state_dict get_weights named_parameters trainable_variables weights",
}
_INSTEAD = {
    "compile": "Pass loss, optimizer and metrics to Trainer",
    "summary": "Print the trainer, or trainer.manifest; `onnxtrain inspect MODEL` lists a model's parameters",
    "step": "Call fit; for a loop of your own, use onnxtrain.api",
    "to": "Pass device='cuda' to Trainer",
    "cuda": "Pass device='cuda' to Trainer",
}


class Signature(NamedTuple):
    """A function whose unknown arguments are explained.

    Attributes:
        name: name in messages, e.g. "Trainer.fit".
        arguments: names of its arguments.
    """

    name: str
    arguments: tuple[str, ...]


_known: list[Signature] = []


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a public function: the TypeError for an unknown argument says which argument to pass.

    The signature remains that of the function, and nothing else changes: the names are compared before the call, so
    that no TypeError from inside of the function is caught. A comparison takes less than a microsecond.
    """
    code = inspect.unwrap(function).__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    signature = Signature(
        function.__qualname__.removesuffix(".__init__"),
        tuple(name for name in names if name not in ("self", "cls")),
    )
    _known.append(signature)
    allowed = frozenset(names)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= allowed:
            unknown = {name: value for name, value in kwargs.items() if name not in allowed}
            raise TypeError(_unknown_arguments(signature, unknown))
        return function(*args, **kwargs)

    return checked


def _unknown_arguments(signature: Signature, unknown: Mapping[str, Any]) -> str:
    names = ", ".join(map(repr, unknown))
    plural = "s" if len(unknown) > 1 else ""
    remedies = {name: _remedy(signature, name, value) for name, value in unknown.items()}
    known = {name: text for name, text in remedies.items() if text}
    advice = f"Its arguments are {', '.join(signature.arguments)}"
    if known:
        advice = "; ".join(
            f"instead of {name}, pass {text}" if plural else f"pass {text}" for name, text in known.items()
        )
    return f"{signature.name}() got unexpected keyword argument{plural} {names}. {advice[0].upper()}{advice[1:]}."


def _remedy(signature: Signature, name: str, value: object) -> str:
    """Returns what to pass in place of an unknown argument, e.g. "epochs=3 to Trainer.fit"; "" if it is not known."""
    short = isinstance(value, bool | int | float | str) and len(repr(value)) <= 40
    text = repr(value) if short else "..."
    ours = argument_name(name)
    if ours is None and name in _FOREIGN_ADVICE:
        return _ADVICE[_FOREIGN_ADVICE[name]][0].format(text)
    for candidate in filter(None, (ours, *get_close_matches(name, _all_arguments(signature), 1, 0.75))):
        # A function's own arguments first, then those of the other methods of its class, e.g. epochs of Trainer.fit.
        owner = next((one for one in _nearest_first(signature) if candidate in one.arguments), None)
        if owner is None:
            continue
        if isinstance(value, str) and candidate in _VALUES:
            text = repr(suggested_name(candidate, value, _OURS[candidate]) or value)
        passed = f"{candidate}={text}" if short else f"it as {candidate}"
        if owner.name == "generate_artifacts" or signature.name != "generate_artifacts":
            return passed if owner == signature else f"{passed} to {owner.name}"
        return f"{passed} where the artifacts are trained, such as {owner.name}"
    return ""


def _nearest_first(signature: Signature) -> list[Signature]:
    family = signature.name.split(".")[0]
    return sorted(
        _known, key=lambda one: (one != signature, one.name.split(".")[0] != family, _known.index(one))
    )


def _all_arguments(signature: Signature) -> list[str]:
    return list(dict.fromkeys(name for one in _nearest_first(signature) for name in one.arguments))


def argument_name(name: str) -> str | None:
    """Returns the argument of the Python API that corresponds to another library's; None if there is none.

    A name of the Python API itself is returned unchanged.

    >>> argument_name("per_device_train_batch_size"), argument_name("batch_size"), argument_name("nonsense")
    ('batch_size', 'batch_size', None)
    """
    if name in _ARGUMENTS or any(name in one.arguments for one in _known):
        return name
    return _FOREIGN.get(name) or _FOREIGN.get(name.lower())


def suggested_option(name: str, spellings: Iterable[str], value: str | None = None) -> str | None:
    """Returns what to pass in a shell in place of an unknown option; None if that is not known.

    Args:
        name: the unknown option, e.g. "--num_train_epochs".
        spellings: options that the command has, which may be the nearest ones.
        value: the word after the option; None if it has none.
    """
    spellings = list(spellings)
    plain = name.lstrip("-").replace("-", "_")
    dashed = "--" + plain.replace("_", "-").lower()
    if dashed in spellings:
        return dashed
    ours = argument_name(plain)
    if ours is None and plain in _FOREIGN_ADVICE:
        text = _ADVICE[_FOREIGN_ADVICE[plain]][1].format(value or "VALUE")
        return text if not text.startswith("--") or text.split()[0] in spellings else None
    if ours in _OPTIONS:
        option = _OPTIONS[ours]
        return option if not option.startswith("--") or option.split()[0] in spellings else None
    if ours is not None and (option := argument(ours)).startswith("--"):
        return option
    return next(iter(get_close_matches(dashed, spellings, 1, 0.75)), None)


def suggested_name(kind: str, received: object, ours: Iterable[str]) -> str | None:
    """Returns our name of a loss, optimizer, metric or schedule that has another name elsewhere; None if unknown.

    Args:
        kind: the argument: "loss", "optimizer", "metrics" or "scheduler".
        received: the name, or an object or class of another library, e.g. `torch.optim.Adam`.
        ours: our names. A mapping gives the name of the class for each, or its row in `_names.py`.
    """
    if not isinstance(received, str):
        kind_of = received if isinstance(received, type) else type(received)
        # Classes of the user's own may have any name.
        if kind_of.__module__.split(".")[0] not in (
            "torch",
            "keras",
            "tensorflow",
            "transformers",
            "tf_keras",
        ):
            return None
        received = kind_of.__name__
    text = _plain(received)
    classes = ours if isinstance(ours, Mapping) else {}
    synonyms = _VALUES[kind]
    for name in ours:
        row = classes.get(name, "")
        kind_name = row if isinstance(row, str) else row[0] if isinstance(row, tuple) else row.__name__
        same = {_plain(word) for word in (name, kind_name, *synonyms.get(name, "").split()) if word}
        if text in same:
            return name
    return next(iter(get_close_matches(received.lower(), list(ours), 1, 0.75)), None)


def advice(kind: str, received: object, ours: Iterable[str]) -> str:
    """Returns the remedy for an unknown name, e.g. "pass loss='cross_entropy'"; "" if no name is like it.

    For the arguments, see :func:`suggested_name`.
    """
    name = suggested_name(kind, received, ours)
    if name is None:
        return ""
    return f"pass {argument(kind, [name] if kind == 'metrics' else name)}"


def missing_attribute(kind: str, name: str) -> str:
    """Returns the message of the AttributeError for a method that other libraries have, e.g. `trainer.train`."""
    message = f"{kind!r} object has no attribute {name!r}"
    if name in _INSTEAD:
        return f"{message}. {_INSTEAD[name]}."
    ours = next((method for method, others in _METHODS.items() if name in others.split()), None)
    return message if ours is None else f"{message}. Use {kind}.{ours}."


def _plain(name: str) -> str:
    """Returns a name without case, punctuation and the word "loss"."""
    return re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("loss") or name.lower()


def _inverted(table: Mapping[str, str]) -> dict[str, str]:
    return {word: name for name, words in table.items() for word in words.split()}


_FOREIGN = _inverted(_ARGUMENTS)
_FOREIGN_ADVICE = _inverted(_ADVICE_NAMES) | {name: name for name in _ADVICE}
