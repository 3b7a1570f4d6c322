"""What is done around training: evaluate, generate, report, simulate."""
