"""From a forward graph to the training, eval and inference models."""
