"""Studies: grids of variants x seeds, with tables and plots."""
