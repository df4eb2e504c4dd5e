"""Reads models from files, protos and the IR, checks them, and writes them, with external data if necessary."""
