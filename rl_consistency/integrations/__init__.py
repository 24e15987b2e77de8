"""The patch inside trainers that others wrote."""
