"""`kpt bench`: KPT beside its peers, in one run, behind a gate of correctness."""
