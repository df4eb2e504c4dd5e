"""A connection of Flower's server to clients in the same process: messages are handed over by a call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

Change = Callable[[int, Message], Message]
"""Changes an answer on its way: gets the number of the client, from 0, and the answer."""


class LocalGrid(Grid):  # type: ignore[misc]
    """Runs a `ClientApp` for each of some clients, one after the other.

    Args:
        app: the app of the clients.
        clients: number of clients.
        change: changes answers on their way; an exception is a client that dies.
    """

    def __init__(self, app: ClientApp, clients: int, change: Change = lambda client, answer: answer) -> None:
        # A run of Flower's engines sets these; messages hold them.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._app, self._change = app, change
        self.contexts = {
            1000 + i: Context(
                run_id=1, node_id=1000 + i, node_config={"partition-id": i}, state=RecordDict(), run_config={}
            )
            for i in range(clients)
        }
        self.errors: list[str] = []

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        message.metadata._message_id = f"to {node}"  # the transport's part; a reply needs it
        try:
            return self._change(node - 1000, self._app(message, self.contexts[node]))
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}")
            return Message(Error(code=1, reason=str(error)), reply_to=message)

    def _absent(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("strategies use send_and_receive alone")

    set_run = create_message = push_messages = pull_messages = get_nodes = _absent
    run = property(_absent)
