"""The Megatron glue."""
