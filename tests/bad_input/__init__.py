"""One piece of wrong use per row of `docs/reference/error-messages.md`; each runs in a process of its own kind, see `bench`."""
