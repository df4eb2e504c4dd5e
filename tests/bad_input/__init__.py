"""One mistake per row of `docs/reference/error-messages.md`; see `bench` for how they run."""
