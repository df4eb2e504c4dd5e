"""Read models from files, protos and the IR, check them, and write them, with weights beside the file if need be."""
