"""``open_engine_client`` and the client that it gives: the nursery around an engine."""
