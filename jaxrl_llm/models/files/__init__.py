"""Reads and writes models as Hugging Face directories."""
