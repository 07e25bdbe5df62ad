"""How fast anyengine is, measured against a lean client in the same run: ``python -m benchmarks``."""
