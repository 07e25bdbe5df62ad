"""The client as blocking calls: ``open_sync_engine_client``, for programs without an event loop."""
