"""From a PyTorch function to a functional ATen graph, with the semantics of autograd noted on the graph."""
