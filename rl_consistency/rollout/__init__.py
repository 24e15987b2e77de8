"""Rollout: sampled completions whose logprobs are the bits that training recomputes."""
