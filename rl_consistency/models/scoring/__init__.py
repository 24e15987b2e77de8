"""Log-probabilities of given tokens under the patched model."""
