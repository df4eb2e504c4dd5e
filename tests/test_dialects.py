"""The first lines of users of Keras, scikit-learn, PyTorch and Hugging Face: each error says what to write here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import models
from onnxtrain import Trainer, generate_artifacts, losses, optimizers, plan_training
from onnxtrain import _dialects as dialects
from onnxtrain.errors import GraphBuildError, InputError
from onnxtrain.schedules import SCHEDULES
from onnxtrain.trainer._metrics.metrics import make_metrics

# (dialect, line, class of the error, what it must say)
LINES = [
    ("Keras", "Trainer(model, 'cross_entropy', metrics=['acc'])", InputError, "pass metrics=['accuracy']"),
    (
        "Keras",
        "Trainer(model, loss='sparse_categorical_crossentropy')",
        GraphBuildError,
        "pass loss='cross_entropy'",
    ),
    ("Keras", "Trainer(model, loss='binary_crossentropy')", GraphBuildError, "pass loss='bce_with_logits'"),
    ("Keras", "Trainer(model, loss='crossentropy')", GraphBuildError, "pass loss='cross_entropy'"),
    ("Keras", "Trainer(model, 'cross_entropy', optimizer='Adam')", GraphBuildError, "pass optimizer='adam'"),
    ("Keras", "trainer.fit(x_train=x, y_train=y)", TypeError, "instead of y_train, pass it as targets"),
    ("Keras", "trainer.fit(x, y, validation_split=0.2)", TypeError, "Pass validation=0.2."),
    ("Keras", "trainer.fit(x, y, validation_data=(x, y))", TypeError, "Pass it as validation."),
    (
        "Keras",
        "trainer.fit(x, y, shuffle='true')",
        InputError,
        "shuffle must be True or False, received 'true'",
    ),
    (
        "Keras",
        "trainer.compile(optimizer='adam')",
        AttributeError,
        "Pass loss, optimizer and metrics to Trainer",
    ),
    (
        "scikit-learn",
        "Trainer(model, 'cross_entropy', max_iter=200)",
        TypeError,
        "Pass epochs=200 to Trainer.fit.",
    ),
    ("scikit-learn", "Trainer(model, 'cross_entropy', random_state=0)", TypeError, "Pass seed=0."),
    ("scikit-learn", "Trainer(model, loss='log_loss')", GraphBuildError, "pass loss='cross_entropy'"),
    ("scikit-learn", "Trainer(model, loss='squared_error')", GraphBuildError, "pass loss='mse'"),
    ("scikit-learn", "Trainer(model, 'cross_entropy', solver='adam')", TypeError, "Pass optimizer='adam'."),
    ("scikit-learn", "trainer.fit(X=x, y=y)", TypeError, "Instead of X, pass it as inputs"),
    (
        "scikit-learn",
        "trainer.fit(x, y, n_iter_no_change=5)",
        TypeError,
        "Pass callbacks=[onnxtrain.EarlyStopping(patience=5)] to Trainer.fit",
    ),
    ("scikit-learn", "trainer.score(x, y)", AttributeError, "Use Trainer.evaluate."),
    ("PyTorch", "Trainer(model, 'cross_entropy', lr=0.01)", TypeError, "Pass learning_rate=0.01."),
    ("PyTorch", "Trainer(model, loss='CrossEntropyLoss')", GraphBuildError, "pass loss='cross_entropy'"),
    (
        "PyTorch",
        "Trainer(model, 'cross_entropy', weight_decay=0.1)",
        TypeError,
        "Pass optimizer=onnxtrain.optimizers.AdamW(weight_decay=0.1).",
    ),
    (
        "PyTorch",
        "Trainer(model, 'cross_entropy', scheduler='CosineAnnealingLR')",
        InputError,
        "pass scheduler='cosine'",
    ),
    ("PyTorch", "Trainer(model, criterion='mse')", TypeError, "Pass loss='mse'."),
    ("PyTorch", "generate_artifacts(model, loss='MSELoss')", GraphBuildError, "pass loss='mse'"),
    ("PyTorch", "trainer.state_dict()", AttributeError, "Use Trainer.parameters."),
    (
        "Hugging Face",
        "Trainer(model, args=None, train_dataset=x)",
        TypeError,
        "epochs=... and batch_size=... to Trainer.fit",
    ),
    ("Hugging Face", "Trainer(model, 'mse', num_train_epochs=3)", TypeError, "Pass epochs=3 to Trainer.fit."),
    (
        "Hugging Face",
        "trainer.fit(x, y, per_device_train_batch_size=8)",
        TypeError,
        "Pass batch_size=8.",
    ),
    ("Hugging Face", "Trainer(model, optim='adamw_torch')", TypeError, "Pass optimizer='adamw'."),
    ("Hugging Face", "Trainer(model, 'mse', output_dir='run')", TypeError, "Pass directory='run'."),
    ("Hugging Face", "Trainer(model, 'mse', max_grad_norm=1.0)", TypeError, "Pass clip_grad_norm=1.0."),
    ("Hugging Face", "trainer.train()", AttributeError, "Use Trainer.fit."),
    # Of no library: a slip of the keyboard, and an argument of the right name in the wrong place.
    ("typo", "Trainer(model, 'mse', learnin_rate=0.1)", TypeError, "Pass learning_rate=0.1."),
    ("typo", "trainer.fit(x, y, batch=8)", TypeError, "Pass batch_size=8."),
    ("typo", "trainer.evaluate(x, y, epochs=3)", TypeError, "Pass epochs=3 to Trainer.fit."),
    ("typo", "trainer.fit(x, y, drop_last='no')", InputError, "drop_last must be True or False"),
    ("typo", "Trainer(model, loss='cros_entropy')", GraphBuildError, "pass loss='cross_entropy'"),
    ("typo", "trainer.predict(x, nonsense=1)", TypeError, "Its arguments are inputs, batch_size, transform."),
    (
        "typo",
        "generate_artifacts(model, loss='mse', lr=0.1)",
        TypeError,
        "Pass learning_rate=0.1 where the artifacts are trained",
    ),
]


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    model = models.mlp()
    x = np.zeros((8, 4), np.float32)
    return {
        "Trainer": Trainer,
        "generate_artifacts": generate_artifacts,
        "model": model,
        "trainer": Trainer(model, "cross_entropy"),
        "x": x,
        "y": np.zeros(8, np.int64),
    }


@pytest.mark.parametrize(("dialect", "line", "kind", "said"), LINES, ids=[line for _, line, *_ in LINES])
def test_a_wrong_first_line_is_told_the_right_one(
    dialect: str, line: str, kind: type[Exception], said: str, names: dict[str, Any]
) -> None:
    with pytest.raises(kind, match=re.escape(said)) as error:
        eval(line, names)
    # Nothing in between, such as the failed search that led to the error.
    assert error.value.__cause__ is None


def test_four_dialects_have_their_lines() -> None:
    dialects_of_lines = [dialect for dialect, *_ in LINES]
    assert all(
        dialects_of_lines.count(name) >= 5 for name in ("Keras", "scikit-learn", "PyTorch", "Hugging Face")
    )


@pytest.mark.torch
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda torch: torch.optim.Adam, "received the class torch's Adam; pass optimizer='adam'"),
        (
            lambda torch: torch.optim.SGD([torch.zeros(1)], lr=0.1),
            "an object of torch's SGD; pass optimizer='sgd'",
        ),
        (lambda torch: torch.optim.LBFGS, "the class torch's LBFGS; pass an OptimType"),
    ],
)
def test_an_optimizer_of_pytorch_is_named(make: Callable[[Any], object], said: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=re.escape(said)):
        Trainer(models.mlp(), "cross_entropy", optimizer=make(torch))


def test_a_class_of_the_user_is_not_taken_for_another_librarys() -> None:
    class Adam:
        pass

    with pytest.raises(TypeError, match="pass an OptimType"):
        Trainer(models.mlp(), "cross_entropy", optimizer=Adam())


def test_signatures_stay_those_of_the_functions() -> None:
    for function in (Trainer.fit, Trainer.evaluate, Trainer.predict, generate_artifacts, plan_training):
        parameters = inspect.signature(function).parameters
        assert all(p.kind is not inspect.Parameter.VAR_KEYWORD for p in parameters.values()), function
    assert list(inspect.signature(Trainer).parameters)[:4] == ["model", "loss", "optimizer", "learning_rate"]
    assert inspect.signature(Trainer.resume).parameters["path"].default is inspect.Parameter.empty


def test_type_errors_from_inside_of_a_call_are_not_touched(names: dict[str, Any]) -> None:
    def wrong(inputs: Any, targets: Any) -> Any:
        return f(lr=1)

    def f() -> None:
        pass

    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'lr'$"):
        names["trainer"].fit(names["x"], names["y"], transform=wrong, verbose=False)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'inputs'"):
        names["trainer"].fit()


def test_unknown_attributes_stay_unknown(names: dict[str, Any]) -> None:
    trainer = names["trainer"]
    assert not hasattr(trainer, "train")
    assert getattr(trainer, "summary", None) is None
    with pytest.raises(AttributeError) as error:
        trainer.nonsense  # noqa: B018
    assert str(error.value) == "'Trainer' object has no attribute 'nonsense'"


def test_a_subclass_may_have_other_arguments() -> None:
    class Mine(Trainer):
        def __init__(self, model: Any, lr: float) -> None:
            super().__init__(model, "cross_entropy", learning_rate=lr)

    assert Mine(models.mlp(), lr=0.5).learning_rate == 0.5


def test_suggested_names_exist() -> None:
    """Every row of the tables leads to a name that the functions accept."""
    arguments = {name for one in dialects._known for name in one.arguments}
    assert dialects._ARGUMENTS.keys() <= arguments
    for kind, accepted in (
        ("loss", losses.LOSSES),
        ("optimizer", optimizers.OPTIMIZERS),
        ("scheduler", SCHEDULES),
    ):
        assert dialects._VALUES[kind].keys() <= set(accepted)
    for name in dialects._METRICS:
        make_metrics([name])
    assert all(hasattr(Trainer, method) for method in dialects._METHODS)
    assert not any(hasattr(Trainer, name) for text in dialects._METHODS.values() for name in text.split())
    assert dialects._ADVICE_NAMES.keys() <= dialects._ADVICE.keys()


def test_no_name_of_ours_is_taken_for_a_foreign_one() -> None:
    trainer = {name for one in dialects._known if one.name.startswith("Trainer") for name in one.arguments}
    foreign = dialects._FOREIGN.keys() | dialects._FOREIGN_ADVICE.keys()
    # `device` is ours; its row is for `gpu` and others.
    assert foreign & trainer - {"device"} == set()
    for kind, accepted in (("loss", losses.LOSSES), ("optimizer", optimizers.OPTIMIZERS)):
        synonyms = {word for text in dialects._VALUES[kind].values() for word in text.split()}
        assert not synonyms & set(accepted)


def test_arguments_of_scikit_learns_networks_are_explained() -> None:
    """Read from the class itself: what is not ours by name has advice, or has no counterpart here."""
    from sklearn.neural_network import MLPClassifier

    without = {"activation", "beta_1", "beta_2", "epsilon", "power_t", "tol", "max_fun", "hidden_layer_sizes"}
    without |= {"warm_start", "nesterovs_momentum"}
    ours = {name for one in dialects._known for name in one.arguments}
    for name in inspect.signature(MLPClassifier).parameters:
        known = name in ours or name in dialects._FOREIGN or name in dialects._FOREIGN_ADVICE
        assert known or name in without, name


def test_the_trainer_describes_itself() -> None:
    model = models.mlp()
    trainer = Trainer(model, "cross_entropy", "sgd", learning_rate=0.05, frozen_params=["w1", "b1"])
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    trainer.fit(x, x[:, :3].argmax(axis=1), epochs=2, batch_size=10, verbose=False)
    sizes = {t.name: int(np.prod(t.dims)) for t in model.graph.initializer}
    trained = sum(size for name, size in sizes.items() if name not in ("w1", "b1"))
    text = repr(trainer)
    assert text.startswith("Trainer(")
    for part in (
        "-> ",
        "loss=CrossEntropyLoss",
        "optimizer=SGD",
        "learning_rate=0.05",
        f"trains {trained:,} of {sum(sizes.values()):,} parameters",
        "step 4, epoch 2)",
    ):
        assert part in text, text
