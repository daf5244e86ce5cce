"""Golden traces: a model's numbers of one machine, judged on another, and the first module that goes wrong."""
