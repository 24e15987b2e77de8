"""CUDA graphs of the patched model, and what they are captured for."""
