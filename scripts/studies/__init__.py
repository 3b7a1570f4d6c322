"""Studies: a table of settings x seeds, run, summed up and drawn."""
