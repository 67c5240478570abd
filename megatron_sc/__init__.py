"""Score centering for Megatron-Core."""
