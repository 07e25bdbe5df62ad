"""Adapters: engines that run in the child process, each in a module of its own."""
