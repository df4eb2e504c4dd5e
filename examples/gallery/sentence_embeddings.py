"""Fine-tunes the sentence model all-MiniLM-L6-v2 to find functions of the standard library by what they do.

The pairs are names of functions and the first lines of their docstrings; the other pairs of a batch are the negatives.

Usage: python examples/gallery/sentence_embeddings.py [--seed 0] [--pytorch]
"""
