"""What several programs, or one that is long, are made of."""
