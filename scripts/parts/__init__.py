"""Modules shared by programs, and parts of long programs."""
