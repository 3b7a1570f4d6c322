"""Parts shared by programs, and parts of long programs."""
