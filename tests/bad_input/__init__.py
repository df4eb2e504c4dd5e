"""One piece of wrong use per row of `docs/bad-input.md`; each runs in a process of its own kind, see `bench`."""
