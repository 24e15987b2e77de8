"""What ops that are not strict compute in place of ours: stock attention and log-probabilities."""
