"""The embedded sampler: rollouts from a distorted copy of the trainer."""
