"""Federated learning with Flower: clients train with artifacts, and the server averages their parameters.

::

    # client.py, on each device: needs `onnxtrain[flower]`, but neither onnx nor PyTorch
    from onnxtrain.integrations.flower import ClientData, client_app

    app = client_app("artifacts", lambda context: ClientData(train=(x, labels)), batch_size=16)

    # server.py
    from flwr.serverapp.strategy import FedAvg
    from onnxtrain.integrations.flower import server_app

    app = server_app("artifacts", FedAvg(), rounds=10, output="federated")

Clients and server use the same artifacts. Messages contain only the values that training changes: the trainable
parameters (with LoRA, the adapters) and the running statistics of BatchNormalization.
"""

# Raised here rather than at first use: an ImportError from deep inside a client would be unhelpful.
try:
    import flwr  # noqa: F401  to say at once, and clearly, that it is missing
except ModuleNotFoundError as error:
    # Flower is installed but lacks one of its own dependencies.
    if error.name != "flwr":
        raise
    from onnxtrain.errors import MissingPackageError

    raise MissingPackageError(
        "onnxtrain.integrations.flower needs flwr, which is not installed: pip install 'onnxtrain[flower]'"
    ) from error

from onnxtrain.integrations.flower._client import client_app
from onnxtrain.integrations.flower._exchange import apply_arrays, trained_arrays
from onnxtrain.integrations.flower._privacy import SamplePrivacy, spent_epsilon
from onnxtrain.integrations.flower._secure import secure_client
from onnxtrain.integrations.flower._server import FederatedRun, run_federation, server_app
from onnxtrain.integrations.flower._strategy import CheckedStrategy, RefusedUpdate
from onnxtrain.integrations.flower._work import ClientData, Limits

__all__ = [
    "CheckedStrategy",
    "ClientData",
    "FederatedRun",
    "Limits",
    "RefusedUpdate",
    "SamplePrivacy",
    "apply_arrays",
    "client_app",
    "run_federation",
    "secure_client",
    "server_app",
    "spent_epsilon",
    "trained_arrays",
]
