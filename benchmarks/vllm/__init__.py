"""anyengine beside vLLM's own clients: ``AsyncMPClient``, ``SyncMPClient`` and ``AsyncLLM``, each the real one."""
