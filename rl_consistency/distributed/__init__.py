"""Several processes: the ordered sum of gradients, and what must be equal on all ranks."""
