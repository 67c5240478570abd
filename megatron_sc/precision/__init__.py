"""Number formats of trainer and sampler."""
