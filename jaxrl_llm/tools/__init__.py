"""Tools that no training run imports: evaluation, reports, simulation, ..."""
