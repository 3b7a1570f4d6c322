"""Processes, signals, files and user code: what a run needs of its machine."""
