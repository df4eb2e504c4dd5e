"""Read and write models: files, protos, external weights."""
