"""How fast anyengine is, measured against a lean client of the usual shape in the same run: ``python -m benchmarks``."""
