"""Which schedule of each op is the fastest on this GPU, at the shapes that a policy meets."""
