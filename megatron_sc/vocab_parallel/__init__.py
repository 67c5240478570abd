"""The mathematics over vocabulary shards."""
