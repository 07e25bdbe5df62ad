"""Starting an engine's process, watching it, ending it, and telling how it ended."""
