"""Patches of Dynamo while it captures: each avoids one fault."""
